"""The import arrows of docs/architecture.md, held: a room knows only the rooms below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "buoy"

# From the ground up. A module may import from its own line and from the lines before it.
LAYERS = [
    {"errors", "fields", "text", "units", "_compat"},  # _compat: what frameworks call private
    {"machine"},
    {"flight"},
    {"checkpoint", "microbatch", "estimate"},
    {"torch", "keras"},
    {"lint", "verdict", "view", "planner"},  # a result and how it looks: `str(verdict)` is its full text
    {"supervisor"},
    {"training"},
    # What people name in their own code.
    {
        "keras.guard",
        "keras.guarded_fit",
        "keras.loop",
        "lightning",
        "transformers",
        "integrations",
        "testing",
        "demo",
    },
    {"cli", "notebook"},
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
FRAMEWORKS = {"torch", "tensorflow", "keras", "lightning", "transformers", "numpy"}


def modules() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ("__init__.py", "__main__.py")
        and "bootstrap" not in path.parts
    ]


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    whole = ".".join(parts[:2])
    return whole if whole in HEIGHT else parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    for name in imported(path):
        parts = name.split(".")
        if path.name == "__init__.py" and parts[1:2] == [room(path)]:
            continue  # a package may offer all of itself: `buoy.keras.Guard`
        if parts[0] == "buoy" and len(parts) > 1 and parts[1] in HEIGHT:
            height = HEIGHT.get(".".join(parts[1:3]), HEIGHT[parts[1]])
            assert height <= HEIGHT[room(path)], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_framework_rooms_import_a_framework(path: Path) -> None:
    if room(path).split(".")[0] in (
        "torch",
        "keras",
        "lightning",
        "transformers",
        "integrations",
        "testing",
        "demo",
        "_compat",
    ):
        return
    if "tracing" in path.parts:
        return  # these run in a child process of their own

    assert not FRAMEWORKS & {name.split(".")[0] for name in imported(path)}


def test_every_room_has_a_place_in_the_picture() -> None:
    rooms = {room(path) for path in modules()}

    assert rooms <= set(HEIGHT), "a new room needs a line in LAYERS and in docs/architecture.md"
