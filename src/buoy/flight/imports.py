"""Calls functions right after a module was first imported, however it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

from buoy.errors import trouble

_waiting: dict[str, list[Callable[[], None]]] = {}
"""By name of a module that is not there yet, or is just being imported."""


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module is there: at once if it is, else when somebody has imported it."""
    if name in _waiting:
        _waiting[name].append(then)
    elif name in sys.modules:
        then()
    else:
        _waiting[name] = [then]
        sys.meta_path.insert(0, _Finder(name))


class _Finder:
    """One for each name: it stays until the module was imported, since many only ask whether one is there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target)  # type: ignore[arg-type]
            if spec is not None:
                self._wrap(spec)
                return spec
        return None

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            # On the instance, so that the loader keeps its type for everyone who looks at it.
            del loader.exec_module  # type: ignore[union-attr]
            try:
                original(module)
            except BaseException as error:
                from buoy.flight.last_words import leave_out_ours

                leave_out_ours(error)
                raise
            self._imported()

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
        except AttributeError:
            return  # a loader that takes no attributes: the module works, its steps are not counted

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for then in _waiting.pop(self._name, ()):
            try:
                then()
            except Exception as error:  # noqa: BLE001 - whoever imports a framework must get it
                trouble(f"what follows the import of {self._name}", error)
                sys.stderr.write(f"buoy: after the import of {self._name}: {error!r}; training continues\n")
