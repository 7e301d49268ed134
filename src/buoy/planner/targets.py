"""Where a training shall run: the device, and what the session around it grants; by the ids written after `--on`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from buoy.errors import UsageError, this_system
from buoy.estimate import devices
from buoy.estimate.devices import Device
from buoy.machine import limits, platforms

THIS = "this"


@dataclass(frozen=True, slots=True)
class Target:
    """One place to run; what nobody knows is None."""

    id: str
    device: Device
    count: int
    """Devices of this kind."""
    memory: int | None
    """Bytes of the device; for a CPU the session's RAM."""
    ram: int | None = None
    disk: int | None = None
    shm: int | None = None
    seconds: float | None = None
    """How long a session may live."""
    seconds_source: str | None = None
    units_per_hour: float | None = None
    units_date: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether there is no accelerator."""
        return not self.device.capability

    @property
    def words(self) -> str:
        """`colab-t4 (T4, 14.6 GiB)` without the bytes."""
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{self.id} ({many}{self.device.name})" if self.id != self.device.id else self.device.name


def targets(names: Sequence[str]) -> list[Target]:
    """Each id once, in order: a platform's (`colab-t4`), a device's (`rtx-3090`) or `this`."""
    return [target(name) for name in dict.fromkeys(name.lower() for name in names)]


def target(name: str) -> Target:
    """The place an id names, or a UsageError with the nearest."""
    if name == THIS:
        return _here()
    cards = [
        device.id for device in devices.all_devices() if device.id != "cpu"
    ]  # which says nothing of its RAM
    if name in cards:
        device = devices.by_id(name)
        return Target(name, device, 1, device.memory)
    known = [row.id for row in platforms.all_platforms()]
    if name not in known:
        known += [*cards, THIS]
        near = [THIS] if name == "cpu" else difflib.get_close_matches(name, known, 1)
        raise UsageError(
            "unknown platform", received=repr(name), expected="one of " + ", ".join(known),
            hint=f"did you mean `{near[0]}`?" if near else "platforms are named like `colab-t4`",
        )  # fmt: skip
    row = platforms.by_id(name)
    found = devices.of_platform(name)
    if found is None:
        raise UsageError(
            "nothing is known about the memory of this platform's device",
            received=f"{name} ({row.accelerator})",
            expected="a platform with a GPU or a CPU",
            hint="name the card instead: " + ", ".join(device.id for device in devices.all_devices()[:6]),
        )
    ram = _whole(row.ram)
    return Target(
        id=name,
        device=found,
        count=row.devices or 1,
        memory=ram if not found.capability else found.memory,
        ram=ram,
        disk=_whole(row.disk),
        seconds=row.max_runtime.value if row.max_runtime else None,
        seconds_source=row.cite(row.max_runtime) if row.max_runtime else None,
        units_per_hour=row.units_per_hour.value if row.units_per_hour else None,
        units_date=_units_date(row),
    )


def next_tier(place: Target) -> Target | None:
    """The next dearer machine of the same platform; None where nothing is known of a price."""
    row = platforms.by_id(place.id) if place.id in {row.id for row in platforms.all_platforms()} else None
    if row is None or row.units_per_hour is None:
        return None
    dearer = [
        other
        for other in platforms.all_platforms()
        if other.platform == row.platform
        and other.units_per_hour is not None
        and other.units_per_hour.value > row.units_per_hour.value
        and devices.of_platform(other.id) is not None
    ]
    least = min(
        dearer, key=lambda other: other.units_per_hour.value if other.units_per_hour else 0, default=None
    )
    return target(least.id) if least is not None else None


def _here() -> Target:
    here = limits.read()
    card = here.gpus[0] if here.gpus and here.gpus[0]["total"] else None
    found = devices.by_id("cpu") if card is None else devices.by_name(str(card["name"]), int(card["total"]))
    if found is None:
        raise UsageError(
            "no data on this machine's GPU",
            received=str(here.gpus[0]["name"]),
            expected=", ".join(device.id for device in devices.all_devices()),
            hint="plan for the nearest of these with `--on`",
        )
    if not found.capability and here.ram is None:
        raise UsageError(
            "this machine does not say how much memory it has",
            received=f"`{THIS}`, on {this_system()}",
            expected="the id of a place whose memory is known",
            hint="name where it will run: `--on colab-t4`",
        )
    row = platforms.by_id(here.platform) if here.platform else None
    return Target(
        id=THIS,
        device=found,
        count=len(here.gpus) or 1,
        memory=here.ram if not found.capability else found.memory,
        ram=here.ram,
        disk=here.disk,
        shm=here.shm,
        seconds=here.time_limit,
        seconds_source=here.time_limit_source,
        units_per_hour=row.units_per_hour.value if row and row.units_per_hour else None,
        units_date=_units_date(row) if row else None,
    )


def _units_date(row: platforms.Platform) -> str:
    """When the price was read: the row's note says so where it is not the row's own date."""
    found = re.search(r"units of (\d{4}-\d\d-\d\d)", row.note)
    return found[1] if found else row.date


def _whole(quantity: platforms.Quantity | None) -> int | None:
    return None if quantity is None else int(quantity.value)
