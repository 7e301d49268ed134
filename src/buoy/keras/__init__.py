"""Keras: the only code of buoy that touches it. `buoy.keras.Guard` keeps `model.fit` going, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buoy.keras.guard import Guard

__all__ = ["Guard"]


def __getattr__(name: str) -> object:
    if name != "Guard":
        raise AttributeError(f"module 'buoy.keras' has no attribute {name!r}")
    from importlib import import_module

    return import_module("buoy.keras.guard").Guard  # by name: the guard stands above this room


def __dir__() -> list[str]:
    return sorted([*globals(), "Guard"])
