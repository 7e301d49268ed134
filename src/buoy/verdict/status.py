"""What a wait status says: a signal, an exit code, or nothing; and the command `timeout`, which sends a signal."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple


class Status(NamedTuple):
    """A raw wait status and where it was read; `raw` is None when it is not known."""

    raw: int | None = None
    source: str | None = None

    @property
    def known(self) -> bool:
        """Whether anybody could read it."""
        return self.raw is not None

    @property
    def signal(self) -> int | None:
        """The signal that ended the process; None when none did, or it is not known."""
        low = (self.raw or 0) & 0x7F
        return low if low not in (0, 0x7F) else None

    @property
    def exit_code(self) -> int | None:
        """The code it left with by itself."""
        return (self.raw >> 8) & 0xFF if self.raw is not None and not self.raw & 0x7F else None

    @property
    def shell_code(self) -> int | None:
        """What a shell reports for it: the exit code, or 128+N."""
        return 128 + self.signal if self.signal is not None else self.exit_code

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal} ({signal_name(self.signal)})"
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return "unknown exit status"


def make_status(raw: int | None, source: str | None) -> Status:
    """A status from a recorded value; one that no kernel could have given counts as unknown."""
    if raw is None or not 0 <= raw <= 0xFFFF or raw & 0x7F == 0x7F:
        return Status(None, None)
    return Status(raw, source)


def signal_name(number: int) -> str:
    """`SIGKILL`, `SIGRTMIN+5`, or the number for one without a name.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'SIGRTMIN+6')
    """
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
