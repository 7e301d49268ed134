"""How `model.fit` learns to hand over to a guard among its callbacks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from buoy.errors import UsageError
from buoy.flight.last_words import leave_out_ours


def teach_fit(guard: Any) -> None:
    """Let `model.fit` hand over to a guard among its callbacks; once per process, nothing else changes.

    In `model.fit(..., callbacks=[Guard(...)])` Python looks `model.fit` up before it makes the guard. So the method
    must stay the object it is: what changes is the function inside the wrapper that Keras puts around it.
    """
    outer = keras.Model.fit
    cell = _cell_of_wrapped(outer)
    original = outer if cell is None else cell.cell_contents
    if getattr(original, "_knows_buoy", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # Keras says better what is wrong
        bound.apply_defaults()
        guards = [each for each in flat(bound.arguments.get("callbacks")) if isinstance(each, guard)]
        if not guards or not bound.arguments["self"].compiled:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_out_ours(error)
                raise
        if len(guards) > 1:
            raise UsageError("one training has one guard", received=f"{len(guards)} in `callbacks`")
        try:
            return guards[0].run_fit(original, dict(bound.arguments))
        except BaseException as error:
            leave_out_ours(error)
            raise

    fit._knows_buoy = True  # type: ignore[attr-defined]
    if cell is None:
        keras.Model.fit = fit
    else:
        cell.cell_contents = fit


def _cell_of_wrapped(function: Any) -> Any:
    """Where a decorated function keeps the one it wraps."""
    while hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is inner or getattr(cell.cell_contents, "_knows_buoy", False):
                return cell
        function = inner
    return None


def flat(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` was given, in whatever form."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks))
