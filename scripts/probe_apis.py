"""Makes src/buoy/lint/data/removed.json: names, methods and keywords that old releases had and today's do not.

    pip download --no-deps -d wheels keras==2.2.4 keras==2.3.1 keras==2.15.0 keras==3.0.5 keras==3.8.0 keras==3.13.0
    pip download --no-deps -d wheels numpy==1.23.5 numpy==1.26.4 numpy==2.0.2 pandas==1.5.3 pandas==2.0.3 pandas==2.2.3
    pip download --no-deps -d wheels pillow==10.0.0 pillow==11.0.0 tensorflow-cpu==2.16.2
    # of another Python, with --python-version 3.7 --only-binary=:all: (pillow: 3.10):
    #   torch==1.4.0 torch==1.8.1 torch==1.13.1 torch==2.1.2 torch==2.4.1 torch==2.6.0
    #   torch==2.7.1 torch==2.8.0 torch==2.9.1 torch==2.11.0 (3.7 to 3.11; the macOS wheels are the small ones)
    #   tensorflow==1.15.0 tensorflow-cpu==2.1.0 pandas==0.25.3 pillow==9.0.1
    python scripts/probe_apis.py wheels

Old names are read from the wheels' sources without importing them; each is then tried for real in the frameworks
installed beside this script (imported, looked up, called). Only what fails gets into the table, with the first of the
wheels that no longer has it. Libraries that are not installed here keep the rows that the file already has, so the
script can be run once per environment. Nothing in the table is typed by hand.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "src" / "buoy" / "lint" / "data" / "removed.json"
LIBRARIES = {
    "keras": "keras",
    "tensorflow": "tensorflow",
    "numpy": "numpy",
    "pandas": "pandas",
    "pillow": "PIL",
    "torch": "torch",
}
# Where torch keeps the list of its compiled functions and those that only raise, and a private module that
# much old code imports.
TORCH_FILES = {
    "torch/__init__.pyi": "torch",
    "torch/_C/_VariableFunctions.pyi": "torch",
    "torch/_six.py": "torch._six",
    "torch/_linalg_utils.py": "torch._linalg_utils",
}
# Modules of torch whose classes and functions people call by the module's name.
TORCH_CALLED = ("torch.optim.lr_scheduler", "torch.nn.functional", "torch.nn.utils.clip_grad")
# Where a library's own import path differs from the folder in its wheel.
TENSORFLOW_API = re.compile(r"^tensorflow(?:_core)?/(?:_api/v[12]/)?(?P<inner>.*?)/?__init__\.py$")
OLD_TF_KERAS_API = re.compile(
    r"^tensorflow(?:_core)?/python/keras/api/_v\d/keras/(?P<inner>.*?)/?__init__\.py$"
)
KERAS_API = "keras/api/_v2/keras/"
KERAS_API_IN_TENSORFLOW = "keras/_tf_keras/keras/"
# `tf.keras` is a part of Keras: what old TensorFlow wheels say of it counts as this release.
KERAS_OF_OLD_TENSORFLOW = "2.3.1"
PRIVATE = re.compile(
    r"^(pandas|numpy)\.core\b|\.(compat|distutils|f2py|raw_ops|src|legacy_tf_layers|tests?|testing|conftest)\b"
)
# Classes whose methods are called on objects of unknown type; their old methods are told by name alone.
METHOD_CLASSES = {
    "keras": (("keras.Sequential", ("Model", "Sequential", "Network", "Container")),),
    "pandas": (("pandas.DataFrame", ("DataFrame", "NDFrame")), ("pandas.Series", ("Series", "NDFrame"))),
}
# Required arguments with which a class can be made, so that one keyword more shows whether it is still taken.
FILLERS: dict[str, Any] = {
    "units": 2,
    "filters": 2,
    "kernel_size": 3,
    "input_dim": 4,
    "output_dim": 2,
    "filepath": "x.keras",
    "rate": 0.5,
    "pool_size": 2,
    "size": 2,
    "n": 2,
    "target_shape": (2,),
    "dims": (1,),
    "stddev": 0.1,
    "alpha": 0.1,
    "l1": 0.1,
    "monitor": "loss",
    "cropping": 1,
    "padding": 1,
    "axes": 1,
    "schedule": float,
    "filename": "x.csv",
}


class Names(ast.NodeVisitor):
    """Top-level names, class methods and signatures of one module."""

    def __init__(self, package_file: bool, root: str) -> None:
        self.names: set[str] = set()
        self.methods: dict[str, set[str]] = {}
        self.signatures: dict[str, list[str]] = {}
        self.variables: set[str] = set()
        """Names that are only assigned: in torch those are inner matters of a module."""
        self.raising: set[str] = set()
        """Functions that are still there and do nothing but raise."""
        self.package_file, self.root = package_file, root

    def visit_Module(self, node: ast.Module) -> None:
        """Read the module's top level."""
        for item in node.body:
            self.statement(item)

    def statement(self, item: ast.stmt) -> None:
        """Take what one statement defines."""
        if isinstance(item, ast.FunctionDef):
            self.add(item.name)
            self.signatures[item.name] = parameters(item)
            if only_raises(item):
                self.raising.add(item.name)
        elif isinstance(item, ast.ClassDef):
            self.add(item.name)
            members = [member for member in item.body if isinstance(member, ast.FunctionDef)]
            self.methods[item.name] = {
                member.name
                for member in members
                if not member.name.startswith("_") and not is_property(member)
            }
            for member in members:
                key = item.name if member.name == "__init__" else f"{item.name}.{member.name}"
                self.signatures[key] = parameters(member)[1:]
        elif isinstance(item, ast.Assign):
            for target in item.targets:
                if isinstance(target, ast.Name):
                    self.add(target.id)
                    self.variables.add(target.id)
        elif isinstance(item, ast.ImportFrom) and self.package_file:
            if item.level or (item.module or "").partition(".")[0] in self.root:
                for alias in item.names:
                    self.add(alias.asname or alias.name)
        elif isinstance(item, ast.If | ast.Try):
            for inner in item.body:
                self.statement(inner)

    def add(self, name: str) -> None:
        """Keep a public name."""
        if not name.startswith(("_", "namedtuple_")) and name != "*":
            self.names.add(name)


def is_property(function: ast.FunctionDef) -> bool:
    """Whether it is read like an attribute."""
    return any(
        "property" in ast.dump(decorator) or "setter" in ast.dump(decorator)
        for decorator in function.decorator_list
    )


def only_raises(function: ast.FunctionDef) -> bool:
    """Whether its whole body, a docstring apart, is one `raise`."""
    body = [item for item in function.body if not isinstance(item, ast.Expr)]
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of its parameters."""
    arguments = function.args
    return [item.arg for item in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def read_wheel(path: Path) -> tuple[str, str, dict[str, Names]]:
    """Library, version, and its modules by import path."""
    library, version = path.name.split("-")[:2]
    library = library.lower().removesuffix("_cpu")
    modules: dict[str, Names] = {}
    with zipfile.ZipFile(path) as wheel:
        for entry in wheel.namelist():
            if not entry.endswith((".py", ".pyi")) or re.search(
                r"(^|/)(tests?|testing|_\w*test)/|_test\.py|conftest|/setup\.py", entry
            ):
                continue
            for module in import_paths(library, entry):
                found = Names(entry.endswith("__init__.py"), LIBRARIES[library] + "tensorflow")
                try:
                    found.visit(ast.parse(wheel.read(entry)))
                except SyntaxError:
                    continue
                if module in modules:  # TensorFlow 1.15 has its top level in two places
                    found.names |= modules[module].names
                    found.raising |= modules[module].raising
                modules[module] = found
    return library, version, modules


def import_paths(library: str, entry: str) -> list[str]:
    """The public import paths under which a wheel's file can be reached."""
    module = entry[: -len("/__init__.py")] if entry.endswith("/__init__.py") else entry[:-3]
    if entry in TORCH_FILES:
        return [TORCH_FILES[entry]]
    if entry.endswith(".pyi"):
        return []
    if library == "tensorflow":
        if old := OLD_TF_KERAS_API.match(entry):
            return [public("tensorflow/keras/" + old.group("inner"))]
        found = TENSORFLOW_API.match(entry)
        inner = found.group("inner") if found else ""
        if found is None or ("_api" not in entry and inner) or inner.startswith(("compat", "_")):
            return []
        return [public("tensorflow/" + inner)]
    if library == "keras" and entry.startswith(KERAS_API_IN_TENSORFLOW):
        return [public("tensorflow/keras/" + module[len(KERAS_API_IN_TENSORFLOW) :])]
    if library == "keras" and entry.startswith(KERAS_API):
        inner = module[len(KERAS_API) :]
        return [public("keras/" + inner), public("tensorflow/keras/" + inner)]
    if (
        any(part.startswith("_") for part in module.split("/"))
        or "/src/" in f"/{module}/"
        or "/api/" in f"/{module}/"
    ):
        return []
    return [public(module)]


def public(path: str) -> str:
    """A folder path as an import path."""
    return path.strip("/").replace("/", ".")


def exists(name: str) -> bool:
    """Whether a dotted name can be imported or reached by attributes in this environment."""
    parts = name.split(".")
    try:
        value: Any = importlib.import_module(parts[0])
    except ImportError:
        return False
    for index, part in enumerate(parts[1:], 1):
        try:
            value = getattr(value, part)
            continue
        except Exception:  # noqa: BLE001 - numpy raises AttributeError, lazy loaders raise what they like
            pass
        here, path = ".".join(parts[:index]), ".".join(parts[: index + 1])
        # A function may stand in front of the module of the same name (`torch.autograd.gradcheck`): ask the module.
        module = sys.modules.get(here)
        if module is not None and hasattr(module, part):
            value = getattr(module, part)
            continue
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError as error:
            # Something else that it needs is missing here: whether the name is gone cannot be told.
            return error.name is not None and not f"{path}.".startswith(f"{error.name}.")
        except Exception:  # noqa: BLE001
            return False
    return True


def reach(name: str) -> Any:
    """The object behind a dotted name that exists."""
    value: Any = importlib.import_module(name.split(".")[0])
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def keyword_gone(target: Any, keyword: str) -> bool:
    """Whether calling with this keyword fails, and without it does not."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return False
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if keyword in signature.parameters:
        return False
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return True
    if target.__name__ in METHOD_CALLS:
        return method_refuses(target.__name__, keyword)
    required = {
        name: FILLERS.get(name)
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name != "self"
    }
    if None in required.values() or not inspect.isclass(target):
        return False
    try:
        target(**required)
    except Exception:  # noqa: BLE001
        return False
    try:
        target(**required, **{keyword: 0.01 if keyword in ("lr", "decay") else 1})
    except Exception as error:  # noqa: BLE001
        return keyword in str(error)
    return False


METHOD_CALLS = {"fit": ("x", "y"), "evaluate": ("x", "y"), "predict": ("x",)}


def method_refuses(method: str, keyword: str) -> bool:
    """Whether a real model's method fails with this keyword, as seen by calling it."""
    import keras
    import numpy

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    data = {"x": numpy.zeros((2, 2)), "y": numpy.zeros((2, 1))}
    try:
        getattr(model, method)(
            **{name: data[name] for name in METHOD_CALLS[method]}, verbose=0, **{keyword: 1}
        )
    except Exception as error:  # noqa: BLE001
        return keyword in str(error)
    return False


def numpy_names(wheel: Path) -> set[str]:
    """The names of an old NumPy, from importing the wheel in a bare interpreter: most come by `import *`."""
    import subprocess
    import tempfile

    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); sys.path.insert(0, sys.argv[1]); import numpy; "
        "print(*(set(dir(numpy)) | set(getattr(numpy, '__deprecated_attrs__', ()))))"
    )
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, folder], capture_output=True, text=True, check=True
        )
    return {name for name in done.stdout.split() if not name.startswith("_")}


def probe(library: str, releases: list[tuple[str, dict[str, Names]]]) -> dict[str, Any]:
    """The table of one installed library."""
    installed = importlib.import_module(LIBRARIES[library]).__version__.partition("+")[0]
    releases.sort(key=lambda item: version_key(item[0]))
    seen: dict[str, str] = {}
    for version, modules in releases:
        for module, found in modules.items():
            names = found.names - found.variables if library == "torch" else found.names
            for name in (module, *(f"{module}.{item}" for item in names)):
                seen[name] = version
    roots = ("keras.", "tensorflow.keras.") if library == "keras" else (LIBRARIES[library] + ".",)
    removed = {
        name: last
        for name, last in seen.items()
        if name.startswith(roots) and not PRIVATE.search(name) and not exists(name)
    }
    raising = still_raising(library, releases)
    removed |= raising
    # A name below a module that is gone says nothing more than the module.
    top = {
        name: last
        for name, last in removed.items()
        if not any(prefix in removed for prefix in prefixes(name))
    }
    versions = [version for version, _ in releases] + [installed]
    gone = {
        name: next(version for version in versions if version_key(version) > version_key(last))
        for name, last in top.items()
    }
    return {
        "version": installed,
        "names": dict(sorted(gone.items())),
        "raising": sorted(raising),
        "methods": old_methods(library, releases, versions),
        "keywords": old_keywords(library, releases, versions),
    }


def still_raising(library: str, releases: list[tuple[str, dict[str, Names]]]) -> dict[str, str]:
    """Functions of torch that exist and only raise, with the last release in which they worked."""
    import torch

    found: dict[str, str] = {}
    for name in dir(torch) if library == "torch" else ():
        value = getattr(torch, name)
        if not inspect.isfunction(value) or name.startswith("_"):
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
        if isinstance(source, ast.FunctionDef) and only_raises(source):
            worked = [
                version
                for version, modules in releases
                if not any(value.__name__ in module.raising for module in modules.values())
            ]
            if worked:
                found[f"torch.{name}"] = worked[-1]
    return found


def prefixes(name: str) -> list[str]:
    """Every module above a name."""
    parts = name.split(".")
    return [".".join(parts[:index]) for index in range(2, len(parts))]


def old_methods(
    library: str, releases: list[tuple[str, dict[str, Names]]], versions: list[str]
) -> dict[str, dict[str, str]]:
    """Methods that a class had and has no more."""
    table: dict[str, dict[str, str]] = {}
    for current, old_names in METHOD_CLASSES.get(library, ()):
        last: dict[str, str] = {}
        for version, modules in releases:
            for found in modules.values():
                for old in old_names:
                    for method in found.methods.get(old, ()):
                        last[method] = version
        live = reach(current)
        table[current] = {
            method: next(v for v in versions if version_key(v) > version_key(version))
            for method, version in sorted(last.items())
            if not hasattr(live, method)
        }
    return table


def old_keywords(
    library: str, releases: list[tuple[str, dict[str, Names]]], versions: list[str]
) -> dict[str, dict[str, str]]:
    """Keywords of callables that still exist under the same name: `keras.optimizers.Adam` had `lr`."""
    if library not in ("keras", "torch"):
        return {}
    last: dict[str, dict[str, str]] = {}
    for version, modules in releases:
        for module, found in modules.items():
            area = module.split(".")[1] if module.count(".") else ""
            for name, keywords in found.signatures.items():
                owner = None
                if library == "torch":
                    owner = (
                        f"{module}.{name}"
                        if module in TORCH_CALLED and name.isidentifier() and name[0] != "_"
                        else None
                    )
                elif area in ("optimizers", "callbacks", "layers") and "." not in name:
                    owner = f"keras.{area}.{name}"
                elif name.startswith("Model."):
                    owner = f"keras.{name}"
                if owner is not None:
                    for keyword in keywords:
                        last.setdefault(owner, {})[keyword] = version
    table: dict[str, dict[str, str]] = {}
    for owner, had in sorted(last.items()):
        if not exists(owner):
            continue
        target = reach(owner)
        # A keyword that left the signature may still have been taken through **kwargs: only this major version
        # was tried.
        major = next(v for v in versions if version_key(v)[0] == version_key(versions[-1])[0])
        gone = {
            keyword: major
            if library == "keras"
            else next(v for v in versions if version_key(v) > version_key(version))
            for keyword, version in sorted(had.items())
            if keyword not in ("self", "cls", "args", "kwargs") and keyword_gone(target, keyword)
        }
        if gone:
            table[owner] = gone
    return table


def version_key(version: str) -> tuple[int, ...]:
    """A version as numbers, for comparing."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def main(folder: str) -> None:
    """Read the wheels, probe what is installed, and update the table."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    releases: dict[str, list[tuple[str, dict[str, Names]]]] = {}
    for path in sorted(Path(folder).glob("*.whl")):
        library, version, modules = read_wheel(path)
        releases.setdefault(library, []).append((version, modules))
        if library == "numpy":
            modules.clear()
            modules["numpy"] = Names(True, "numpy")
            modules["numpy"].names = numpy_names(path)
        if library == "tensorflow":
            inside = {
                name: modules.pop(name) for name in list(modules) if name.startswith("tensorflow.keras")
            }
            releases.setdefault("keras", []).append((KERAS_OF_OLD_TENSORFLOW, inside))
            if "tensorflow" in modules:
                modules["tensorflow"].names.discard("keras")
    table = json.loads(OUT.read_text()) if OUT.exists() else {}
    for library, found in releases.items():
        try:
            importlib.import_module(LIBRARIES[library])
        except ImportError:
            sys.stderr.write(f"{library}: not installed here, rows kept\n")
            continue
        table[library] = probe(library, found)
        rows = table[library]
        methods, keywords = (sum(map(len, rows[kind].values())) for kind in ("methods", "keywords"))
        counts = f"{len(rows['names'])} names, {methods} methods, {keywords} keywords"
        sys.stderr.write(f"{library} {rows['version']}: {counts}\n")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
