"""What buoy borrows from frameworks under names that they call private: one file per library, and nowhere else.

Each entry says what it is, which versions it was checked on where that matters, and what is lost without it. A name
that is missing is reported once (`lacking`) and the entry does without; a training never ends because of one.

Checked on PyTorch 2.6 to 2.13, Keras 3.8 to 3.15, TensorFlow 2.18 to 2.21, lightning 2.6, transformers 5.23,
torchmetrics 1.9 and accelerate 1.15, unless an entry says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from buoy.errors import trouble

_NOTHING: Any = object()


def lacking(name: str, lost: str) -> None:
    """Report, once, that the installed framework has no such name, and what is lost: `buoy why` shows it."""
    trouble(lost, AttributeError(f"this version has no {name}"))


def borrowed(owner: Any, name: str, default: Any, lost: str) -> Any:
    """`owner.name`; where it does not exist, that is noted and the default returned."""
    found = getattr(owner, name, _NOTHING)
    if found is not _NOTHING:
        return found
    lacking(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", lost)
    return default


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while; what the owner does not have is left alone."""
    before = getattr(owner, name, _NOTHING)
    if before is _NOTHING:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
