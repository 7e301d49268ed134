"""Keras: the only code of buoy that touches it. `Guard` keeps `model.fit` going bit for bit, `Loop` one's own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buoy.keras.guard import Guard
    from buoy.keras.loop import Loop

__all__ = ["Guard", "Loop"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'buoy.keras' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"buoy.keras.{name.lower()}"), name)  # by name: both stand above this room


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
