"""Running out of memory on purpose: a test kit for anyone who trains. See `buoy explain testing`.

>>> from buoy.testing import byte_budget, every_allocation, shim
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buoy.testing.budget import byte_budget
    from buoy.testing.every_allocation import Failure, every_allocation

__all__ = ["Failure", "byte_budget", "every_allocation"]

# On first use: `shim` serves TensorFlow too, and that process must not load PyTorch.
_HOMES = {
    "Failure": "buoy.testing.every_allocation",
    "byte_budget": "buoy.testing.budget",
    "every_allocation": "buoy.testing.every_allocation",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'buoy.testing' has no attribute {name!r}")
    from importlib import import_module

    from buoy.errors import need_linux

    need_linux("`buoy.testing` needs")
    module = import_module(_HOMES[name])
    # All of it at once: the module is now an attribute of this package, and one of them has the same name.
    for other, home in _HOMES.items():
        if home == _HOMES[name]:
            globals()[other] = getattr(module, other)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
