"""How a training speaks to the person: one line on stderr."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """One line to the person, on stderr; from a signal handler too."""
    line = f"buoy: {text}\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except RuntimeError:  # the signal came in the middle of another write
        try:
            os.write(2, line.encode())
        except OSError:
            pass
    except (OSError, AttributeError, ValueError):
        pass  # stderr is closed
