"""`make compat`: the framework tests against the oldest and the newest versions, and against those of Colab's image.

    $ python scripts/compat.py [oldest newest colab] [--only-install] [-- PYTEST ARGUMENTS]

Each environment is a venv below .compat/ that is made once, of the Python that people have with such versions where
it is on this machine. Before buoy is installed into it the versions of everything are written down; installing buoy
must not move one. A table says what passed and what did not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".compat"
COLAB = ROOT / "tests" / "compat" / "colab.txt"
PYTHONS = {"oldest": "3.11", "newest": "3.12", "colab": "3.13"}
ENVIRONMENTS = {
    "oldest": ["torch==2.6.0", "tensorflow-cpu==2.18.1", "keras==3.8.0", "numpy<2.1"],
    "newest": ["torch", "tensorflow-cpu", "keras"],
    # `tensorflow-cpu` is the same code as the image's `tensorflow`, without a GPU's libraries.
    "colab": ["torch", "tensorflow-cpu==2.20.0", "keras", "transformers", "accelerate", "-c", str(COLAB)],
}
TOOLS = ["pytest>=9", "pytest-xdist", "pytest-timeout", "psutil", "safetensors"]
TESTED_WITH = ["torchmetrics", "torchdata", "accelerate"]  # the newest that fits what is there
TESTS = ["tests/recovery", "tests/training", "tests/keras", "tests/keras_step", "tests/test_lightning.py",
         "tests/test_transformers.py"]  # fmt: skip


def main() -> int:
    """Make the environments, install buoy into each, run the tests there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=[], metavar="NAME", help="oldest, newest, colab; all if none"
    )
    parser.add_argument("--only-install", action="store_true", help="run no tests")
    arguments, rest = parser.parse_known_args()
    results = {}
    for name in arguments.names or ENVIRONMENTS:
        python = environment(name)
        moved = install_buoy(python)
        failed = moved
        if not arguments.only_install:
            failed = run_tests(python, rest) or moved
        results[name] = (versions(python), moved, failed)
    for name, (found, moved, failed) in results.items():
        shown = ", ".join(
            f"{key} {found[key]}"
            for key in ("python", "torch", "tensorflow_cpu", "keras", "numpy")
            if key in found
        )
        print(f"{name:8} {'FAILED' if failed else 'passed'}  {'moved a version; ' if moved else ''}{shown}")
    return int(any(failed for _, _, failed in results.values()))


def environment(name: str) -> Path:
    """The Python of an environment, made at the first call."""
    python = FOLDER / name / "bin" / "python"
    done = FOLDER / name / ".installed"
    if not done.exists():
        chosen = interpreter(PYTHONS[name])
        subprocess.run([chosen, "-m", "venv", "--clear", FOLDER / name], check=True)
        pip(python, "install", "--quiet", *ENVIRONMENTS[name], *TOOLS, *TESTED_WITH)
        done.touch()
    return python


def interpreter(version: str) -> str:
    """A Python of this version, on the path or among pyenv's; the running one where there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in (shutil.which(f"python{version}"), *root.glob(f"versions/{version}.*/bin/python")):
        # pyenv leaves a command on the path that only says where the real one is.
        if python is not None and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
            return str(python)
    running = ".".join(map(str, sys.version_info[:2]))
    print(f"no Python {version} was found here: {running} is used", flush=True)
    return sys.executable


def install_buoy(python: Path) -> bool:
    """Install this checkout as a user would, with what it asks for; True if a version moved by that."""
    before = versions(python)
    pip(python, "install", "--quiet", str(ROOT))
    after = versions(python)
    pip(python, "uninstall", "--quiet", "--yes", "buoy")
    pip(python, "install", "--quiet", "--no-deps", "-e", str(ROOT))  # the tests look at the sources
    return {name: version for name, version in after.items() if name != "buoy"} != before


def versions(python: Path) -> dict[str, str]:
    """What is installed, buoy left out."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "freeze"], check=True, capture_output=True, text=True
    ).stdout
    said = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout
    found = {"python": said.split()[1]}
    for name, _, version in (line.partition("==") for line in listed.splitlines()):
        if version and name != "buoy":
            found[name.lower().replace("-", "_")] = version
    return found


def pip(python: Path, *words: str) -> None:
    """pip of that environment."""
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *words], check=True)


def run_tests(python: Path, rest: list[str]) -> bool:
    """Whether a test of the frameworks failed there."""
    chosen = [word for word in rest if word != "--"] or TESTS
    done = subprocess.run(
        [python, "-m", "pytest", "-q", *chosen], cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
