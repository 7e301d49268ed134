"""A part of a module that was left out, asked for by its name: loading the whole has loaded it, and once is enough."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType


def spec_of_loaded(name: str) -> ModuleSpec | None:
    """For a finder: the module that is there now; None where it is not, and others should look for it."""
    # Importing puts it back; where it is found there, it is loaded again.
    module = sys.modules.pop(name, None)
    return None if module is None else ModuleSpec(name, _Loaded(module))


class _Loaded(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importing has written its own
