"""Turns samples into the few warnings worth a line: what runs out and when, hangs, thrashing, the bottleneck."""

from __future__ import annotations

import os
import time
from collections import namedtuple

from buoy.flight import forecast, slowdown, stall
from buoy.flight.log import FIELDS
from buoy.flight.sampler import Sampler
from buoy.machine import disk, host, procfs

HANG_VARIABLE = "BUOY_HANG_SECONDS"
_PERIOD = 1.0
_NO_ROOM = 64 << 10
"""Bytes free below which a disk is full: not even the smallest checkpoint fits."""
_FULL_PERIOD = 600.0
_AT = {name: position for position, name in enumerate(FIELDS)}

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
        self._time = forecast.Deadline(attempt.get("time_limit"))
        self._began = attempt.get("session_started") or attempt.get("wall") or time.time()
        self._stall = stall.StallWatch(_hang_seconds())
        self._slowdown = slowdown.SlowdownWatch(float(os.cpu_count() or 1))
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
        warnings += self._full_disk(now, sample)
        warnings += self._hang(now, sample, lead)
        findings = self._slowdown.feed(
            now, sample[_AT["step"]], sample[_AT["phase"]],
            data_wait=sample[_AT["data_wait"]], major_faults=sample[_AT["major_faults"]], steal=sample[_AT["steal"]],
            throttled=sample[_AT["throttled"]], io_stall=sample[_AT["io_stall"]],
            memory_stall=sample[_AT["memory_stall"]], gpu_util=sample[_AT["gpu_util"]],
        )  # fmt: skip
        warnings += [Warning(found.alarm, slowdown.sentence(found), found.values()) for found in findings]
        return warnings

    def take_events(self) -> list[tuple[str, dict[str, object]]]:
        """Hangs that began or ended since the last call."""
        events, self._events = self._events, []
        return events

    def _feed_forecasts(self, now: float, sample: list) -> None:  # type: ignore[type-arg]
        step = sample[_AT["step"]]
        limit, used = sample[_AT["cgroup_limit"]], sample[_AT["cgroup_used"]]
        if limit is None or used is None or (self._memory_total and limit > self._memory_total):
            available = sample[_AT["available"]]
            limit = self._memory_total
            used = limit - available if limit is not None and available is not None else None
        self._ram.limit = limit
        self._ram.feed(now, step, used)
        totals = [device["total"] for device in self._sampler.gpus or () if device.get("total")]
        self._vram.limit = sum(totals) or None
        self._vram.feed(now, step, sample[_AT["gpu_used"]])
        if self._sampler.disk.path != self._disk_of:  # what another disk held tells nothing of this one's end
            self._disk, self._disk_of = forecast.Forecast("disk", None), self._sampler.disk.path
        for series, total, free in (
            (self._disk, sample[_AT["disk_total"]], sample[_AT["disk_free"]]),
            (self._shm, self._shm_total, sample[_AT["shm_free"]]),
        ):
            series.limit = total
            series.feed(now, step, total - free if total is not None and free is not None else None)

    def _exhaustion(self, step: int | None, step_seconds: float | None) -> list[forecast.Outlook]:
        elapsed = time.time() - self._began
        self._time.feed(elapsed, step, step_seconds)
        resources = (self._ram, self._vram, self._disk, self._shm)
        if self._time.limit:  # what runs out after the session's end is nobody's concern
            for series in resources:
                series.horizon = min(series.horizon, max(60.0, self._time.limit - elapsed))
        told = [series.news() for series in (*resources, self._time)]
        return [outlook for outlook in told if outlook is not None]

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
            sample[_AT["gpu_util"]],
        )  # fmt: skip
        if change is None:
            return []
        if isinstance(change, stall.HangOver):
            self._events.append(("hang-over", change.values()))
            return []
        pid, threads = self._sampler.pid, procfs.thread_states(self._sampler.pid)
        self._events.append(("hang", {**change.values(), "threads": threads}))
        stopped = pid if stall.is_stopped(threads) else None
        return [Warning("hang", stall.sentence(change, stopped), change.values())]


def _hang_seconds() -> float | None:
    try:
        return float(os.environ[HANG_VARIABLE])
    except (KeyError, ValueError):
        return None
