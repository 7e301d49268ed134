"""Reading values out of files that anything may have happened to: the wrong type is the same as not there."""

from __future__ import annotations

from typing import Any


def mapping(value: object) -> dict[str, Any]:
    """The object itself if it is one, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[dict[str, Any]]:
    """The objects of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A finite number; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e18 < value < 1e18 else None


def integer(value: object) -> int | None:
    """A whole number of sensible size."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def count(value: object) -> int | None:
    """A whole number that is not negative: bytes, pids, counters."""
    found = integer(value)
    return found if found is not None and found >= 0 else None


def text(value: object) -> str | None:
    """A text that says something."""
    return value if isinstance(value, str) and value else None
