"""How much of a batch is on the device at once: pure decisions from what passed, what failed and what is free.

Sizes are kept as cost, the number of array elements, so that what was learned on short sequences serves for
long ones. `Sizer` never looks at a device; it is told.

Which sizes a run has used, so that a resumed run can use the same ones and come out the same to the last bit.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from buoy.machine.files import open_new, read_lines, write_all
from buoy.microbatch.batch import even
from buoy.text import whole_number
from buoy.units import format_bytes

_PATIENCE = 16  # clean steps before a larger size is tried
_MOST_PATIENCE = 1024
_SAME = 1.03  # sizes closer than this are not worth a failed try
_MARGIN = 0.98  # of the predicted maximum
_ALIKE = 1.25  # samples up to so much longer follow the same line
SPARE = 4 << 20
"""Bytes that the reserve of the host's memory can always spare: a step that needs no more is not split."""
_KEPT = ("limit", "passed", "failed", "clean", "patience", "trying", "fit")


@dataclass
class Fit:
    """Bytes of activations as a line over cost."""

    slope: float
    """Bytes per element."""
    intercept: float
    each: float
    """Elements per sample where it was measured: longer samples may need more than in proportion (attention)."""
    rough: bool = False
    """An upper bound from a few samples, good only to say that something surely fits."""

    def samples(self, free: float, each: float) -> int:
        """How many samples of this kind there is room for; less than 1 when there is none."""
        return int((free - self.intercept) / (self.slope * each * max(1.0, each / self.each)))


def is_state(value: object) -> bool:
    """Whether this can be what a `Sizer` said of itself."""
    if not isinstance(value, dict) or not isinstance(value.get("fit") or {}, dict):
        return False
    fit = value.get("fit") or {}
    known = set(fit) in (set(), {"slope", "intercept", "each", "rough"})
    figures = [*fit.values(), *(value.get(name) for name in _KEPT if name != "fit")]
    return known and all(figure is None or isinstance(figure, int | float) for figure in figures)


@dataclass
class Sizer:
    """What is known about the sizes that fit."""

    most: int | None = None
    """The user's own upper bound, in samples."""
    limit: float = math.inf
    """Cost allowed at once; infinite until something was learned."""
    passed: float = 0.0
    """The largest cost that went through since something failed."""
    failed: float = math.inf
    """The smallest cost that did not."""
    clean: int = 0
    patience: int = _PATIENCE
    trying: float | None = None
    """The limit to go back to when the growth under way fails."""
    fit: Fit | None = None
    lessons: int = field(default=0, compare=False)
    """How often something was learned that the sizes of the steps do not tell."""

    @property
    def is_untaught(self) -> bool:
        """Nothing limits it so far: every batch is computed whole."""
        return self.limit == math.inf and self.most is None and self.fit is None

    def samples(self, total: int, each: float, free: float | None) -> tuple[int, bool]:
        """Samples per micro-batch, and whether to find the size by a ramp; `free`: bytes for activations."""
        size = total if self.limit == math.inf else max(1, min(total, int(self.limit / each + 1e-9)))
        size = min(size, self.most) if self.most is not None else size
        if self.fit is None or free is None:
            return size, False
        room = self.fit.samples(free, each)
        if room >= size:
            return size, False
        if self.fit.rough or each > self.fit.each * _ALIKE:
            return size, size > 1
        return max(1, min(size, int(room * _MARGIN))), False

    def done(self, size: int, each: float, *, held_back: bool) -> None:
        """A step went through with micro-batches of this size; the limit may grow for the next."""
        cost = size * each
        self.passed = max(self.passed, cost)
        if self.limit == math.inf or not held_back:
            return
        if self.trying is not None and cost > self.trying:
            self.trying, self.patience = None, _PATIENCE
        if cost >= self.failed:
            self.failed = math.inf  # there is more room than there was
        self.clean += 1
        if self.clean < self.patience:
            return
        self.clean = 0
        self.trying = max(self.limit, self.passed)
        middle = (self.limit + self.failed) / 2 if self.failed < math.inf else self.limit * 1.5
        if self.limit * _SAME <= middle < self.failed:
            self.limit = middle
        else:  # so near to the old failure that only a change elsewhere can help: look beyond it, seldom
            self.patience = min(self.patience * 4, _MOST_PATIENCE)
            self.limit = self.failed * 1.1

    def oom(self, size: int, each: float) -> int:
        """It did not fit; the size to continue with. 1 again when it was 1."""
        cost = size * each
        self.clean = 0
        self.lessons += 1
        if self.trying is not None:
            self.patience = min(self.patience * 2, _MOST_PATIENCE)
            goal, self.trying, self.failed = self.trying, None, cost
        else:
            goal, self.failed = self.passed, min(cost, self.failed)
        if not cost / 4 <= goal <= cost / _SAME:
            goal = cost / 2  # nothing of that size is known to fit
        self.passed = min(self.passed, goal)
        # An even split must come out smaller, whatever rounding does.
        size = max(1, min(size - 1, int(goal / each + 1e-9)))
        self.limit = size * each
        return size

    def follow(self, smaller: int, size: int, each: float) -> None:
        """Another rank could not do with this size: all continue with its smaller one."""
        self.clean, self.trying = 0, None
        self.lessons += 1
        self.limit, self.failed = min(self.limit, smaller * each), min(self.failed, size * each)

    def fitted(self, fit: Fit, samples: int | None, each: float) -> None:
        """A ramp has measured the line, and how many samples there is room for."""
        self.fit = fit
        self.lessons += 1
        if samples is not None:
            self.limit, self.clean, self.trying = samples * each, 0, None
            self.failed, self.patience = self.limit * _SAME / _MARGIN, _MOST_PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """Plain values; infinite is None."""
        values = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        return {name: values[name] for name in _KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; the user's own bound stays the one given now."""
        for name in _KEPT:
            value = state.get(name)
            setattr(self, name, math.inf if value is None and name in ("limit", "failed") else value)
        self.fit = Fit(**state["fit"]) if state.get("fit") else None


def short(size: int, samples: int, free: float) -> str:
    """What is said where a batch is split because memory has become short.

    >>> short(4, 8, 30 << 20)
    'memory is short (30.0 MiB left for activations): batches are split now, 4 of 8 samples at a time'
    """
    return (
        f"memory is short ({format_bytes(int(free))} left for activations): batches are split now, {size} of "
        f"{samples} samples at a time"
    )


class Ramp:
    """The first batch in parts of growing size, each measured, up to what the line through the last two allows.

    Gradients exist after the first part, so the line is that of activations. Peaks are the largest of several lines
    (activations, gradients of one layer), so a line is only believed up to twice what was measured on it.
    Nothing is computed twice.
    """

    def __init__(self, start: int) -> None:
        self._points: list[tuple[int, float]] = []
        self._next = start
        self.free: float | None = None
        """Bytes for activations once the gradients are there; told after the first part."""
        self.samples: int | None = None
        """How many fit, once that can be told."""
        self.line: tuple[float, float] | None = None
        """(bytes per sample, bytes besides)"""

    def next(self, left: int) -> int:
        """Samples of the next part, of so many that are left."""
        return min(left, self._next)

    def measured(self, size: int, peak: float) -> None:
        """The last part's size, and the bytes it needed above what was there when `free` was read."""
        if self.free is None or (self._points and size <= self._points[-1][0]):
            return  # the first part made the gradients; the remainder of the batch says nothing new
        self._points.append((size, peak))
        if len(self._points) < 2:
            self._next = min(size * 2, max(size, int(self.free / max(1.0, peak / size))))
            return
        (small, low), (large, high) = self._points[-2:]
        slope = (high - low) / (large - small)
        self._next = size * 2
        if slope <= 0:
            return
        self.line = (slope, high - slope * large)
        room = self._room()
        if room < size * 2:
            self._next = self.samples = room

    def finish(self) -> None:
        """The batch is done: what the line says so far must do."""
        if self.samples is None and self.line is not None:
            self.samples = self._room()

    def _room(self) -> int:
        assert self.line is not None and self.free is not None
        slope, besides = self.line
        return max(1, int((self.free - besides) / slope * _MARGIN))


_MOST_LOG = 32 << 20


def logged(path: str) -> list[dict[str, Any]]:
    """The entries of a run's log of sizes; what is torn or something else is none."""
    return [line for line in read_lines(path, _MOST_LOG) if isinstance(line, dict) and _is_entry(line)]


def _is_entry(line: dict[str, Any]) -> bool:
    sizes = line["parts"] if "parts" in line else [line.get("samples") or 1]
    counts = [line.get("step"), *(sizes if isinstance(sizes, list) else [None])]
    return all(type(count) is int and count >= 0 for count in counts) and is_state(line.get("sizer"))


class History:
    """A log of changes: {"step": 12, "samples": 8} from step 12 on, {"step": 3, "parts": [4, 8, 20]} only then.

    Beside the size stands what the step had taught the sizer (an OOM, a measured line): when the step is done again
    that may not happen a second time, and the sizes of all later steps depend on it.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._samples: int | None = None
        self._replay: list[dict[str, Any]] = []
        self._until = 0
        """Steps before this one were done by an earlier attempt: without an entry, as the step before them."""
        self._taught = 0

    def note(self, step: int, total: int, parts: list[int], sizer: Sizer) -> None:
        """These parts were used, and this is what the sizer makes of it."""
        if self._replay:
            self._follow(step, sizer)
            return  # it is in the log already, and what follows it there still counts
        changed = parts != ([total] if self._samples is None else even(total, self._samples))
        if not changed and sizer.lessons == self._taught:
            return
        self._taught = sizer.lessons
        entry: dict[str, Any] = {"step": step, "samples": self._samples}
        if changed and parts == even(total, parts[0]):
            self._samples = entry["samples"] = parts[0] if len(parts) > 1 else None
        elif changed:
            entry = {"step": step, "parts": parts}
        self.entries.append({**entry, "sizer": sizer.state_dict()})

    def replay(self, entries: list[dict[str, Any]], first: int = 0, until: int = 0) -> None:
        """Use the sizes of an earlier attempt again from step `first` on, as far as it came: `until`."""
        self._replay, self._until = [], until
        for entry in entries:  # a later attempt began again at an earlier step: what it did counts
            while self._replay and self._replay[-1]["step"] >= entry["step"]:
                self._replay.pop()
            self._replay.append(entry)
        self._replay = [entry for entry in self._replay if entry["step"] >= first]

    def leave(self) -> None:
        """What went through in that attempt does not now: from here on this one is on its own."""
        self._replay, self._until = [], 0

    def is_replaying(self, step: int) -> bool:
        """Whether the log says anything of this step or a later one, or of the size that holds now."""
        return bool(self._replay) or step < self._until or self._samples is not None

    def parts(self, step: int, total: int) -> list[int] | None:
        """What that attempt used at this step; None where it did not come to it."""
        if not self._replay:
            return even(total, self._samples or total) if step < self._until else None
        entry, samples = self._replay[0], self._samples
        if entry["step"] == step:
            if sum(entry.get("parts", ())) == total:
                return list(entry["parts"])
            samples = entry.get("samples", samples)
        return even(total, samples or total)

    def _follow(self, step: int, sizer: Sizer) -> None:
        entry = self._replay[0]
        if entry["step"] == step:
            del self._replay[0]
            self._samples = entry.get("samples", self._samples)
            sizer.load_state_dict(entry["sizer"])
            self._taught = sizer.lessons

    def state_dict(self) -> dict[str, Any]:
        """What holds at a checkpoint."""
        return {"samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._samples = state["samples"]


class SizeLog:
    """The sizes of a run in a file of JSON lines: how many steps are done, and every change.

    The first line, {"done": "        12"}, is written over at each step: what a killed attempt had done after its
    checkpoint is done again as it was, also where nothing changed.
    """

    _HEAD, _WIDTH = b'{"done": "', 16

    def __init__(self, path: str | None) -> None:
        """None: nothing is kept."""
        self._path = path
        self._descriptor: int | None = None

    def clear(self) -> None:
        """The training starts over: what an attempt before it did is not to be repeated."""
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """The changes, and how many steps were done."""
        if self._path is None:
            return [], 0
        first = next(iter(read_lines(self._path, _MOST_LOG)), None)
        done = first.get("done") if isinstance(first, dict) else None
        return logged(self._path), (whole_number(done.strip()) or 0) if isinstance(done, str) else 0

    def step(self, done: int, changes: list[dict[str, Any]]) -> None:
        """So many steps are done, and this has changed. Called before anybody hears of it: it may be killed then."""
        if self._path is None:
            return
        with suppress(OSError):  # a full disk: the checkpoint knows the size at its own step
            if self._descriptor is None:
                self._descriptor = self._open(self._path)
            if changes:
                os.lseek(self._descriptor, 0, os.SEEK_END)
                write_all(self._descriptor, "".join(json.dumps(each) + "\n" for each in changes).encode())
            os.pwrite(self._descriptor, b"%*d" % (self._WIDTH, done), len(self._HEAD))

    def _open(self, path: str) -> int:
        changes, done = self.read()
        lines = [self._HEAD.decode() + str(done).rjust(self._WIDTH) + '"}', *map(json.dumps, changes)]
        descriptor = open_new(path, again=True)
        write_all(descriptor, ("\n".join(lines) + "\n").encode())
        return descriptor
