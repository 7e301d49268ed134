"""torch's compiler, left out until somebody asks for it: fake tensors and optimizers load it for a few small things.

`import torch._dynamo` takes more than a second, and a trace compiles nothing. While stand-ins carry its name, what
tracing needs of it (its settings, `disable`, `graph_break`, `is_compiling`, a name for a constant) is answered here;
anything else, or an import of any of its other parts, loads the real one first. For tracing processes alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from buoy.estimate.trace_loaded import spec_of_loaded

NAME = "torch._dynamo"
SOURCE = f"{NAME}.source"
SETTINGS = f"{NAME}.config"
ALONE = {SETTINGS, f"{NAME}._trace_wrapped_higher_order_op"}
"""Parts that need none of the others; transformers imports the second one."""


def leave_out_the_compiler() -> None:
    """Put the stand-ins in place, unless the compiler is loaded already."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is None or spec.submodule_search_locations is None:
        return
    compiler, source = _StandIn(NAME), _StandIn(SOURCE)
    compiler.__spec__ = spec
    compiler.__path__ = list(spec.submodule_search_locations)
    vars(compiler).update(
        disable=_disable, assume_constant_result=_same, allow_in_graph=_same, graph_break=_nothing,
        is_compiling=_never, source=source,
    )  # fmt: skip
    vars(source).update(ConstantSource=_ConstantSource, RandomValueSource=_RandomValueSource)
    sys.modules |= {NAME: compiler, SOURCE: source}
    setattr(torch, "_dynamo", compiler)  # noqa: B010 - as importing it does
    sys.meta_path.insert(0, _Finder)
    vars(compiler)["config"] = importlib.import_module(SETTINGS)
    # torch's own log of what is traced shortens paths with a function of the compiler's; nobody reads it here.
    logging.getLogger("torch.__trace").handlers.clear()


def has_come_in() -> bool:
    """Whether the real compiler is loaded."""
    return NAME in sys.modules and not isinstance(sys.modules[NAME], _StandIn)


class _StandIn(ModuleType):
    """What `torch._dynamo` is until more is asked of it than it was given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _load()
        return getattr(importlib.import_module(self.__name__), name)


class _Finder:
    """Loads the real compiler before any of its parts: they import each other."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(f"{NAME}.") and name not in ALONE:
            _load()
            return spec_of_loaded(name)
        return None


class _ConstantSource:
    """The name of a tensor that nobody named."""

    def __init__(self, name: str) -> None:
        self.name = name


class _RandomValueSource:
    """A number that the compiler drew; there is none without it."""


def _load() -> None:
    if has_come_in():
        return
    sys.meta_path.remove(_Finder)
    for name in (NAME, SOURCE):
        sys.modules.pop(name, None)
    setattr(torch, "_dynamo", importlib.import_module(NAME))  # noqa: B010


def _disable(
    function: Callable[..., Any] | None = None,
    recursive: bool = True,
    *,
    wrapping: bool = True,
    **options: Any,
) -> Any:
    """As the compiler's own, which holds the arguments until the call is over: how long tensors live depends on it."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, wrapping=wrapping, **options)
    if not recursive:
        return function
    if isinstance(function, (type, torch.nn.Module)):
        _load()
        return importlib.import_module(NAME).disable(function, recursive, wrapping=wrapping, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return functools.wraps(function)(call) if wrapping else call


def _same(function: Any) -> Any:
    """A hint for what will be compiled; here nothing is."""
    return function


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _never() -> bool:
    return False
