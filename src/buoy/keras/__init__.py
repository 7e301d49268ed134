"""Keras: the only code of buoy that touches it.

`Guard` keeps `model.fit` going bit for bit, `Loop` one's own loop; `gradients` computes a batch there in micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buoy.errors import need_linux

if TYPE_CHECKING:
    from buoy.keras.guard import Guard
    from buoy.keras.loop import Loop
    from buoy.keras.step.tape import gradients

__all__ = ["Guard", "Loop", "gradients"]

_HOMES = {"Guard": "buoy.keras.guard", "Loop": "buoy.keras.loop", "gradients": "buoy.keras.step.tape"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'buoy.keras' has no attribute {name!r}")
    from importlib import import_module

    need_linux(f"`buoy.keras.{name}` needs")
    return getattr(import_module(_HOMES[name]), name)  # by name: the first two stand above this room


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
