"""Looks after a recording from inside the training: a sidecar or a folder that is gone, a disk that was full.

`buoy run` does this from outside for what it started; a Python below it only follows to the recording that `buoy run`
starts anew. The training's own steps and the notebook's cells look every few seconds; no thread of ours runs in it.
The bootstrap loads this file into every Python, so it imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from buoy.errors import RunFolderError, notebook_shell, trouble
from buoy.flight.attempt import Attempt, attempt_numbers, discard
from buoy.flight.recorder import ATTEMPT_VARIABLE, Recorder
from buoy.machine import procfs
from buoy.machine.files import read_json
from buoy.supervisor.start import start_sidecar
from buoy.text import visible

FOLLOW_SECONDS = 1.0


class Following:
    """Looks at each step, and moves the recorder where the folder is gone and another recording has begun."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attempt = recorder.attempt
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._next = self._began + FOLLOW_SECONDS
        self._step: Callable[[int | None], None] = recorder.beacon.step
        recorder.beacon.step = self._stepped  # type: ignore[method-assign]

    def _stepped(self, number: int | None = None) -> None:
        self._step(number)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + FOLLOW_SECONDS
            try:
                self._look()
            except OSError:
                pass  # a full disk: it is recorded from outside until there is room
            except Exception as error:  # noqa: BLE001 - the training continues, recorded from outside
                trouble("following the recording of `buoy run`", error)

    def _look(self) -> None:
        attempt = self._attempt
        if attempt is None or os.getpid() != self._pid:
            return
        if self._recorder.attempt is not None:
            if not is_gone(os.path.join(attempt.folder, f"process-{self._pid}")):
                return
            self._recorder.move(None)
        new = self._new_recording(attempt.run_folder)
        if new is not None:
            self._recorder.move(new)
            self._attempt = new
            os.environ[ATTEMPT_VARIABLE] = new.folder  # for what this process starts from here on

    def _new_recording(self, run_folder: str) -> Attempt | None:
        """The recording that began after this process did, if there is one."""
        for number in attempt_numbers(run_folder)[-1:]:
            folder = os.path.join(run_folder, "attempts", f"{number:04d}")
            about = read_json(os.path.join(folder, "attempt.json")) or {}
            began = about.get("t")
            if about.get("mode") == "run" and isinstance(began, float) and began > self._began:
                return Attempt(run_folder, folder, number)
        return None


def is_gone(folder: str) -> bool:
    """Whether there is no such folder; a drive that does not answer may answer again."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


LOOK_SECONDS = 2.0
RETRY_SECONDS = 10.0
"""After a failure, which a full disk may be: until it is tried again."""
MOST_RESTARTS = 3

_NOT_RECORDED = "nothing is recorded; training continues"


class Upkeep:
    """Starts the sidecar again, three times at most, and the recording anew where it could not be, or is gone."""

    def __init__(self, recorder: Recorder, new_attempt: Callable[[str | None], Attempt]) -> None:
        self._recorder = recorder
        self._new_attempt = new_attempt
        self._sidecar: int | None = None
        self._born: int | None = None
        self._restarts = 0
        self._has_failed = self._given_up = False
        self._pid = os.getpid()
        self._next = time.monotonic() + LOOK_SECONDS
        self._step: Callable[[int | None], None] = recorder.beacon.step

    def begin(self, trouble: str | None) -> None:
        """Start the sidecar, unless there was `trouble` before, and look from now on at steps and starts of cells."""
        if trouble is None:
            self._start()
        else:
            self._fail(trouble)
        self._recorder.beacon.step = self._stepped  # type: ignore[method-assign]
        shell = notebook_shell()
        if shell is not None:
            shell.events.register("pre_run_cell", lambda info: self.look())

    def _stepped(self, number: int | None = None) -> None:
        self._step(number)
        if time.monotonic() >= self._next:
            self.look()

    def look(self, folder: str | None = None, *, now: bool = False) -> None:
        """See to it that this process is recorded; where it is not yet, into `folder` if one is given."""
        is_due = now or folder is not None or time.monotonic() >= self._next
        if os.getpid() != self._pid or self._given_up or (self._has_failed and not is_due):
            return
        self._next = time.monotonic() + LOOK_SECONDS
        try:
            self._look(folder)
        except (RunFolderError, OSError) as error:
            self._fail(f"{_NOT_RECORDED}: {error}")
        except Exception as error:  # noqa: BLE001 - a guard that fails must not end the training
            trouble("the recorder's upkeep", error)
            self._fail(f"the recorder crashed and cannot be restarted: {error!r}; training continues")

    def _look(self, folder: str | None) -> None:
        attempt = self._recorder.attempt
        # Its own part of it: another process may have begun to record in the same place since.
        if attempt is not None and is_gone(os.path.join(attempt.folder, f"process-{self._pid}")):
            self._leave(attempt)
            if self._given_up:
                return
            attempt = None
        if attempt is None:
            self._move(self._new_attempt(folder))
            self._start()
            if not self._has_failed:
                say(f"a new recording starts in {self._recorder.folder}")
        elif self._born is None or _born(self._sidecar) != self._born:
            self._start_again()

    def _move(self, attempt: Attempt) -> None:
        try:
            self._recorder.move(attempt)
        except OSError:
            discard(attempt)
            raise

    def _leave(self, attempt: Attempt) -> None:
        """The folder was moved or removed: its sidecar would write an end that nobody finds."""
        if self._sidecar is not None and self._born is not None and _born(self._sidecar) == self._born:
            os.kill(self._sidecar, signal.SIGTERM)
        self._sidecar = self._born = None
        self._recorder.move(None)
        # Where all around it went with it, making it there again would only litter.
        self._given_up = is_gone(os.path.dirname(os.path.dirname(attempt.run_folder)))
        rest = f"; {_NOT_RECORDED}" if self._given_up else ""
        say(f"the folder of the recording is gone: {attempt.run_folder}{rest}")

    def _start_again(self) -> None:
        if self._restarts >= MOST_RESTARTS:
            self._given_up = True
            say(f"the recorder crashed again and will not be restarted: {_NOT_RECORDED}")
            return
        had_failed = self._has_failed
        self._start()
        if self._has_failed:
            return
        if had_failed:
            say("the recorder is running now; what happened before is not recorded")
            return
        self._restarts += 1
        self._recorder.event("sidecar", what="restarted", times=self._restarts)
        say("the recorder crashed and was restarted; what happened in between is not recorded")

    def _start(self) -> None:
        assert self._recorder.attempt is not None
        self._sidecar = start_sidecar(self._recorder.attempt, self._pid)
        self._born = _born(self._sidecar)
        if self._sidecar is None:
            self._fail("the sidecar did not start: no samples are taken; training continues")
        else:
            self._has_failed = False

    def _fail(self, text: str) -> None:
        """Told once; tried again later, since a disk that is full now may have room then."""
        self._next = time.monotonic() + RETRY_SECONDS
        if not self._has_failed and not self._given_up:
            say(text)
        self._has_failed = True


def say(text: str) -> None:
    """A line on the training's stderr."""
    try:
        sys.stderr.write(f"buoy: {visible(text)}\n")
    except (OSError, AttributeError):
        pass  # stderr is closed


def _born(pid: int | None) -> int | None:
    """When this process began, by which it is known from a later one of the same number; None when it is gone."""
    stat = procfs.stat_of(pid) if pid is not None else None
    return stat.start_ticks if stat is not None and stat.state not in ("Z", "X") else None
