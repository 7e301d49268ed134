"""The rest of the session: host RAM, /dev/shm, disk and time that a training needs beside the device's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

from buoy.errors import UsageError
from buoy.estimate.events import Trace
from buoy.planner.model import Need
from buoy.planner.targets import Target
from buoy.units import format_bytes, format_duration, parse_bytes, parse_duration

_MIB = 1 << 20
_SHM = "/dev/shm"  # noqa: S108 - asked about, not written to
# Interpreter and torch on a CPU: 0.30-0.35 GB measured (facts of memory.md, 3.6). With CUDA's libraries more, which
# nobody measured for us: hence the width.
PROCESS_CPU = (300 * _MIB, 450 * _MIB)
PROCESS_CUDA = (700 * _MIB, 3000 * _MIB)
# What a forked worker writes to of its own: the interpreter's counts and its buffers.
WORKER = (30 * _MIB, 150 * _MIB)


class Wishes(TypedDict, total=False):
    """What a person may tell about the session; sizes and durations as text or numbers."""

    data: str | int | None
    """Bytes of the data set, or the path of its file or folder."""
    in_memory: bool
    """Whether all of it is loaded into RAM."""
    workers: int
    prefetch: int
    pin_memory: bool
    steps: int | None
    step_time: str | float | None
    keep: int
    """Checkpoints kept at a time."""


@dataclass(frozen=True, slots=True)
class Session:
    """How the training feeds itself and saves."""

    data: int | None = None
    in_memory: bool = False
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    steps: int | None = None
    step_seconds: float | None = None
    keep: int = 3

    @classmethod
    def of(cls, wishes: Wishes) -> Session:
        """Read what the person said; a wrong value is a UsageError."""
        unknown = set(wishes) - set(Wishes.__annotations__)
        if unknown:
            raise UsageError(
                "unknown setting of the session",
                received=", ".join(sorted(unknown)),
                expected=", ".join(Wishes.__annotations__),
            )
        for name in ("workers", "prefetch", "keep", "steps"):
            value = wishes.get(name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise UsageError(
                    f"cannot read {name}", received=repr(value), expected="a whole number, 0 or more"
                )
        seconds = wishes.get("step_time")
        return cls(
            data=_bytes(wishes.get("data")),
            in_memory=bool(wishes.get("in_memory", False)),
            workers=wishes.get("workers", 0),
            prefetch=wishes.get("prefetch", 2),
            pin_memory=bool(wishes.get("pin_memory", False)),
            steps=wishes.get("steps"),
            step_seconds=None if seconds is None else parse_duration(str(seconds)),
            keep=wishes.get("keep", 3),
        )


def needs(
    session: Session, target: Target, trace: Trace, step_seconds: tuple[float, float] | None, peak: int
) -> tuple[Need, ...]:
    """What this session needs of the target, beside the device's memory."""
    weights, state, batch = held(trace, "weights"), held(trace, "optimizer"), batch_bytes(trace)
    found = [_ram(session, target, weights, state, batch, peak)]
    if session.workers:
        waiting = session.workers * session.prefetch * batch
        found.append(
            Need(_SHM, waiting, waiting + session.workers * batch, target.shm, "bytes",
                 note=f"{session.workers} workers x {session.prefetch} batches of {format_bytes(batch)}")
        )  # fmt: skip
    found.append(_disk(session, target, weights + state))
    if session.steps is not None and step_seconds is not None:
        found.append(_time(session.steps, target, step_seconds))
    return tuple(found)


def held(trace: Trace, part: str) -> int:
    """Bytes of a part that stay to the end of the trace."""
    live: dict[int, int] = {}
    for kind, identity, size in trace.events:
        if kind == "a" and trace.label(identity)[0] == part:
            live[identity] = size
        elif kind == "f":
            live.pop(identity, None)
    return sum(live.values())


def batch_bytes(trace: Trace) -> int:
    """Bytes of one batch."""
    steps = sum(mark.startswith("step") for mark in trace.marks) or 1
    total = sum(
        size for kind, identity, size in trace.events if kind == "a" and trace.label(identity)[0] == "batch"
    )
    return total // steps


def _ram(session: Session, target: Target, weights: int, state: int, batch: int, peak: int) -> Need:
    process = PROCESS_CPU if target.is_cpu else PROCESS_CUDA
    low: dict[str, float] = {"process": process[0]}
    high: dict[str, float] = {"process": process[1]}

    def add(name: str, least: float, most: float | None = None) -> None:
        if most if most is not None else least:
            low[name], high[name] = least, least if most is None else most

    if target.is_cpu:
        add("training step", peak)
    # On resume the saved state is in memory beside the model it is loaded into.
    add("loading a checkpoint", 0, weights + state + (0 if target.is_cpu else weights))
    if session.in_memory and session.data is not None:
        add("data set", session.data)
        # A list of Python objects is copied page by page into every worker that counts its references.
        add("workers' copies of the data set", 0, session.workers * session.data)
    if session.workers:
        add("workers", session.workers * WORKER[0], session.workers * WORKER[1])
        add("batches made ahead", session.workers * session.prefetch * batch)
    if session.pin_memory:
        add("pinned batches", 2 * batch)
    note = "what pages it reads from disk is kept as cache and given back"
    if session.data is None:
        note = "without the data set: say its size with data="
    return Need("host RAM", sum(low.values()), sum(high.values()), target.ram, "bytes", high, note)


def _disk(session: Session, target: Target, checkpoint: int) -> Need:
    # One more than is kept: a new checkpoint is complete before an old one goes.
    parts: dict[str, float] = {
        f"checkpoints ({session.keep} kept, 1 being written)": (session.keep + 1) * checkpoint
    }
    if session.data is not None:
        parts["data set"] = session.data
    total = sum(parts.values())
    note = f"a checkpoint takes {format_bytes(checkpoint)}"
    return Need("disk", total, total, target.disk, "bytes", parts, note)


def _time(steps: int, target: Target, step: tuple[float, float]) -> Need:
    low, high = steps * step[0], steps * step[1]
    note = ""
    if target.seconds is not None and high > target.seconds:
        least, most = int(target.seconds / step[1]), min(steps, int(target.seconds / step[0]))
        many = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        note = f"{many} of {steps:,} steps fit before the {format_duration(target.seconds)} limit"
    return Need("time", low, high, target.seconds, "seconds", note=note)


def _bytes(given: str | int | None) -> int | None:
    if given is None or isinstance(given, int):
        return given
    path = os.path.expanduser(given)
    if os.path.isfile(path):
        return os.path.getsize(path)
    if os.path.isdir(path):
        return sum(
            os.lstat(os.path.join(folder, name)).st_size
            for folder, _, names in os.walk(path)
            for name in names
        )
    return parse_bytes(given)
