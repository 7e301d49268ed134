"""Whether a recording still grows: by the process it is about, not by the age of its files, which a copy makes new."""

from __future__ import annotations

from typing import Any

from buoy.verdict.now import observe


def is_alive(about: dict[str, Any]) -> bool:
    """Whether the process that attempt.json tells of lives here."""
    return observe(about).alive


def may_live(about: dict[str, Any]) -> bool:
    """Whether it lives here, or was recorded elsewhere, where it cannot be seen."""
    now = observe(about)
    return now.alive or (bool(about) and now.same_machine is False)
