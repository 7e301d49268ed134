"""`%buoy profile [STEPS]`: the next steps of the training in this notebook under its framework's profiler."""

from __future__ import annotations

from buoy.errors import UsageError
from buoy.flight.profile import WARM_UP, Profiling
from buoy.notebook.display import show_text

_STEPS = 3


def profile(words: list[str]) -> None:
    """Ask whichever training takes the next step: a guard may yet be made, inside the call of `fit`."""
    text = words[0] if words else str(_STEPS)
    if not text.isdigit() or not int(text) or len(words) > 1:
        raise UsageError(
            "`%buoy profile` takes a number of steps", received=" ".join(words), expected="`%buoy profile 5`"
        )
    Profiling.of_next_training = int(text)
    show_text(
        f"{text} steps of the next training with `buoy.Run`, `buoy.keras.Guard` or `buoy.keras.Loop` are profiled, "
        f"after {WARM_UP} that only warm up; what they were spent on is printed when they are done, or when the "
        "training ends before"
    )
