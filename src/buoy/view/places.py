"""Takes out of a text where on which machine something was: a report is passed on."""

from __future__ import annotations

import os
import re
from typing import Any

_HOMES = re.compile(r"(?<![\w.])(?:/home/[^/\s`'\"]+|/Users/[^/\s`'\"]+|/root)(?=/|\b)")
_PATH = re.compile(r"(?<![\w.~:/])/(?:[^/\s`'\",;:()]+/)+[^/\s`'\",;:()]*")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


def without_places(value: Any, about: dict[str, Any], run_folder: str | None = None) -> Any:
    """The same value, its texts without host name, home and absolute paths; `about` is attempt.json."""
    host, cwd = about.get("hostname"), about.get("cwd")
    here = os.path.abspath(run_folder) if run_folder is not None else None
    folders = [folder for folder in (cwd, here) if isinstance(folder, str) and folder != "/"]

    def told(text: str) -> str:
        for folder in sorted(folders, key=len, reverse=True):
            name = "" if folder == cwd else os.path.basename(folder) + "/"
            text = text.replace(folder.rstrip("/") + "/", name)
        text = _PATH.sub(_shortened, _HOMES.sub("~", text))
        if isinstance(host, str) and len(host) > 2:
            name = re.escape(host)
            text = re.sub(rf"\bhost {name}\b", "one host", text)
            text = re.sub(rf"\b{name}\b", "the host", text)
        return text

    return _mapped(value, told)


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
