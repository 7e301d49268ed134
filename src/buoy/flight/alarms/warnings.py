"""Turns samples into the few warnings worth a line: what runs out and when, hangs, thrashing, the bottleneck."""

from __future__ import annotations

import os
import time
from collections import namedtuple

from buoy.flight.alarms import forecast, slowdown, stall
from buoy.flight.log import FIELDS, memory_use
from buoy.flight.sampler import Sampler
from buoy.machine import disk, host

HANG_VARIABLE = "BUOY_HANG_SECONDS"
_PERIOD = 1.0
_NO_ROOM = 64 << 10
"""Bytes free below which a disk is full: not even the smallest checkpoint fits."""
_FULL_PERIOD = 600.0
_NEAR_FULL = 0.85
"""Share of RAM from which its level is watched."""
_AT = {name: position for position, name in enumerate(FIELDS)}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from buoy.flight.alarms.level import LevelWatch

Warning = namedtuple("Warning", "alarm text values")


class Alarms:
    """All alarms of one attempt, fed with every sample and judging once a second."""

    def __init__(self, attempt: dict, sampler: Sampler) -> None:  # type: ignore[type-arg]
        self._sampler = sampler
        self._due = 0.0
        self._events: list[tuple[str, dict[str, object]]] = []
        self._ram = forecast.Forecast("RAM", None)
        self._vram = forecast.Forecast("VRAM", None)
        self._disk = forecast.Forecast("disk", None)
        self._shm = forecast.Forecast("shm", None)
        self._level: LevelWatch | None = None
        self._time = forecast.Deadline(attempt.get("time_limit"))
        self._began = attempt.get("session_started") or attempt.get("wall") or time.time()
        self._stall = stall.StallWatch(_hang_seconds(), sampler.look)
        self._slowdown = slowdown.SlowdownWatch(float(os.cpu_count() or 1), sampler.look)
        self._memory_total = host.memory().total
        shm = disk.space("/dev/shm")  # noqa: S108 - only its size is read
        self._disk_of = sampler.disk.path
        self._full_again = 0.0
        self._shm_total = shm.total if shm else None

    def feed(self, now: float, sample: list) -> list[Warning]:  # type: ignore[type-arg]
        """The warnings that this sample gives rise to; mostly none."""
        self._feed_forecasts(now, sample)
        if now < self._due:
            return []
        self._due = now + _PERIOD
        lead = self._sampler.lead()
        warnings = [
            Warning(outlook.name.lower(), forecast.sentence(outlook), outlook.values())
            for outlook in self._exhaustion(sample[_AT["step"]], lead.step_seconds if lead else None)
        ]
        warnings += self._full_memory(now, sample, warnings)
        warnings += self._full_disk(now, sample)
        warnings += self._hang(now, sample, lead)
        findings = self._slowdown.feed(
            now, sample[_AT["step"]], sample[_AT["phase"]],
            data_wait=sample[_AT["data_wait"]], major_faults=sample[_AT["major_faults"]], steal=sample[_AT["steal"]],
            throttled=sample[_AT["throttled"]], io_stall=sample[_AT["io_stall"]],
            memory_stall=sample[_AT["memory_stall"]], gpu_util=sample[_AT["gpu_util"]],
            refaults=self._sampler.refaults, cpu_seconds=sample[_AT["cpu_seconds"]],
        )  # fmt: skip
        warnings += [Warning(found.alarm, slowdown.sentence(found), found.values()) for found in findings]
        return warnings

    def take_events(self) -> list[tuple[str, dict[str, object]]]:
        """Hangs that began or ended since the last call."""
        events, self._events = self._events, []
        return events

    def _feed_forecasts(self, now: float, sample: list) -> None:  # type: ignore[type-arg]
        step = sample[_AT["step"]]
        used, self._ram.limit = self._memory_use(sample)
        self._ram.feed(now, step, used, self._own_memory(sample))
        totals = [device["total"] for device in self._sampler.gpus or () if device.get("total")]
        self._vram.limit = sum(totals) or None
        self._vram.feed(now, step, sample[_AT["gpu_used"]])
        if self._sampler.disk.path != self._disk_of:  # what another disk held says nothing of this one's end
            self._disk, self._disk_of = forecast.Forecast("disk", None), self._sampler.disk.path
        for series, total, free in (
            (self._disk, sample[_AT["disk_total"]], sample[_AT["disk_free"]]),
            (self._shm, self._shm_total, sample[_AT["shm_free"]]),
        ):
            series.limit = total
            series.feed(now, step, total - free if total is not None and free is not None else None)

    def _memory_use(self, sample: list) -> tuple[int | None, int | None]:  # type: ignore[type-arg]
        return memory_use(
            sample[_AT["cgroup_used"]],
            sample[_AT["cgroup_limit"]],
            sample[_AT["available"]],
            self._memory_total,
        )

    def _own_memory(self, sample: list) -> int | None:  # type: ignore[type-arg]
        """What the training's processes hold, with what lies in shared memory: loader workers put batches there."""
        own, free = self._sampler.own_memory, sample[_AT["shm_free"]]
        shared = self._shm_total - free if self._shm_total is not None and free is not None else 0
        return own + max(0, shared) if own is not None else None

    def _exhaustion(self, step: int | None, step_seconds: float | None) -> list[forecast.Outlook]:
        elapsed = time.time() - self._began
        self._time.feed(elapsed, step, step_seconds)
        resources = (self._ram, self._vram, self._disk, self._shm)
        if self._time.limit:  # what runs out after the session's end is nobody's concern
            for series in resources:
                series.horizon = min(series.horizon, max(60.0, self._time.limit - elapsed))
        told = [series.news() for series in (*resources, self._time)]
        return [outlook for outlook in told if outlook is not None]

    def _full_memory(self, now: float, sample: list, told: list[Warning]) -> list[Warning]:  # type: ignore[type-arg]
        """RAM that stands at its limit, whether it has grown there before our eyes or not."""
        used, limit = self._memory_use(sample)
        if self._level is None and (used is None or limit is None or used < _NEAR_FULL * limit):
            return []
        from buoy.flight.alarms import level  # only now: most trainings have room

        self._level = self._level or level.LevelWatch()
        if any(warning.alarm == "ram" for warning in told):
            self._level.forecast_told()
        found = self._level.feed(
            now, used, limit, sample[_AT["tree_rss"]], sample[_AT["step"]], sample[_AT["phase"]]
        )
        return [Warning("ram-level", level.sentence(found), found.values())] if found is not None else []

    def _full_disk(self, now: float, sample: list) -> list[Warning]:  # type: ignore[type-arg]
        """A disk that is full already: one that was filled at once, or before, was never seen to grow."""
        total, free = sample[_AT["disk_total"]], sample[_AT["disk_free"]]
        is_full = bool(total) and free is not None and free < _NO_ROOM
        if not is_full or now < self._full_again:
            return []
        self._full_again = now + _FULL_PERIOD
        from buoy.units import format_share  # as in `forecast.sentence`

        text = f"disk {format_share(total - free, total)}: it is full. {forecast.ADVICE['disk']}"
        return [
            Warning(
                "disk-full", text, {"used": total - free, "limit": total, "path": self._sampler.disk.path}
            )
        ]

    def _hang(self, now: float, sample: list, lead: object) -> list[Warning]:  # type: ignore[type-arg]
        read, written = sample[_AT["read_bytes"]], sample[_AT["written_bytes"]]
        change = self._stall.feed(
            now, sample[_AT["step"]], getattr(lead, "step_t", None), getattr(lead, "step_seconds", None),
            sample[_AT["phase"]], sample[_AT["cpu_seconds"]], read + written if read is not None else None,
            sample[_AT["gpu_util"]], getattr(lead, "data_wait", None),
        )  # fmt: skip
        if change is None:
            return []
        if isinstance(change, stall.HangOver):
            self._events.append(("hang-over", change.values()))
            return []
        group = self._sampler.cgroup
        quota = group.cpu_quota() if group is not None and change.state == "starved" else None
        self._events.append(("hang", {**change.values(), "threads": change.threads, "quota": quota}))
        if change.is_quiet:
            return []
        name = {"starved": "starved", **dict.fromkeys(stall.IN_GOOD_TIME, "waiting")}.get(
            change.state, "hang"
        )
        return [Warning(name, stall.sentence(change, self._sampler.pid), change.values())]


def _hang_seconds() -> float | None:
    try:
        return float(os.environ[HANG_VARIABLE])
    except (KeyError, ValueError):
        return None
