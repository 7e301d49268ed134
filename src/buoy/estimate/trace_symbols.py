"""torch's symbolic sizes, left out until one is made: sympy comes with them, and a trace has none.

Fake tensors ask thousands of times whether a size is a symbol, and import a module for it that takes half a second.
Only that module makes symbols; until it is loaded every answer is known. While the stand-in carries its name, plain
numbers and truth values are answered here; anything else loads the real one. Tensors that are spread over several
devices are left out the same way: torch loads them with its first operation, to ask whether an argument is one of
them. For tracing processes alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from buoy.estimate.trace_loaded import spec_of_loaded

NAME = "torch.fx.experimental.symbolic_shapes"
FUNCTIONS = "torch.utils._sympy.functions"
ALGEBRA = "sympy"
SPREAD = "torch.distributed.tensor"


def leave_out_the_symbols() -> None:
    """Put the stand-ins in place, unless the real modules are loaded already."""
    _stand_in(NAME, _ANSWERS)
    _stand_in(FUNCTIONS, {"Max": lambda *args, **options: _real(FUNCTIONS).Max(*args, **options)})
    _stand_in(ALGEBRA, {"Basic": _Expression})  # is a number one of these? fake tensors ask


def leave_out_the_spread() -> None:
    """Once the model is built: a model that has such tensors has loaded them by then."""
    _stand_in(SPREAD, {"DTensor": _Spread})


def have_come_in() -> bool:
    """Whether the real module is loaded."""
    return NAME in sys.modules and not isinstance(sys.modules[NAME], _StandIn)


class _StandIn(ModuleType):
    """What a module is until more is asked of it than it was given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Finder:
    """Loads the real module before any of its parts."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        whole = next((each for each in (ALGEBRA, SPREAD) if name.startswith(f"{each}.")), None)
        if whole is None or not isinstance(sys.modules.get(whole), _StandIn):
            return None
        _real(whole)
        return spec_of_loaded(name)


def _stand_in(name: str, answers: dict[str, Any]) -> None:
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        module = _StandIn(name)
        vars(module).update(answers, __spec__=spec)
        if spec.submodule_search_locations is not None:
            module.__path__ = list(spec.submodule_search_locations)
        _put(name, module)
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)


def _real(name: str) -> ModuleType:
    stand_in = sys.modules[name]
    if isinstance(stand_in, _StandIn):
        if name != ALGEBRA:
            _real(ALGEBRA)  # which the others take for themselves as they are loaded
        del sys.modules[name]
        _put(name, importlib.import_module(name))
        for answer in [known for known in vars(stand_in) if not known.startswith("__")]:
            delattr(stand_in, answer)  # whoever still holds the stand-in asks the real one from now on
    return sys.modules[name]


def _put(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, module)


class _Expression:
    """None is made without the real one."""


class _Spread:
    """The same: nothing is an instance of it."""


class _DependsOnDataError(RuntimeError):
    """Named in `except` only: without a symbol nothing depends on one."""


def _of_a_value(answer: Callable[[Any], Any], kinds: tuple[type, ...]) -> Callable[[str], Callable[..., Any]]:
    """A function of one value, answered here for these very types (a symbol is of another)."""

    def named(name: str) -> Callable[..., Any]:
        def ask(value: Any, *args: Any, **options: Any) -> Any:
            if type(value) in kinds:
                return answer(value)
            return getattr(_real(NAME), name)(value, *args, **options)

        return ask

    return named


def _of_no_symbols(answer: Callable[[], Any]) -> Callable[[str], Callable[..., Any]]:
    """A function that looks for symbols, in whatever it is given."""

    def named(name: str) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            return getattr(_real(NAME), name)(*args, **options) if have_come_in() else answer()

        return ask

    return named


def _joined(join: Callable[[Any, Any], Any]) -> Callable[[str], Callable[..., Any]]:
    """`and`, `or` of several; torch's own uses the operators too, so that symbols keep their meaning."""
    return lambda _: lambda first, *others: functools.reduce(join, others, first)


def _equal(x: Any, y: Any) -> Any:
    """Of numbers, or of sequences of them, which may be a list and a tuple."""
    if isinstance(x, tuple | list) and isinstance(y, tuple | list):
        return len(x) == len(y) and functools.reduce(operator.and_, map(_equal, x, y), True)
    if type(x) is int and type(y) is int:
        return x == y
    return _real(NAME).sym_eq(x, y)


def _nothing() -> Iterator[Any]:
    return iter(())


_truth = _of_a_value(lambda value: value, (bool,))
_number = _of_a_value(lambda value: value, (int, bool))
_never = _of_a_value(lambda value: False, (int, float, bool))
_always = _of_a_value(lambda value: True, (int, float, bool))
_ANSWERS: dict[str, Any] = {
    name: kind(name)
    for kind, names in (
        (_truth, ("guard_or_true", "guard_or_false", "guard_size_oblivious", "statically_known_true", "expect_true")),
        (_number, ("guarding_hint_or_throw",)),
        (_never, ("is_symbolic", "is_nested_int")),
        (_always, ("has_guarding_hint",)),
        (_joined(operator.and_), ("sym_and",)),
        (_joined(operator.or_), ("sym_or",)),
        (_of_no_symbols(lambda: False), ("has_free_unbacked_symbols", "has_free_symbols")),
        (_of_no_symbols(lambda: None), ("compute_unbacked_bindings",)),
        (_of_no_symbols(set), ("free_symbols", "free_unbacked_symbols")),
        (_of_no_symbols(_nothing), ("_iterate_exprs", "_iterate_nodes")),
    )
    for name in names
} | {"sym_eq": _equal, "GuardOnDataDependentSymNode": _DependsOnDataError}  # fmt: skip
