"""A few steps under a framework's own profiler: when they begin and end, and a summary of what they were spent on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from buoy.errors import UsageError
from buoy.machine import procfs
from buoy.units import format_bytes, format_duration

WARM_UP = 2
"""Steps that are trained first and not measured: in one the framework sets itself up, in the next its profiler does."""
_MOST_GROWTH = 32 << 20
"""Bytes that a profile may add to the process while it records. When it ends a framework makes about ten times as much
of them (measured: torch 2.4 MiB a step while recording and 28 at the end; TensorFlow 1.4 and 5)."""
_OWNERS, _LEAST_SHARE = 10, 0.001


@dataclass
class Summary:
    """What the steps were spent on. Prints itself."""

    steps: int
    seconds: float
    phases: dict[str, float | None] = field(default_factory=dict)
    """Seconds per phase, all steps together; None where the profiler does not say."""
    held: dict[str, int] = field(default_factory=dict)
    """What holds memory now, largest first."""
    held_is_partial: bool = False
    """There was more to look through than there was time."""
    trace: str | None = None
    """The raw trace: a file for Perfetto, or a folder for TensorBoard."""
    trace_is_lost: bool = False
    """It should be there, and could not be written."""
    note: str = ""
    """Which steps these were."""

    def __str__(self) -> str:
        each = max(1, self.steps)
        lines = [f"{_steps(self.steps)}, {_short(self.seconds / each)} each{self.note and f' ({self.note})'}"]
        for phase, spent in self.phases.items():
            share = None if spent is None or not self.seconds else 100 * spent / self.seconds
            shown = "    n/a" if share is None else f"{share:5.1f} %  {_short((spent or 0.0) / each)}"
            lines.append(f"  {phase:18} {shown}")
        if self.held:
            partial = " (not all: there was too much to look through)" if self.held_is_partial else ""
            lines.append(f"what holds memory now{partial}:")
            lines += _sizes(self.held, _OWNERS)
        if self.trace is not None:
            lines.append(f"raw trace: {self.trace}")
        elif self.trace_is_lost:
            lines.append("raw trace: n/a, it could not be written whole (is the disk full?)")
        return "\n".join(lines)


def _steps(number: int) -> str:
    return f"{number} step{'s' if number != 1 else ''}"


def _resident() -> int:
    return procfs.process_memory(os.getpid()) or 0


def _short(seconds: float) -> str:
    """A step's parts take milliseconds: `2.57 ms`, not `0.00257 s`."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else format_duration(seconds)


def _sizes(sizes: dict[str, int], most: int) -> list[str]:
    """The largest of them, and what the others are together."""
    least = sum(sizes.values()) * _LEAST_SHARE
    shown = [(name, size) for name, size in sizes.items() if size >= least][:most]
    lines = [f"  {format_bytes(size):>10}  {name}" for name, size in shown]
    rest = list(sizes.values())[len(shown) :]
    return [*lines, f"  {format_bytes(sum(rest)):>10}  {len(rest)} more"] if rest else lines


class Profiler(Protocol):
    """A framework's profiler, between two steps."""

    def prepare(self) -> None:
        """The next step is the last that does not count."""

    def begin(self, look: Callable[[], None]) -> None:
        """The next step counts. Where much may run before it is done, `look` is called now and then."""

    def whole_step(self) -> None:
        """A step is done: what comes after it does not count, unless another is done."""

    def stop(self) -> None:
        """Record no more; also inside a step, and where nothing was begun."""

    def summary(self, steps: int, seconds: float) -> Summary:
        """What so many steps were spent on, after `stop`."""


class Profiling:
    """The wish for a profile, and the profile while it lasts. What fails is said, and the training goes on."""

    of_next_training = 0
    """Steps that `%buoy profile` wants of whichever training of this process takes the next step."""
    _at_work: Profiling | None = None
    """The one that has a framework's profiler: a process can have only one, and it grows until it is stopped."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """A training begins: the profile of another one, that nobody ended, ends here."""
        if Profiling._at_work is not None:
            Profiling._at_work.close()
        self._say = say
        self._wanted = 0
        self._profiler: Profiler | None = None
        self._is_prepared = self._records = self._is_cut = False
        self._first = self._last = 0
        """Where warming up or measuring began, and the newest step that is whole."""
        self._began = self._ended = 0.0
        self._resident = 0

    def ask(self, steps: int) -> None:
        """Profile the next steps, of a training under way or to come."""
        if type(steps) is not int or steps < 1:
            raise UsageError("steps is not a number of steps", received=repr(steps), expected="1 or more")
        self._wanted = steps

    def between_steps(self, step: int, make: Callable[[], Profiler]) -> None:
        """Begin, continue or end; costs nothing where no profile is wanted. `step`: steps of the run so far."""
        if not self._wanted:
            self._wanted, Profiling.of_next_training = Profiling.of_next_training, 0
        if not self._wanted:
            return
        try:
            if self._profiler is None:
                if Profiling._at_work is not None:
                    Profiling._at_work.close()
                self._profiler, self._first = make(), step
                Profiling._at_work = self
            self._step_done(step, self._profiler)
            self._continue(self._last - self._first, self._profiler)
        except Exception as error:  # noqa: BLE001 - a second profiler, a full disk: no reason to end a training
            self._give_up(error)

    def leave(self, step: int | None, *, is_early: bool = True) -> None:
        """A loop is over: a profile is of one loop. `step` if it is whole, else None."""
        if self._profiler is not None and (is_early or self._records):
            if step is not None:
                self._step_done(step, self._profiler)
            self.close()

    def close(self) -> None:
        """Report what was measured, also where it is less than was asked for."""
        if not self._wanted:
            return
        made = self._last - self._first
        if self._profiler is None:
            self._give_up("no step came after it was asked for")
        elif not self._records or not made:
            made = WARM_UP if self._records else made
            self._give_up(f"the training ended after {_steps(made)}, and {WARM_UP} are for warming up")
        else:
            try:
                self._report(self._profiler, self._why_short(made))
            except Exception as error:  # noqa: BLE001 - the same
                self._give_up(error)

    def _step_done(self, step: int, profiler: Profiler) -> None:
        if not self._is_cut:  # what came after that is not in the record
            self._last, self._ended = step, time.perf_counter()
            if self._records:
                profiler.whole_step()

    def _continue(self, made: int, profiler: Profiler) -> None:
        if self._records:
            self._look()
            if made >= self._wanted or self._is_cut:
                self.close()
        elif made >= WARM_UP:
            self._first, self._records = self._last, True
            profiler.begin(self._look)
            self._resident, self._began = _resident(), time.perf_counter()
        elif made == WARM_UP - 1 and not self._is_prepared:
            self._is_prepared = True
            profiler.prepare()

    def _look(self) -> None:
        """Much has run since the last step: a validation inside of it, or an iterator that nobody asks again."""
        profiler = self._profiler
        if profiler is None or self._is_cut or self._last == self._first:
            return
        if _resident() - self._resident > _MOST_GROWTH:
            self._is_cut = True
            profiler.stop()

    def _why_short(self, made: int) -> str:
        if made >= self._wanted:
            return ""
        if self._is_cut:
            return f"; {self._wanted} were asked for, but their record would take too much memory"
        return f"; the loop ended before the {self._wanted} asked for"

    def _report(self, profiler: Profiler, ended: str) -> None:
        # To the end of the last whole step: a cell that was interrupted is run again much later.
        profiler.stop()
        summary = profiler.summary(self._last - self._first, self._ended - self._began)
        self._let_go()
        self._say(str(replace(summary, note=f"after {WARM_UP} steps of warm-up{ended}")))

    def _give_up(self, why: object) -> None:
        profiler = self._profiler
        self._let_go()
        try:
            if profiler is not None:
                profiler.stop()
        except Exception:  # noqa: BLE001 - what failed first is reported
            pass
        self._say(f"there is no profile: {why}")

    def _let_go(self) -> None:
        self._profiler, self._wanted = None, 0
        self._is_prepared = self._records = self._is_cut = False
        if Profiling._at_work is self:
            Profiling._at_work = None
