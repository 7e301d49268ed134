"""Hugging Face datasets' private names. From its sources (4.x): it is not installed where buoy is tested."""

from __future__ import annotations

from typing import Any

_MOST_STEPS = 100  # of a pipeline


def is_stream(dataset: object) -> bool:
    """One of its iterable datasets; the library is not imported for this."""
    return type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "_ex_iterable")


def loses_its_buffer(dataset: Any) -> bool:
    """It shuffles through a buffer, whose samples are not in its state: resumed by it, they would never come."""
    if not is_stream(dataset):
        return False
    left, looked_at = [dataset._ex_iterable], 0
    while left and looked_at < _MOST_STEPS:
        step, looked_at = left.pop(), looked_at + 1
        if "Shuffled" in type(step).__name__ and hasattr(step, "buffer_size"):
            return True
        inner = [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())]
        left += [each for each in inner if each is not None]
    return getattr(dataset, "_shuffling", None) is not None  # asked for, and not built yet


def for_one_pass(dataset: Any) -> Any:
    """Theirs begins every later pass, too, at the state that was loaded: so that goes into another object."""
    if not is_stream(dataset):
        return dataset
    other = object.__new__(type(dataset))
    vars(other).update(vars(dataset))  # a copy.copy() of theirs shares all attributes with the first
    return other
