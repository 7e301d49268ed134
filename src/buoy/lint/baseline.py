"""A baseline: findings that are known and left as they are, so that only new ones are reported."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable

from buoy.errors import UsageError
from buoy.lint.engine import Report
from buoy.lint.model import Diagnostic

SCHEMA = "buoy.baseline/2"


def load(path: str) -> Callable[[Diagnostic], bool]:
    """Whether a baseline file knows a finding."""
    known = _read(path)
    return lambda item: (_seen_from(path, item), item.fingerprint) in known


def _read(path: str) -> set[tuple[str, str]]:
    """Paths, seen from the baseline's folder, with fingerprints."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}")
        return {(str(item["path"]), str(item["fingerprint"])) for item in content["findings"]}
    except OSError as error:
        raise UsageError(
            "cannot read the baseline",
            received=f"{path}: {error.strerror}",
            expected="a file made by `--write-baseline`",
            hint=f"`buoy check . --write-baseline {shlex.quote(path)}`",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "this is not a baseline",
            received=f"{path}: {error}",
            expected=f"JSON with schema {SCHEMA}",
            hint=f"`buoy check . --write-baseline {shlex.quote(path)}` makes one",
        ) from None


def write(path: str, report: Report) -> None:
    """Write the findings of a report as the new baseline, whole or not at all."""
    findings = [
        {"path": _seen_from(path, item), "code": item.code, "fingerprint": item.fingerprint}
        for item in report.diagnostics
    ]
    text = json.dumps({"schema": SCHEMA, "findings": findings}, indent=1) + "\n"
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError as error:
        raise UsageError(
            "cannot write the baseline",
            received=f"{path}: {error.strerror}",
            expected="a path that can be written",
            hint="choose another path",
        ) from None


def hide(report: Report, known: Callable[[Diagnostic], bool]) -> None:
    """Take known findings out of a report and count them."""
    kept = [item for item in report.diagnostics if not known(item)]
    report.hidden += len(report.diagnostics) - len(kept)
    report.diagnostics = kept


def _seen_from(baseline: str, item: Diagnostic) -> str:
    """The finding's path as seen from the baseline's folder: the same wherever the command is run."""
    folder = os.path.dirname(os.path.abspath(baseline))
    return os.path.relpath(os.path.abspath(item.path), folder).replace(os.sep, "/")
