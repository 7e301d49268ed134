"""What frameworks call private is borrowed in `buoy/_compat/` alone, where one place says what is lost without it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure", ROOT / "scripts" / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def borrowed() -> dict[str, set[str]]:
    look = measure()
    trees = {path: ast.parse(path.read_text()) for path in sorted(look.PACKAGE.rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for file, name in look.private_names(trees):
        found.setdefault(file, set()).add(name)
    return found


def test_private_names_of_frameworks_are_in_compat_only() -> None:
    assert borrowed() == {}


def test_the_look_finds_what_is_borrowed() -> None:
    look = measure()
    code = (
        "import keras.src.tree\nfrom torch.utils import _pytree\n"
        "x._schema, getattr(x, '_cdata'), self._buffers, y._buffers"
    )
    tree = {look.PACKAGE / "torch" / "somewhere.py": ast.parse(code)}

    assert {name for _, name in look.private_names(tree)} == {
        "keras.src.tree", "torch.utils._pytree", "_schema", "_cdata", "_buffers",
    }  # fmt: skip
    assert look.private_names({look.PACKAGE / "_compat" / "torch.py": ast.parse(code)}) == set()
