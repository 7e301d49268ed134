"""The devices users train on, as dated data: what an allocator can have there, and what CUDA keeps for itself.

The numbers live in devices.csv. A leading `~` there marks a value nobody measured for us on that device.
"""

from __future__ import annotations

import csv
import difflib
import functools
from dataclasses import dataclass
from importlib import resources

from buoy.errors import UsageError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One row of devices.csv; capability 75 is 7.5, 0 means no CUDA."""

    id: str
    name: str
    capability: int
    multiprocessors: int
    threads: int
    """Threads one multiprocessor can hold: how far reductions are split depends on it."""
    memory: int | None
    """Bytes CUDA reports as the device's total; None for a CPU, whose memory is the session's."""
    context: tuple[int, int]
    """The least and most bytes CUDA and its libraries take besides the allocator."""
    workspace: int
    """Bytes cuBLAS keeps for each thread that multiplies matrices."""
    platforms: tuple[str, ...]
    source: str
    date: str
    verified: bool
    """Whether memory and context were both measured on this very device."""

    @property
    def type(self) -> str:
        """As torch says it."""
        return "cuda" if self.capability else "cpu"


@functools.cache
def all_devices() -> tuple[Device, ...]:
    """Every device we have data for, in the order of the file."""
    text = resources.files("buoy.estimate").joinpath("devices.csv").read_text(encoding="utf-8")
    return tuple(_from_row(row) for row in csv.DictReader(text.splitlines()))


def by_id(name: str) -> Device:
    """The device with this id, or a UsageError that names the nearest.

    >>> by_id("t4").capability
    75
    """
    found = next((device for device in all_devices() if device.id == name.lower()), None)
    if found is None:
        known = [device.id for device in all_devices()]
        near = difflib.get_close_matches(name.lower(), known, 1)
        raise UsageError(
            "no such device",
            received=repr(name),
            expected=", ".join(known),
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    return found


def of_platform(platform: str) -> Device | None:
    """The device a platform row (`colab-t4`) gives; None where we know none.

    >>> of_platform("kaggle-t4x2").id
    't4'
    """
    return next((device for device in all_devices() if platform in device.platforms), None)


def by_name(reported: str, memory: int) -> Device | None:
    """The device a driver reports by this name, with the memory it reports; None for one we have no data on.

    >>> by_name("NVIDIA A100-SXM4-40GB", 42_000_000_000).id
    'a100-40'
    """
    words = reported.lower().replace("-", " ").split()
    near = [
        device
        for device in all_devices()
        if device.memory is not None and _model(device) in words and 0.75 < memory / device.memory < 1.25
    ]
    return min(near, key=lambda device: abs((device.memory or 0) - memory), default=None)


def _model(device: Device) -> str:
    """The word of the name that tells the model: `t4`, `a100`, `3090`."""
    return next(word for word in device.name.lower().split() if any(letter.isdigit() for letter in word))


def _from_row(row: dict[str, str]) -> Device:
    numbers = {name: row[name].lstrip("~") for name in ("memory_mib", "context_low_mib", "context_high_mib")}
    return Device(
        id=row["id"],
        name=row["name"],
        capability=int(row["capability"]),
        multiprocessors=int(row["multiprocessors"]),
        threads=int(row["threads"]),
        memory=int(numbers["memory_mib"]) * _MIB if numbers["memory_mib"] else None,
        context=(int(numbers["context_low_mib"]) * _MIB, int(numbers["context_high_mib"]) * _MIB),
        workspace=int(row["workspace"]),
        platforms=tuple(row["platforms"].split()),
        source=row["source"],
        date=row["date"],
        verified=not any(row[name].startswith("~") for name in numbers),
    )
