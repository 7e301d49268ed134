"""The rest of the session: host RAM, /dev/shm, disk and time that a training needs besides the device's memory."""

from __future__ import annotations

import csv
import functools
import os
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, TypedDict

from buoy.errors import UsageError
from buoy.estimate.devices import Device
from buoy.estimate.result import PER_OPERATION, Interval
from buoy.estimate.trace import Trace
from buoy.planner.result import Need
from buoy.planner.targets import Target
from buoy.units import format_bytes, format_duration, parse_bytes, parse_duration

_MIB = 1 << 20
_LOADING = "loading a checkpoint"
_SHM = "/dev/shm"  # noqa: S108 - asked about, not written to
# Interpreter and torch on a CPU: 0.22 to 0.35 GiB measured, other libraries besides. With CUDA's libraries more, which
# nobody measured for us: hence the width.
PROCESS_CPU = (200 * _MIB, 450 * _MIB)
PROCESS_CUDA = (700 * _MIB, 3000 * _MIB)
# What a forked worker writes to of its own: the interpreter's counts and its buffers.
WORKER = (30 * _MIB, 150 * _MIB)

# The share of the peak that trainings reach. Wide, as nothing here was measured on the user's step.
_REACHED = (0.15, 0.6)
# Below this, launching the kernels and feeding them takes longer than what they compute.
_SHORT = 0.01


class Wishes(TypedDict, total=False):
    """What a user may tell about the session; sizes and durations as text or numbers."""

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
    samples: int | None
    """Samples in the data set: with it, what a cache of decoded samples takes is known."""
    cache: str | None
    """Where decoded samples are kept after the first epoch: `ram` (`Dataset.cache()`) or `disk` (a file, or what
    Hugging Face datasets does by itself)."""
    shuffle: int
    """Samples in a shuffle buffer (`Dataset.shuffle(n)`)."""
    augmented: int
    """Augmented copies of each sample that are made beforehand; on the fly it is 0."""


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
    samples: int | None = None
    cache: str | None = None
    shuffle: int = 0
    augmented: int = 0

    @classmethod
    def of(cls, wishes: Wishes) -> Session:
        """Read what the user said; a wrong value is a UsageError."""
        unknown = set(wishes) - set(Wishes.__annotations__)
        if unknown:
            raise UsageError(
                "unknown setting of the session",
                received=", ".join(sorted(unknown)),
                expected=", ".join(Wishes.__annotations__),
            )
        given: dict[str, Any] = {name: value for name, value in wishes.items() if value is not None}
        for name in ("workers", "prefetch", "keep", "steps", "samples", "shuffle", "augmented"):
            value = given.get(name, 0)
            if not isinstance(value, int) or value < 0:
                raise UsageError(
                    f"cannot read {name}", received=repr(value), expected="a whole number, 0 or more"
                )
        cache = given.get("cache")
        if cache not in (None, "ram", "disk"):
            raise UsageError("cannot read cache", received=repr(cache), expected="`ram` or `disk`")
        if cache and "samples" not in given:
            raise UsageError("what a cache takes depends on the decoded samples", received="cache without samples",
                             expected="their number too", hint="`--cache ram --samples 50000`")  # fmt: skip
        if "step_time" in given:
            said = given.pop("step_time")
            given["step_seconds"] = parse_duration(str(said))
            if given["step_seconds"] <= 0:
                raise UsageError(
                    "a step takes some time", received=f"step_time {said}", expected="more than 0, as `0.4s`"
                )
        return cls(**{**given, "data": _bytes(given.get("data"))})


@functools.cache
def rates() -> dict[str, tuple[float, float]]:
    """Published peak rates by device, in 1e12 operations a second: float32, and half precision on tensor cores.

    Float32 is without TF32, as PyTorch multiplies matrices unless told otherwise. Who published what is in rates.csv.

    >>> rates()["t4"]
    (8.1, 65.0)
    """
    text = resources.files("buoy.planner").joinpath("rates.csv").read_text(encoding="utf-8")
    return {
        row["id"]: (float(row["float32"]), float(row["half"])) for row in csv.DictReader(text.splitlines())
    }


def step_seconds(
    device: Device, flops: dict[str, float] | None, autocast: str | None
) -> tuple[tuple[float, float] | None, str]:
    """Seconds of one step from and to, and where they come from; None for devices without a data sheet."""
    peaks = rates().get(device.id)
    if peaks is None:
        return (
            None,
            "no data sheet of this device here: measure a step and say it (`--step-time`, `step_time=`)",
        )
    if not flops or not flops.get("step"):
        return (
            None,
            "the step's operations could not be counted: measure it and say it (`--step-time`, `step_time=`)",
        )
    half = autocast is not None or bool(flops.get("half"))
    peak = peaks[1 if half else 0] * 1e12
    low, high = flops["step"] / (peak * _REACHED[1]), flops["step"] / (peak * _REACHED[0])
    if high < _SHORT:
        return (
            None,
            "step too short to estimate from its operations: measure it and pass `--step-time` or `step_time=`",
        )
    return (low, high), "from the step's operations and the card's data sheet; possible, not measured"


def needs(
    session: Session, target: Target, trace: Trace, step_seconds: tuple[float, float] | None, peak: Interval
) -> tuple[Need, ...]:
    """What this session needs of the target, besides the device's memory."""
    weights, state, batch = held(trace, "weights"), held(trace, "optimizer"), batch_bytes(trace)
    sample = batch / size if (size := trace.facts.get("batch")) else None
    found = [host_ram(session, target, trace, peak)]
    if session.workers:
        waiting = session.workers * session.prefetch * batch
        found.append(
            Need(_SHM, waiting, waiting + session.workers * batch, target.shm, "bytes",
                 note=f"{session.workers} workers x {session.prefetch} batches of {format_bytes(batch)}")
        )  # fmt: skip
    found.append(_disk(session, target, weights + state, sample))
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
    if "batch_bytes" in trace.facts:
        return int(trace.facts["batch_bytes"])
    steps = sum(mark.startswith("step") for mark in trace.marks) or 1
    total = sum(
        size for kind, identity, size in trace.events if kind == "a" and trace.label(identity)[0] == "batch"
    )
    return total // steps


class _Parts:
    """What a need is made of: from and to, and why."""

    def __init__(self) -> None:
        self.low: dict[str, float] = {}
        self.high: dict[str, float] = {}
        self.why: dict[str, str] = {}

    def add(self, name: str, low: float, high: float, why: str) -> None:
        if high:
            self.low[name], self.high[name], self.why[name] = low, high, why

    def need(self, name: str, limit: float | None, note: str) -> Need:
        return Need(
            name, sum(self.low.values()), sum(self.high.values()), limit, "bytes", self.high, note, self.why
        )


def host_ram(session: Session, target: Target, trace: Trace, peak: Interval) -> Need:
    """Host RAM alone; `peak` are the bytes of the step, which on a CPU are part of it."""
    parts, add = (made := _Parts()), made.add
    weights, state, batch = held(trace, "weights"), held(trace, "optimizer"), batch_bytes(trace)
    sample = batch / size if (size := trace.facts.get("batch")) else None
    process = PROCESS_CPU if target.is_cpu else PROCESS_CUDA
    add(
        "process",
        *process,
        "measured on a CPU" if target.is_cpu else "with CUDA's libraries, not measured: wide",
    )
    if target.is_cpu:
        add("training step", peak.low, peak.high, "traced, and what malloc and the libraries keep as well")
    graph = PER_OPERATION * trace.facts.get("operations", 0)
    add("operations of the graph", graph if target.is_cpu else 0, graph,
        "nodes, kernels and Python objects of each, fitted on a CPU")  # fmt: skip
    # On a CPU that is before the first step, in the memory that its activations take later.
    loading = max(0, 2 * (weights + state) - peak.low) if target.is_cpu else 2 * weights + state
    add(_LOADING, 0, loading, "on resume the saved state and the model that loads it are in memory together")
    data = None if session.data is None else session.data * (1 + session.augmented)
    if session.in_memory and data is not None:
        add("data set", data, data, "as given" + _copies(session))
        add("workers' copies of the data set", 0, session.workers * data,
            "a list of Python objects is copied page by page into every worker that counts its references")  # fmt: skip
    if session.cache == "ram":
        cached = _decoded(session, sample)
        add(
            "cache of samples",
            *cached,
            "Dataset.cache() without a file name keeps every sample it has seen in RAM",
        )
    if session.shuffle and sample is not None:
        add("shuffle buffer", session.shuffle * sample, 2.5 * session.shuffle * sample,
            "1 to 2.5 times its samples: tensorflow#54299")  # fmt: skip
    if session.workers:
        add(
            "workers",
            session.workers * WORKER[0],
            session.workers * WORKER[1],
            "what each writes to of its own",
        )
        ahead = session.workers * session.prefetch * batch
        add("batches made ahead", ahead, ahead, "workers x prefetch x batch")
        add("samples being made", 0, 2 * session.workers * batch,
            "each worker's samples before and after they are put together; augmentation is here")  # fmt: skip
    if session.pin_memory:
        add("pinned batches", 2 * batch, 2 * batch, "the one in use and the next")
    note = "what pages it reads from disk is kept as cache and given back"
    if session.data is None:
        note = "without the data set: say its size (`--data`, `data=`)"
    return parts.need("host RAM", target.ram, note)


def with_moved(need: Need, low: float, high: float) -> Need:
    """The host's RAM where a step moves so many bytes there.

    A checkpoint is loaded before the first step: what that takes is free again by then.
    """
    before = need.parts.get(_LOADING, 0)
    parts = {**need.parts, "moved from the device": high}
    note = "the step's activations lie there between forward and backward"
    return replace(need, low=need.low + low, high=max(need.high, need.high - before + high), parts=parts, note=note,
                   why={**need.why, "moved from the device": "traced; pinned blocks are powers of two"})  # fmt: skip


def _disk(session: Session, target: Target, checkpoint: int, sample: float | None) -> Need:
    parts = _Parts()
    # One more than is kept: a new checkpoint is complete before an old one goes.
    saved = (session.keep + 1) * checkpoint
    parts.add(f"checkpoints ({session.keep} kept, 1 being written)", saved, saved, "weights and optimizer")
    if session.data is not None:
        data = session.data * (1 + session.augmented)
        parts.add("data set", data, data, "as given" + _copies(session))
    if session.cache == "disk":
        cached = _decoded(session, sample)
        parts.add(
            "cache of samples",
            *cached,
            "the decoded samples once more; each `map` of Hugging Face datasets adds one",
        )
    return parts.need("disk", target.disk, f"a checkpoint takes {format_bytes(checkpoint)}")


def _decoded(session: Session, sample: float | None) -> tuple[float, float]:
    """Bytes of all samples as the training sees them."""
    every = (session.samples or 0) * (sample or 0) * (1 + session.augmented)
    return every, every


def _copies(session: Session) -> str:
    return f", with {session.augmented} augmented copies of each sample" if session.augmented else ""


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
