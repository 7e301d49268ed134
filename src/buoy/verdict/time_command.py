"""The command `timeout`, under which a training may run: how long it lets it, and how it ends it."""

from __future__ import annotations

import os
from typing import NamedTuple

_WITH_VALUE = ("-k", "--kill-after", "-s", "--signal")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class TimeCommand(NamedTuple):
    """What stands in the command line."""

    word: str
    """The time as it was typed."""
    seconds: float
    kills: bool
    """Whether it may end the command with SIGKILL."""


def time_command(command: object) -> TimeCommand | None:
    """The `timeout` that this command begins with; None where it is another, or its time cannot be read.

    >>> time_command(["timeout", "-k", "5", "25m", "python", "train.py"])
    TimeCommand(word='25m', seconds=1500.0, kills=True)
    >>> time_command(["python", "train.py"]) is None
    True
    """
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words or os.path.basename(words[0]) != "timeout":
        return None
    kills, place = False, 1
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].partition("=")
        if name in _WITH_VALUE and not equals:
            place += 1
            value = words[place] if place < len(words) else ""
        is_kill_signal = value.upper().removeprefix("SIG") in ("KILL", "9")
        kills = (
            kills or name.startswith(("-k", "--kill-after")) or is_kill_signal or name in ("-s9", "-sKILL")
        )
        place += 1
    word = words[place] if place < len(words) else ""
    digits, factor = (word[:-1], _UNITS[word[-1]]) if word[-1:] in _UNITS else (word, 1.0)
    try:
        seconds = float(digits) * factor
    except ValueError:
        return None
    return TimeCommand(word, seconds, kills) if 0 < seconds < 1e9 else None
