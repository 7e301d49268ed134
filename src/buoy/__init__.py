"""buoy keeps machine-learning training alive in small sessions, and says why it died.

>>> import buoy
>>> buoy.__version__
'0.1.0'

Nothing heavy is loaded here: each public name is imported on first use, so that `import buoy` in the first
cell of a notebook costs a few milliseconds and no third-party module.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - from source, where no pip has looked; this file is plain enough
    raise ImportError("buoy needs Python 3.11 or newer, and this is {}.{}.{}".format(*sys.version_info))

TYPE_CHECKING = False  # as typing has it, without its import
if TYPE_CHECKING:
    from buoy.checkpoint.retention import Keep
    from buoy.errors import BuoyError, ExitCode
    from buoy.planner.plan import plan
    from buoy.supervisor.watch import watch
    from buoy.training.run import Run
    from buoy.verdict import why
    from buoy.view.findings import check

__version__ = "0.1.0"

# name -> module that defines it; kept sorted, and equal to __all__ (tests/test_public_surface.py).
_HOMES = {
    "BuoyError": "buoy.errors",
    "ExitCode": "buoy.errors",
    "Keep": "buoy.checkpoint.retention",
    "Run": "buoy.training.run",
    "check": "buoy.view.findings",
    "plan": "buoy.planner.plan",
    "watch": "buoy.supervisor.watch",
    "why": "buoy.verdict",
}

__all__ = ["BuoyError", "ExitCode", "Keep", "Run", "check", "plan", "watch", "why"]


# Modules that people name in their own code: `buoy.keras.Guard`.
_ROOMS = ("keras", "lightning", "testing", "transformers")


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"buoy.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'buoy' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def load_ipython_extension(shell: object) -> None:
    """What `%load_ext buoy` calls."""
    from buoy.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: object) -> None:
    """What `%unload_ext buoy` calls."""
    from buoy.notebook.extension import unload

    unload(shell)
