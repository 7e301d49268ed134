"""The shape of the code in figures (`make measure`): how much there is, how far one must walk, what is borrowed.

Prints a table and writes bench/results/measure.json. What each figure means stands beside it; none is a goal by itself.

The files that a `run.backward` enters are counted without those that are no part of the step: `testing/`, which stands
in for a device that is full, and what only words a message (`text.py`, `units.py`, `training/messages.py`).
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "buoy"
RESULTS = ROOT / "bench" / "results" / "measure.json"
SMALL = 80  # lines: a file that only one other imports and that is no longer is a part of that other

# Runs in a child, so that what it loads is counted from nothing. Prints one JSON object.
JOURNEYS = """
import json, os, sys
home = sys.argv[1] + os.sep
no_part = ("testing/", "text.py", "units.py", "training/messages.py")
entered = set()

def look(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(home):
        entered.add(name[len(home):])

def walked(work):
    entered.clear()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(name for name in entered if not name.startswith(no_part))

def ours():
    return {name for name in sys.modules if name == "buoy" or name.startswith("buoy.")}

import torch
before = ours()
import buoy
buoy.Run
modules = len(ours() - before)
from buoy.testing import byte_budget

model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = buoy.Run(None)
run.track(model=model, optimizer=optimizer)
batch = torch.randn(1024, 256)

def backward():
    run.backward(batch, lambda part: model(part).square().mean())

def step():
    optimizer.step()
    optimizer.zero_grad()

first = walked(backward); step()
later = walked(backward); step()
later = walked(backward); step()
with byte_budget("8MiB") as device:
    short = walked(backward)
assert device.failures, "the small device was never full: the journey through an out-of-memory step was not made"
print(json.dumps({"modules": modules, "first": first, "later": later, "out of memory": short}))
"""


def main() -> int:
    """Measure and print; `--details` lists what stands behind the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--details", action="store_true", help="name the files and the borrowed names")
    arguments = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {path: path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    folders = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in files)
    lonely = one_importer(texts, trees)
    private = private_names(trees)
    shared = shared_names()
    journey = json.loads(
        subprocess.run(
            [sys.executable, "-c", JOURNEYS, str(PACKAGE)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    )
    rows: dict[str, object] = {
        "files under src": len(files),
        "lines under src": sum(text.count("\n") for text in texts.values()),
        "lines under tests": sum(p.read_text().count("\n") for p in (ROOT / "tests").rglob("*.py")),
        "longest file": max(text.count("\n") for text in texts.values()),
        "most files in one folder": max(folders.values()),
        "folders above 15 files": sum(number > 15 for number in folders.values()),
        f"files with one importer and under {SMALL} lines": len(lonely),
        "files entered by run.backward, first": len(journey["first"]),
        "files entered by run.backward, later": len(journey["later"]),
        "files entered by run.backward, out of memory": len(journey["out of memory"]),
        "modules executed by buoy.Run": journey["modules"],
        "private framework names outside _compat": len({name for _, name in private}),
        "file names shared by torch/ and keras/": f"{len(shared[0])} of {shared[1]} / {shared[2]}",
    }
    for name, value in rows.items():
        print(f"{name:52} {value}")
    if arguments.details:
        _details(lonely, private, journey, folders)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def module_of(path: Path) -> str:
    """`buoy.machine.host` for its file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def one_importer(texts: dict[Path, str], trees: dict[Path, ast.Module]) -> list[Path]:
    """Small files that exactly one other imports (by name in the code, or as text where it is loaded by name)."""
    importers: dict[str, set[str]] = defaultdict(set)
    modules = {module_of(path): path for path in texts}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in _imported(node):
                if name in modules and modules[name] != path:
                    importers[name].add(module_of(path))
    return [
        path
        for name, path in sorted(modules.items())
        if path.name != "__init__.py" and len(importers[name]) == 1 and texts[path].count("\n") < SMALL
    ]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("buoy."):
        return [node.value]
    return []


FRAMEWORKS = (
    "torch",
    "keras",
    "tensorflow",
    "lightning",
    "transformers",
    "torchmetrics",
    "datasets",
    "accelerate",
)
PRIVATE_MODULES = ("keras.src", "tensorflow.python", "torch._")
# Frameworks' names that something of ours has too, on its own `self`; anywhere else they are borrowed.
SHARED = {
    "_version", "_buffers", "_parameters", "_modules", "_scale", "_results", "_get_iterator", "_iterator",
    "_inputs", "_count", "_seed", "_rng", "_value", "_batch_size",
}  # fmt: skip
NOT_FRAMEWORKS = {"_getframe", "_launch", "_target"}  # python's own, of `sys` and `multiprocessing`


def private_names(trees: dict[Path, ast.Module]) -> set[tuple[str, str]]:
    """(file, name) of what frameworks call private and we use, outside of `_compat`.

    An underscored attribute counts unless it is ours: defined, assigned or set on `self` somewhere in this tree, or a
    mark of ours (`_knows_buoy`).
    """
    outside = {path: tree for path, tree in trees.items() if "_compat" not in path.parts}
    ours = {name for tree in outside.values() for node in ast.walk(tree) for name in _defined(node)}
    ours = (ours | NOT_FRAMEWORKS) - SHARED
    found = set()
    for path, tree in outside.items():
        if not _near_frameworks(path):
            continue
        for node in ast.walk(tree):
            for name in _borrowed(node):
                if name not in ours and "buoy" not in name:
                    found.add((path.relative_to(PACKAGE).as_posix(), name))
    return found


def _near_frameworks(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") in (
        "torch", "keras", "estimate", "planner", "training", "lightning", "transformers", "integrations", "testing",
        "data",
    )  # fmt: skip


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "self" else []
    return []


def _borrowed(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in SHARED
        return [] if is_own else [node.attr]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return [node.value] if _is_private(node.value) else []  # getattr(thing, "_name")
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(PRIVATE_MODULES)
    ):
        return [node.value]  # sys.modules.get("keras.src...")
    names = _imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else []
    return [
        name
        for name in names
        if name.split(".")[0] in FRAMEWORKS
        and (name.startswith(PRIVATE_MODULES) or any(_is_private(part) for part in name.split(".")))
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def shared_names() -> tuple[set[str], int, int]:
    """File names (with their sub-package) that both framework rooms have."""
    torch, keras = (
        {path.relative_to(PACKAGE / room).as_posix() for path in (PACKAGE / room).rglob("*.py")}
        - {"__init__.py"}
        for room in ("torch", "keras")
    )
    return torch & keras, len(torch), len(keras)


def _details(
    lonely: list[Path], private: set[tuple[str, str]], journey: dict[str, list[str]], folders: Counter[str]
) -> None:
    print("\nfolders:", ", ".join(f"{name} {number}" for name, number in folders.most_common()))
    print("\none importer:", ", ".join(path.relative_to(PACKAGE).as_posix() for path in lonely))
    for name in ("first", "later", "out of memory"):
        print(f"\nrun.backward, {name}:", ", ".join(journey[name]))
    print("\nprivate names:")
    for file, name in sorted(private):
        print(f"  {file:45} {name}")


if __name__ == "__main__":
    sys.exit(main())
