"""Where the code will run: how much memory it will find there, and which releases of the frameworks."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from buoy.lint.facts import Facts
from buoy.machine.files import read_bounded
from buoy.units import format_bytes

_PIN = re.compile(
    r"\b(keras|tensorflow(?:[-_](?:gpu|cpu))?|numpy|pandas|pillow|(?:py)?torch)\s*(==|<=|<|~=|=)\s*(\d+(?:\.\d+)*)",
    re.IGNORECASE,
)
_OLD_TENSORFLOW = re.compile(r"%tensorflow_version\s+(1|2)\.x")
_PIN_FILES = re.compile(
    r".*requirements.*\.txt|environment\.ya?ml|setup\.(py|cfg)|pipfile|pyproject\.toml", re.IGNORECASE
)
_FOLDERS_UP = 4
# What Colab's image has, read there in 2026-08. Of pandas and Pillow only the least is known: NumPy 2 needs pandas 2.2,
# Python 3.13 needs Pillow 11. Other platforms are taken to have the newest.
_COLAB = {
    "keras": (3, 13),
    "tensorflow": (2, 20),
    "numpy": (2, 1, 3),
    "pandas": (2, 2),
    "pillow": (11,),
    "torch": (2, 11),
}


@dataclass(slots=True)
class Target:
    """A place to run: `colab-t4`, or `this` machine. Memory is read only when a rule has a size to compare."""

    name: str = "this"
    _memory: tuple[int | None, int | None, str] | None = None
    _versions: dict[str, tuple[int, ...] | None] = field(default_factory=dict)

    @property
    def ram(self) -> int | None:
        """Bytes of host memory; None when nobody knows."""
        return self._read()[0]

    @property
    def vram(self) -> int | None:
        """Bytes of the smallest device; None when there is none or nobody knows."""
        return self._read()[1]

    @property
    def words(self) -> str:
        """How messages call it: `colab-t4 (12.7 GiB RAM)`."""
        return self._read()[2]

    def _read(self) -> tuple[int | None, int | None, str]:
        if self._memory is None:
            ram, vram, said = _memory_here() if self.name == "this" else _memory_of(self.name)
            self._memory = (ram, vram, f"{said} ({format_bytes(ram)} RAM)")
        return self._memory

    def lacks(self, library: str, since: str, facts: Facts) -> bool:
        """Whether the release this file will meet no longer has what was removed in `since`.

        What the file or its folder pins comes first, then what is installed here (for `this`), else the newest.
        """
        met = _pinned(library, facts)
        if met is None:
            met = self._installed(library) if self.name == "this" else self._on_platform(library)
        return met is None or met >= version_key(since)

    def _on_platform(self, library: str) -> tuple[int, ...] | None:
        return _COLAB.get(library) if self.name.startswith("colab") else None

    def _installed(self, library: str) -> tuple[int, ...] | None:
        if library not in self._versions:
            from importlib import metadata

            try:
                self._versions[library] = version_key(metadata.version(library))
            except metadata.PackageNotFoundError:
                self._versions[library] = None
        return self._versions[library]


def version_key(version: str) -> tuple[int, ...]:
    """`2.15.0` as numbers, for comparing.

    >>> version_key("3.15.1") > version_key("3.8")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _pinned(library: str, facts: Facts) -> tuple[int, ...] | None:
    pins: dict[str, tuple[int, ...]] = {}
    folder = os.path.dirname(os.path.abspath(facts.document.path)) if facts.document.path != "-" else None
    if folder is not None:
        pins.update(_folder_pins(folder))
    for cell in facts.document.cells:
        for line in cell.shell:
            pins.update(_pins(line))
    if "TF_USE_LEGACY_KERAS" in facts.keys or "tf_keras" in facts.packages:
        pins["keras"] = (2, 15)
    if library == "keras" and "keras" not in pins and "tensorflow" in pins:
        # `tf.keras` was Keras 2 until TensorFlow 2.15.
        return pins["tensorflow"] if pins["tensorflow"] < (2, 16) else None
    if library == "tensorflow" and "tensorflow" not in pins and pins.get("keras", (3,)) < (3,):
        return pins["keras"]
    return pins.get(library)


def _pins(text: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, relation, version in _PIN.findall(text):
        key = version_key(version)
        if relation == "<" and key:
            key = (*key[:-1], key[-1] - 1, 999) if key[-1] else (key[0] - 1, 999)
        name = name.lower().replace("_", "-").removesuffix("-gpu").removesuffix("-cpu")
        found["torch" if name == "pytorch" else name] = key
    if old := _OLD_TENSORFLOW.search(text):
        found["tensorflow"] = (int(old.group(1)), 15 if old.group(1) == "1" else 999)
    return found


@cache
def _folder_pins(folder: str) -> dict[str, tuple[int, ...]]:
    """Pins of the nearest requirements file, up to the top of the repository."""
    for _ in range(_FOLDERS_UP):
        found: dict[str, tuple[int, ...]] = {}
        for path in _pin_files(folder):
            try:
                found.update(_pins(read_bounded(path, 65536, follow=True).decode(errors="replace")))
            except OSError:
                continue
        parent = os.path.dirname(folder)
        if found or parent == folder or os.path.exists(os.path.join(folder, ".git")):
            return found
        folder = parent
    return {}


def _pin_files(folder: str) -> list[str]:
    try:
        return [
            os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _PIN_FILES.fullmatch(name)
        ]
    except OSError:
        return []


@cache
def removed() -> dict[str, dict[str, Any]]:
    """The probed table of removed names, methods and keywords (scripts/probe_apis.py makes it)."""
    # Not importlib.resources: its import alone costs more than reading the file.
    with open(os.path.join(os.path.dirname(__file__), "data", "removed.json"), encoding="utf-8") as file:
        table: dict[str, dict[str, Any]] = json.load(file)
    return table


def target_for(names: list[str]) -> Target:
    """The tightest of the places asked for: what fits there fits everywhere asked. Unknown ids are refused at once."""
    if not names or names == ["this"]:
        return Target()
    found = [Target(name) for name in names]
    return min(found, key=lambda target: target.ram if target.ram is not None else 1 << 62)


def _memory_here() -> tuple[int | None, int | None, str]:
    from buoy.machine import limits

    here = limits.read()
    totals = [gpu["total"] for gpu in here.gpus if gpu.get("total")]
    return here.ram, min(totals) if totals else None, "this machine"


def _memory_of(name: str) -> tuple[int | None, int | None, str]:
    from buoy.machine import platforms

    row = platforms.by_id(name)
    ram, device = row.ram, row.device_memory
    said = name if ram is None or ram.verified else f"{name}, unverified"
    return int(ram.value) if ram else None, int(device.value) if device else None, said
