"""How a training speaks to its user: one line on stderr."""

from __future__ import annotations

import os
import sys

from buoy.text import visible


def say(text: str) -> None:
    """One line to the user (a profile has several), on stderr; from a signal handler too."""
    # A name with a newline in it may not become a line that a CI log obeys.
    lines = [visible(line) if number and not line.lstrip().startswith("::") else f"buoy: {visible(line)}"
             for number, line in enumerate(text.split("\n"))]  # fmt: skip
    line = "\n".join(lines) + "\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except RuntimeError:  # the signal came in the middle of another write
        try:
            os.write(2, line.encode("utf-8", "replace"))
        except OSError:
            pass
    except (OSError, AttributeError, ValueError):
        pass  # stderr is closed


def say_nothing(text: str) -> None:
    """For ranks above 0: rank 0 speaks for all."""


def note_nothing(kind: str, **values: object) -> None:
    """For the events of a run without a folder."""
