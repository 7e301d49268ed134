"""The recorder inside a training process: one per process, joined by whoever asks for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from buoy.errors import trouble
from buoy.flight.attempt import Attempt, on_another_disk, point_to
from buoy.flight.beacon import Beacon
from buoy.flight.holders import Attendant
from buoy.flight.imports import after_import
from buoy.flight.log import note
from buoy.text import whole_number

if TYPE_CHECKING:
    from buoy.flight.last_words import LastWords

ATTEMPT_VARIABLE = "BUOY_ATTEMPT"
"""Set by `buoy run` for everything below it: the attempt's folder."""

JOINED_VARIABLE = "BUOY_JOINED"
"""Set by a process that has joined, to its pid: what it starts need not join at once (see the bootstrap)."""
WATCHED_VARIABLE = "BUOY_WATCHED"
"""Set by `buoy.watch()`: a spawned worker imports the script again and must not begin an attempt of its own."""

# Root module of a framework -> module of ours that counts its steps. Loaded by name: flight knows no framework.
_STEP_COUNTERS = {"torch": "buoy.torch.record", "keras": "buoy.keras.record"}

_MOST_LOOPS = 100
"""Loops without a run that are kept apart in one process: one that takes turns with a run would fill the log."""

_current: Recorder | None = None


class Recorder:
    """Where this process is, said through the beacon. `buoy.watch()` returns it."""

    def __init__(self, attempt: Attempt | None) -> None:
        self.attempt = attempt
        """None: nothing could be written, and nobody reads what this recorder is given."""
        self.turn = 0
        """How often another training of this process has begun to step."""
        self._trained_last: str | None = None
        self._training: set[str] = set()
        self._left_at: int | None = None
        self._alone_from = 0
        self._is_claimed = False
        self._loops = 0
        self._in_cell: set[str] = set()
        """The runs that trained since the notebook's cell began."""
        self._device: int | None = None
        """The disk that the sidecar reads."""
        self._opened: dict[str, str | None] = {}
        self._last_words: LastWords | None = None
        self.attendant: Attendant | None = None
        """The one of us that answers the sidecar; None where nothing is recorded."""
        if attempt is None:
            self.beacon = Beacon(None)
            return
        folder, again = self._own_folder(attempt)
        self.beacon = Beacon(os.path.join(folder, "beacon"), again)
        self._listen_for_the_end(folder, again)

    def _own_folder(self, attempt: Attempt) -> tuple[str, bool]:
        self._device = os.stat(attempt.folder).st_dev
        folder = os.path.join(attempt.folder, f"process-{os.getpid()}")
        again = os.path.isdir(folder)  # this process has exec'ed itself: its new life has the words
        if not again:
            os.mkdir(folder, 0o700)
        return folder, again

    def _listen_for_the_end(self, folder: str, again: bool) -> None:
        from buoy.flight.last_words import LastWords  # needs Linux, which a recorder of nothing does not

        self._last_words = LastWords(folder, self.beacon, again)
        self.attendant = Attendant(folder)
        for framework, counter in _STEP_COUNTERS.items():
            after_import(framework, lambda counter=counter: self._count_steps(counter))  # type: ignore[misc]

    def move(self, attempt: Attempt | None) -> None:
        """Record into another attempt from here on, or nowhere; trainings are announced there again."""
        self.attempt = None
        if attempt is None:
            self.beacon.move(None)
            return
        folder, again = self._own_folder(attempt)
        self.beacon.move(os.path.join(folder, "beacon"))
        if self._last_words is None:
            self._listen_for_the_end(folder, again)
        else:
            self._last_words.move(folder)
        if self.attendant is not None:
            self.attendant.folder = folder
        self.attempt = attempt
        self._training.clear()
        self._trained_last = self._left_at = None
        for opened, newest in self._opened.items():
            if os.path.isdir(opened):
                self.opened(opened, newest)
                self._point(opened)

    def _point(self, opened: str) -> None:
        try:
            if self.attempt is not None and os.path.realpath(opened) != os.path.realpath(str(self.folder)):
                point_to(opened, self.attempt)
        except OSError:
            pass

    @property
    def folder(self) -> str | None:
        """The run folder this process records into; None when it could not be written."""
        return str(self.attempt.run_folder) if self.attempt is not None else None

    def __repr__(self) -> str:
        return f"<buoy records into {self.folder}>" if self.attempt is not None else "<buoy records nothing>"

    def step(self, number: int | None = None) -> None:
        """One optimizer step is done. Only needed where buoy cannot see it: a GradientTape loop, another framework."""
        if number is None:
            self.beacon.step()
            return
        # Where a training resumes, or what a user counts: no step of a loop that nobody knows.
        listener, self.beacon.unannounced = self.beacon.unannounced, None
        self.beacon.step(number)
        self.beacon.unannounced = listener

    def epoch(self, number: int) -> None:
        """An epoch begins."""
        self.beacon.epoch(number)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark evaluation, saving or data preparation, so that it is not taken for a hang.

        >>> from buoy.flight.recorder import Recorder
        >>> with Recorder(None).phase("eval"):
        ...     pass
        """
        before = self.beacon.phase(name)
        try:
            yield
        finally:
            self.beacon.phase(before)

    def opened(self, folder: str, newest: str | None) -> None:
        """A run with a folder of its own was made in this process; `newest` is the checkpoint it found there."""
        self._opened[folder] = newest
        counted = self.beacon.count
        self.event("opened", run=self._seen_from_here(folder), path=folder, newest=newest, counted=counted)
        device = on_another_disk(folder, self._device) if self.attempt is not None else None
        if device is not None:
            self._device = device
            self.event("disk", path=folder)

    def trains(self, folder: str, step: int) -> None:
        """The run in this folder trains now and is at this step: what is counted from here on is its own."""
        self._in_cell.add(folder)
        if folder in self._training:
            return
        self.beacon.unannounced = None
        together = bool(self._training)
        self._training.add(folder)
        if folder == self._trained_last:
            self._left_at = None
            return
        # A run that resumes has set the count to its own already: where the loop before it ended is what was left.
        left = self._left_at if self._left_at is not None else self.beacon.count
        self._trained_last, self._left_at = folder, None
        self.turn += 1
        self.beacon.at(step)
        self.event("training", run=self._seen_from_here(folder), step=step, left=left, together=together)

    def pauses(self, folder: str) -> None:
        """A loop of this run has ended; another run that trains from here on trains in its place."""
        self._training.discard(folder)
        if folder == self._trained_last:
            self._left_at = self.beacon.count
        self._listen()

    def claims(self, folder: str, step: int) -> None:
        """The step that is counted next is one of this run, which is at `step`: also outside of its loops."""
        self._in_cell.add(folder)
        if folder in self._training:
            return
        if folder != self._trained_last:
            self.trains(folder, step)
            self.pauses(folder)
        self._is_claimed = True

    def _listen(self) -> None:
        """No training is under way any more: a step that is counted now is that of a loop without a run."""
        if not self._training and self._loops < _MOST_LOOPS:
            self.turn += 1
            self._alone_from, self._is_claimed = self.beacon.count, False
            self.beacon.unannounced = self._stepped_alone

    def _stepped_alone(self) -> None:
        if self._is_claimed:
            self._is_claimed = False
            self._alone_from = self.beacon.count
            return
        self.beacon.unannounced = None
        self._trained_last = self._left_at = None
        self._loops += 1
        self.event("loop", left=self._alone_from)
        self.beacon.at(max(1, self.beacon.count - self._alone_from))

    @property
    def is_training(self) -> bool:
        """Whether a loop of a run is under way."""
        return bool(self._training)

    def cell_ended(self, error: dict[str, object] | None) -> None:
        """A notebook's cell ended, with an exception or without: what was left by one is announced again."""
        runs = sorted(self._training | self._in_cell)
        self._in_cell.clear()
        step = self.beacon.count
        if error is None or not (step or runs):
            return
        self._training.clear()
        self._trained_last, self._left_at = None, step
        self._listen()
        told = {"type": error["type"], "message": str(error["message"])[:200], "step": step}
        self.event("cell-error", **told, runs=[self._seen_from_here(folder) for folder in runs])

    def trained(self, folder: str, step: int, finished: bool, **unsaved: object) -> None:
        """The training of the run in this folder is over: at its end (`finished`), at an end that could not be saved
        (`unsaved` tells why), or given up."""
        self._training.discard(folder)
        if folder == self._trained_last or finished or unsaved:
            self._trained_last = None
            self.event("trained", run=self._seen_from_here(folder), step=step, finished=finished, **unsaved)
            self._listen()
            if not self._training:  # what comes now has no steps: no reason to expect any
                self.beacon.phase("start")

    def lasts(self, folder: str, step: int) -> None:
        """The training of the run in this folder will end at this step, as far as is known."""
        self.event("length", run=self._seen_from_here(folder), step=step)

    def _seen_from_here(self, folder: str) -> str:
        """Relative, so that folders that were moved together still find each other."""
        return os.path.relpath(folder, self.folder) if self.folder is not None else folder

    def event(self, kind: str, **values: object) -> None:
        """Write an event to the flight log; never raises."""
        if self.attempt is not None:
            note(self.attempt.folder, kind, pid=os.getpid(), **values)

    def set_handler(self, number: int, handler: object) -> None:
        """`signal.signal`, with the stacks that buoy dumps on this signal still dumped first."""
        if self._last_words is None:
            signal.signal(number, handler)  # type: ignore[arg-type]
        else:
            self._last_words.set_handler(number, handler)

    def _count_steps(self, counter: str) -> None:
        from importlib import import_module

        try:
            import_module(counter).install(self)
        except Exception as error:  # noqa: BLE001 - a framework we do not fit must still import and train
            trouble(f"counting steps ({counter})", error)


def current() -> Recorder | None:
    """This process's recorder, if it has one."""
    return _current


def join(attempt: Attempt | None) -> Recorder:
    """Start recording this process into the attempt (None: nowhere); the same recorder again if it already does."""
    global _current
    if _current is not None:
        return _current
    _current = Recorder(attempt)
    os.environ[JOINED_VARIABLE] = str(os.getpid())
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
    return _current


def _forget() -> None:
    global _current
    _current = None


def attempt_of_environment() -> Attempt | None:
    """The attempt this process is a part of: `buoy run`'s, or that of the watched script whose helper it is."""
    folder = os.environ.get(ATTEMPT_VARIABLE)
    if not folder and is_helper_process():
        folder = os.environ.get(WATCHED_VARIABLE)
    number = whole_number(os.path.basename(folder or ""))
    if not folder or number is None or not os.path.isdir(folder):
        return None
    return Attempt(os.path.dirname(os.path.dirname(folder)), folder, number)


def is_helper_process() -> bool:
    """Whether this interpreter is one that multiprocessing started for its own purposes (spawn, resource tracker)."""
    return "--multiprocessing-fork" in sys.argv or any(
        "multiprocessing." in word for word in getattr(sys, "orig_argv", [])[1:6]
    )
