"""Takes out of a text where on which machine something was: a report is passed on."""

from __future__ import annotations

import os
import re
from typing import Any

_HOMES = re.compile(r"(?<![\w.])(?:/home/[^/\s`'\"]+|/Users/[^/\s`'\"]+|/root)(?=/|\b)")
_PATH = re.compile(r"(?<![\w.~:/\x00])/(?:[^/\s`'\",;:()]+/)+[^/\s`'\",;:()]*")
_QUOTED = re.compile(r"(?<=')/[^'`]+(?=')")
"""As a shell takes it where a name holds a space or the like."""
_KNOWN = re.compile(r"('\0\d+\0[^'`]*')")
"""A quoted path in a folder that is known."""
_COMMAND = re.compile(r"(`[^`]*`)")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


def without_places(value: Any, about: dict[str, Any], run_folder: str | None = None) -> Any:
    """The same value, its texts without host name, home and absolute paths; `about` is attempt.json."""
    host, cwd = about.get("hostname"), about.get("cwd")
    here = os.path.abspath(run_folder) if run_folder is not None else None
    folders = [folder for folder in (cwd, here) if isinstance(folder, str) and folder != "/"]

    names = [(folder, _seen_from(folder, cwd)) for folder in sorted(folders, key=len, reverse=True)]

    def told(text: str) -> str:
        # Known folders are kept apart until the others are shortened: their names may hold any sign.
        for number, (folder, _) in enumerate(names):
            text = text.replace(folder.rstrip("/") + "/", f"\0{number}\0")
        text = "".join(map(_without_paths, _COMMAND.split(text)))
        for number, (_, name) in enumerate(names):
            text = text.replace(f"\0{number}\0", name)
        if isinstance(host, str) and len(host) > 2:
            name = re.escape(host)
            text = re.sub(rf"\bhost {name}\b", "one host", text)
            text = re.sub(rf"\b{name}\b", "the host", text)
        return text

    return _mapped(value, told)


def _seen_from(folder: str, cwd: object) -> str:
    """A folder as it was typed where the training ran, so that a command with it still runs there; else its name."""
    if folder == cwd:
        return ""
    is_below = isinstance(cwd, str) and cwd != "/" and folder.startswith(cwd.rstrip("/") + "/")
    return (os.path.relpath(folder, str(cwd)) if is_below else os.path.basename(folder)) + "/"


def _without_paths(text: str) -> str:
    """A command that a shortened path makes impossible to run is no longer shown as one."""
    pieces = [
        piece if number % 2 else _PATH.sub(_shortened, _HOMES.sub("~", _QUOTED.sub(_shortened, piece)))
        for number, piece in enumerate(_KNOWN.split(text))
    ]
    shorter = "".join(pieces)
    return shorter.strip("`") if ".../" in shorter and text.startswith("`") else shorter


def _shortened(found: re.Match[str]) -> str:
    """Of a path its last two names: enough to know a file by, nothing of where it was."""
    path = found[0]
    return path if path.startswith(_SYSTEM) else ".../" + "/".join(path.rstrip("/").split("/")[-2:])


def _mapped(value: Any, told: Any) -> Any:
    if isinstance(value, str):
        return told(value)
    if isinstance(value, dict):
        return {key: _mapped(item, told) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, told) for item in value]
    return value
