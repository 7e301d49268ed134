"""Settings of `buoy check`: command line, then BUOY_CHECK_* variables, then the nearest buoy.toml or pyproject.toml."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from buoy.errors import UsageError

KEYS = ("select", "ignore", "on", "exclude")
SECTIONS = ("check",)


@dataclass(slots=True)
class Settings:
    """What can be set for a project."""

    select: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    on: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    folder: str = "."
    """What `exclude` is relative to: the folder of the file that says it."""


def load(start: str = ".", environ: dict[str, str] | None = None) -> Settings:
    """The settings for a folder; every error in them is reported at once."""
    settings = Settings()
    path, table = _nearest(start)
    if table is not None:
        settings.folder = os.path.dirname(path)
        _apply(settings, table, path)
    variables = os.environ if environ is None else environ
    for key in KEYS:
        text = variables.get(f"BUOY_CHECK_{key.upper()}")
        if text is not None:
            setattr(settings, key, [word for word in text.replace(",", " ").split() if word])
            if key == "exclude":
                settings.folder = "."
    return settings


def _nearest(start: str) -> tuple[str, Any]:
    folder = os.path.abspath(start)
    while True:
        for name in ("buoy.toml", "pyproject.toml"):
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue
            import tomllib

            try:
                with open(path, "rb") as file:
                    content: dict[str, Any] = tomllib.load(file)
            except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"cannot read {path}",
                    received=str(error),
                    expected="TOML",
                    hint="fix or remove the file",
                ) from None
            tools = content.get("tool", {})
            tools = tools if isinstance(tools, dict) else {}
            own = content if name == "buoy.toml" else tools.get("buoy", {})
            if name == "buoy.toml" or "buoy" in tools:
                _refuse_unknown_sections(own, path)
                return path, own.get("check", {}) if isinstance(own, dict) else own
        parent = os.path.dirname(folder)
        if parent == folder:
            return "", None
        folder = parent


def _refuse_unknown_sections(table: Any, path: str) -> None:
    from difflib import get_close_matches

    unknown = [key for key in table if key not in SECTIONS] if isinstance(table, dict) else []
    if unknown:
        before = "" if path.endswith("buoy.toml") else "tool.buoy."
        near = get_close_matches(unknown[0], SECTIONS, n=1)
        raise UsageError(
            f"{path} has a section that buoy does not know",
            received=", ".join(f"[{before}{key}]" for key in unknown),
            expected=" or ".join(f"[{before}{key}]" for key in SECTIONS),
            hint=f"did you mean `[{before}{near[0]}]`?" if near else "`buoy explain check` shows an example",
        )


def _apply(settings: Settings, table: Any, path: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(
            f"`check` in {path} is not a table",
            received=repr(table),
            expected="a table",
            hint="write `[tool.buoy.check]`",
        )
    from difflib import get_close_matches

    problems = []
    for key, value in table.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            problems.append(
                f"unknown key {key!r}"
                + (f": did you mean `{near[0]}`?" if near else f": the keys are {', '.join(KEYS)}")
            )
        elif not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            problems.append(f"{key!r} is {value!r}; expected a list of strings")
        else:
            setattr(settings, key, value)
    if problems:
        raise UsageError(
            f"{path} has settings that buoy cannot use",
            received="; ".join(problems),
            expected="[tool.buoy.check] with select, ignore, on, exclude",
            hint="`buoy explain check` shows an example",
        )
