"""The person's build function, found by `file.py:name` or `module:name`; for every framework the same."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from buoy.estimate.request import EstimateError


def load(path: str, name: str) -> Callable[[], Any]:
    """The function; its file runs, but not what it keeps under `if __name__ == "__main__"`."""
    if path.endswith(".py"):
        if not os.path.exists(path):
            raise EstimateError("no such file", received=path, expected="a Python file with a build function")
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        # Under this name `if __name__ == "__main__"` stays quiet: nothing is trained.
        spec = importlib.util.spec_from_file_location("buoy_traced", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["buoy_traced"] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise EstimateError(
            f"{path} has no function `{name}`",
            received=", ".join(
                sorted(found for found, value in vars(module).items() if inspect.isfunction(value))
            )
            or "no functions",
            expected="a function that returns a model and a batch",
        )
    return function  # type: ignore[no-any-return]
