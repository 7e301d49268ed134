"""The checkpoints of a run folder and of its second home, as the mirror compares them."""

from __future__ import annotations

import os
from typing import Any

from buoy.checkpoint.homes import Home
from buoy.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES, STATE, VALUES, size_of, unseal
from buoy.checkpoint.reader import read_manifest
from buoy.checkpoint.state import decode
from buoy.checkpoint.store import Store
from buoy.errors import BuoyError


class Copy:
    """A checkpoint, here or in the second home, as retention sees it."""

    def __init__(self, name: str, fields: dict[str, Any], size: int) -> None:
        about = decode(fields["about"], str)
        if not isinstance(about, dict):
            raise ValueError("nothing about it")
        self.name = name
        self.fields = fields
        self.step = int(fields["step"])
        self.about: dict[str, object] = about
        saved = about.get("time")
        self.time = float(saved) if isinstance(saved, int | float) else None
        self.bytes = size
        self.complete = True

    @property
    def key(self) -> tuple[str, float | None]:
        """Which one it is, among those of the same name that several lives of a run may make."""
        return self.name, self.time

    @property
    def age(self) -> tuple[int, float]:
        """The newest is the greatest."""
        return self.step, self.time or 0.0

    def to_json(self) -> dict[str, object]:
        """For `list`."""
        return {
            "name": self.name,
            "step": self.step,
            "time": self.time,
            "bytes": self.bytes,
            "about": self.about,
        }


def local_copies(run: str) -> list[Copy]:
    """The committed checkpoints of the run folder, newest first."""
    found = []
    for entry in Store(run).list():
        if entry.complete:
            try:
                fields, _ = read_manifest(entry.folder)
                found.append(Copy(os.path.basename(entry.folder), fields, entry.bytes))
            except (OSError, BuoyError, ValueError):
                continue
    return found  # the store lists the newest first


def names_in(run: str) -> list[str]:
    """What the folder of checkpoints holds, by name: cheap to compare."""
    try:
        return sorted(os.listdir(os.path.join(run, "checkpoints")))
    except OSError:
        return []


def remote_copies(home: Home) -> list[Copy]:
    """The complete checkpoints of the second home, newest first."""
    found = []
    for name, sizes in home.sizes().items():
        if MANIFEST not in sizes:
            continue
        try:
            fields = unseal(home.read(name, MANIFEST, MOST_MANIFEST_BYTES), name)
            if all(sizes.get(file) == size_of(fields, file) for file in (STATE, VALUES)):
                found.append(Copy(name, fields, sum(sizes.values())))
        except (BuoyError, ValueError, FileNotFoundError):
            continue  # damaged there: no reason to trust it, nor to copy over it; or removed since it was listed
    return sorted(found, key=lambda copy: copy.age, reverse=True)
