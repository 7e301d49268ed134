"""The checkpoints of a run folder and of its second home, as the mirror compares them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from typing import Any

from buoy.checkpoint.homes import Home
from buoy.checkpoint.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    STATE,
    VALUES,
    NewerCheckpoint,
    saved_at,
    size_of,
    unseal,
)
from buoy.checkpoint.passed_over import HALF, NEWER, Unusable
from buoy.checkpoint.reader import decode_about, read_manifest
from buoy.checkpoint.store import Store
from buoy.errors import BuoyError


class Copy:
    """A checkpoint, here or in the second home, as retention sees it."""

    def __init__(self, name: str, fields: dict[str, Any], size: int) -> None:
        about = decode_about(fields)
        if about is None:
            raise ValueError("nothing about it")
        self.name = name
        self.fields = fields
        self.step = int(fields["step"])
        self.about: dict[str, object] = about
        self.time = saved_at(about)
        self.bytes = size
        self.complete = True
        self.digest = digest_of(fields)
        """Its content: the manifest has the checksum of every byte."""

    @property
    def key(self) -> tuple[str, str]:
        """Which one it is, among those of the same name that several lives of a run may make."""
        return self.name, self.digest

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


def digest_of(fields: dict[str, Any]) -> str:
    """What tells a checkpoint from any other, by the fields of its manifest."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def is_there(folder: str, digests: dict[str, object]) -> bool:
    """Whether the checkpoint in this folder is the one that a mirror holds under its name (name -> digest)."""
    expected = digests.get(os.path.basename(folder))
    try:
        return expected is not None and digest_of(read_manifest(folder)[0]) == expected
    except (OSError, BuoyError):
        return False


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
    return survey(home)[0]


def survey(home: Home) -> tuple[list[Copy], list[Unusable]]:
    """The complete checkpoints of the second home by their manifests and sizes, and what is there besides."""
    found, unusable = [], []
    for name, sizes in home.sizes().items():
        try:
            looked_at = _look_at(home, name, sizes)
        except FileNotFoundError:
            continue  # removed since it was listed
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ELOOP):
                raise
            # A pipe, a device, a link: nothing that a copy could be.
            looked_at = Unusable(step_of(name), name, f"{MANIFEST}: {error.strerror}")
        if isinstance(looked_at, Copy):
            found.append(looked_at)
        else:
            unusable.append(looked_at)
    return sorted(found, key=lambda copy: copy.age, reverse=True), unusable


def is_half(sizes: dict[str, int]) -> bool:
    """Whether these files are a copy that was not finished: the manifest comes last, and goes first."""
    return MANIFEST not in sizes


def step_of(name: str) -> int:
    """The step in a checkpoint's name.

    >>> step_of("step-000000042.2")
    42
    """
    return int(name.removeprefix("step-").partition(".")[0])


def _look_at(home: Home, name: str, sizes: dict[str, int]) -> Copy | Unusable:
    if is_half(sizes):
        what = f"{MANIFEST} is not there: its copying was not finished"
        return Unusable(step_of(name), name, what, HALF)
    try:
        fields = unseal(home.read(name, MANIFEST, MOST_MANIFEST_BYTES), name)
        if fields["step"] != step_of(name):
            return Unusable(step_of(name), name, f"{MANIFEST}: it is of step {fields['step']}")
        for file in (STATE, VALUES):
            if sizes.get(file) != size_of(fields, file):
                return Unusable(
                    step_of(name), name, _size_words(file, sizes.get(file), size_of(fields, file))
                )
        return Copy(name, fields, sum(sizes.values()))
    except NewerCheckpoint as error:
        return Unusable(step_of(name), name, f"{MANIFEST}: {error.received}", NEWER)
    except BuoyError as error:
        return Unusable(step_of(name), name, error.received or error.message)
    except ValueError as error:
        return Unusable(step_of(name), name, f"{MANIFEST}: {error}")


def _size_words(file: str, found: int | None, expected: int) -> str:
    return f"{file}: it is not there" if found is None else f"{file}: {found} of {expected} bytes are there"
