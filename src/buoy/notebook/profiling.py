"""`%buoy profile [STEPS]`: the next steps of the training in this notebook under its framework's profiler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from buoy.errors import UsageError

_STEPS = 3


def profile(names: Mapping[str, Any], words: list[str]) -> None:
    """Ask the newest run for it; a guard that is made inside the call of `fit` gets it from here too."""
    from buoy.notebook.extension import show_text
    from buoy.training.run import Run

    text = words[0] if words else str(_STEPS)
    if not text.isdigit() or not int(text) or len(words) > 1:
        raise UsageError(
            "`%buoy profile` takes a number of steps", received=" ".join(words), expected="`%buoy profile 5`"
        )
    steps = int(text)
    guard = getattr(sys.modules.get("buoy.keras.guard"), "Guard", ())
    runs = [value for value in names.values() if isinstance(value, Run)]
    guards = [value for value in names.values() if isinstance(value, guard)]
    if runs or guards:
        (runs or guards)[-1].profile(steps)
    elif "keras" in sys.modules:
        from buoy.keras.profile import Profiling

        Profiling.for_next_fit = steps
    else:
        raise UsageError(
            "there is no run to profile",
            expected="a `buoy.Run`, or Keras with a `buoy.keras.Guard`",
            hint='`run = buoy.Run("runs/cats")`, then train with `run.batches(loader)`',
        )
    show_text(f"the next {steps} steps are profiled; what they were spent on is printed when they are done")
