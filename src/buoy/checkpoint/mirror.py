"""A run's second home, seen from the training and the command line: started, watched, asked for what it holds.

Everything that touches the home happens in a process of its own (`mirror_worker.py`): a drive that hangs, vanishes
or fills up stops that process and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import IO, Any

from buoy.checkpoint.home_folder import FolderHome
from buoy.checkpoint.homes import is_url
from buoy.checkpoint.mirror_place import check, check_is_elsewhere, place_of, shared_disk
from buoy.checkpoint.mirror_status import STATUS, safety
from buoy.checkpoint.owner import (
    is_home_of,
    life_of,
    name_before,
    owner_there,
    refuse_anothers,
    short_name,
)
from buoy.checkpoint.passed_over import PassedOver, Unusable
from buoy.checkpoint.retention import Keep
from buoy.errors import BuoyError, UsageError
from buoy.machine import disk
from buoy.machine.records import read_json
from buoy.units import format_duration

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mirror_worker.py")
_LOOK_SECONDS = 2.0
_SILENCE = 120.0
"""Seconds without a byte after which a home is said not to answer."""
_ANSWER_SECONDS = 120.0
"""The same for a question that somebody waits for."""
_FINISH_SECONDS = 600.0
_MOST_STARTS = 3
"""So often a process that was killed is started again: what kills it more often will not stop."""
Trouble = Callable[[str, str], object]
Say = Callable[[str], object]


class MirrorFailed(BuoyError):  # noqa: N818 - says what happened
    """The second home could not be read."""


class Mirror:
    """One run's second home. `where` holds a folder per run, as the flight log's mirror does."""

    retry_seconds = 5.0
    """Pause after the first failure; it doubles with each further one, up to five minutes."""
    patience = 20.0
    """Seconds without a byte for which the end of the training waits for the last copy."""

    def __init__(self, run_folder: str, where: str, keep: Keep, name: str | None = None) -> None:
        self._run = os.path.abspath(run_folder)
        self._name = name or os.path.basename(self._run)
        self._keep = keep
        self.where = place_of(where)
        self.shown = re.sub(r"://[^/@]*@", "://***@", self.where)
        """The home without a password, for people and files."""
        self.log_folder = None if is_url(self.where) else self.where
        """Where the flight log's tail goes too; None when only fsspec reaches it."""
        self._mount: str | None = None
        self._look = 0.0
        self._told_first = False
        self._in_trouble = False
        self._started = False
        self._attempt: str | None = None
        self._process: int | None = None
        """A descriptor of the process that copies, by which its end is seen."""
        self._restarts = 0
        self._owner: str | None = None
        self._orders: IO[bytes] | None = None
        """The way to the process that is started and has not begun."""
        self._unusable: list[str] = []
        """Names there that a search found damaged: no longer counted as copies."""
        check(self.where)
        if self.log_folder is not None:
            check_is_elsewhere(self.where, self._run, self._name)
            self._mount = disk.mount_apart(self.where, self._run)
        if self.log_folder is not None and name is None:  # a training's, which would write there
            self._refuse_anothers()

    @property
    def doubts(self) -> list[str]:
        """What a person should know of the place before training."""
        if self.log_folder is None:
            return []
        try:
            found = [shared_disk(self.where, self._run), self._left_behind()]
        except OSError:
            return []  # the search says what is wrong with it
        return [words for words in found if words is not None]

    def _left_behind(self) -> str | None:
        """The place of a run whose folder was renamed: nothing is copied there any more, and nothing removed."""
        name = name_before(self._run)
        if name is None or not is_home_of(owner_there(FolderHome(self.where, name, self._mount)), self._run):
            return None
        return (
            f"this run's folder was called {name} before: its copies in {self.shown}/{name} stay as they are, "
            f"new ones go to {self.shown}/{self._name}"
        )

    @property
    def seconds_to_copy(self) -> float:
        """What the last copy took; 0 when none was made yet."""
        seconds = self.status().get("copy_seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def status(self) -> dict[str, Any]:
        """What the mirror's process last said; empty before it said anything."""
        return read_json(os.path.join(self._run, STATUS)) or {}

    def start(self, attempt: str | None = None) -> None:
        """Start the process that copies, with the log of this attempt. It belongs to nobody and ends by itself.

        It touches nothing before `begin`: what it would tidy up may still be looked for.
        """
        try:
            os.unlink(os.path.join(self._run, STATUS))  # what an earlier one said is no longer so
        except OSError:
            pass
        self._attempt = attempt
        starter = self._spawn("keep", stdout=subprocess.PIPE, pid=os.getpid(), attempt=attempt,
                              life=life_of(self._run))  # fmt: skip
        assert starter.stdout is not None
        with starter.stdout as told:
            pid = (json.loads(told.readline() or b"{}")).get("pid")
        starter.wait(_ANSWER_SECONDS)  # it forks at once
        self._orders = starter.stdin
        self._watch(pid)

    def begin(self) -> None:
        """The checkpoint to go on from is found: let the copying begin, past what was found to be damaged."""
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.write(json.dumps(self._unusable).encode() + b"\n")
            orders.close()
            self._started = True

    def tell(self, now: float, trouble: Trouble, say: Say) -> None:
        """Look every few seconds at what it says, and pass on what a person should know."""
        if now < self._look:
            return
        self._look = now + _LOOK_SECONDS
        if self._is_gone() and not self._start_again(say):
            trouble("mirror", f"nothing more is copied to the mirror {self.shown}: {self._end_in_words()}")
            return
        status = self.status()
        copying = status.get("copying") or {}
        words = status.get("trouble")
        silent = time.time() - copying["moved"] if copying else 0.0
        if words is None and silent > _SILENCE:
            words = f"it has not answered for {format_duration(silent)}"
        if words is not None:
            self._in_trouble = True
            there = (
                f"step {status['newest']} is the newest there"
                if status.get("newest") is not None
                else "it has none of this training"
            )
            trouble(
                "mirror",
                f"the mirror {self.shown} takes no checkpoint: {words}; {there}; the training goes on",
            )
        elif status.get("damaged_here") is not None:
            trouble("mirror source", f"{status['damaged_here']}: it is not copied to the mirror {self.shown}")
        elif status.get("newest_safe") is not None and (self._in_trouble or not self._told_first):
            again = "again " if self._in_trouble else ""
            self._told_first, self._in_trouble = True, False
            lag = format_duration(max(0.0, status["newest_safe"] - status["newest_made"]))
            say(
                f"step {status['newest']} is {again}{safety(status)} the mirror {self.shown}, {lag} after it was made"
            )

    def finish(self, newest: int, made: float | None, say: Say, wait: bool = True) -> None:
        """Wait until the newest checkpoint, made then, is there, for as long as it moves; it goes on without us."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if not self._started:
            return
        until = time.monotonic() + (_FINISH_SECONDS if wait else 0.0)
        moved, done = time.monotonic(), -1
        told = False
        try:
            while time.monotonic() < until:
                status = self.status()
                copying = status.get("copying") or {}
                is_there = status.get("newest") is not None and status["newest"] >= newest
                if is_there and status["newest"] == newest and made is not None:
                    is_there = status.get("newest_made") == made  # not one of that step from an earlier life
                if is_there and status.get("newest_safe") is not None and not copying:
                    say(f"step {status['newest']} is {safety(status)} the mirror {self.shown}")
                    return
                if self._is_gone():
                    if not self._start_again(say):
                        break
                    moved = time.monotonic()
                if copying.get("done", 0) != done:
                    moved, done = time.monotonic(), copying.get("done", 0)
                in_trouble = status.get("trouble") or status.get("damaged_here")
                if in_trouble or time.monotonic() - moved > self.patience:
                    break
                if not told and time.monotonic() - moved > _LOOK_SECONDS:
                    told = True
                    say(
                        f"copying step {newest} to the mirror {self.shown}; Ctrl-C leaves that to the background"
                    )
                time.sleep(0.05)
        except KeyboardInterrupt:
            pass
        status = self.status()
        trouble = status.get("trouble") or status.get("damaged_here")
        words = f" ({trouble})" if trouble else ""
        if status.get("not_ours"):
            then = "it is not copied"
        elif self._is_gone():
            then = f"nothing copies it any more: {self._end_in_words()}"
        else:
            then = "the copying goes on in the background"
        say(f"step {newest} is not yet in the mirror {self.shown}{words}; {then}")

    @property
    def made_by(self) -> str:
        """Whose work was found there, to be added to words: a new training may have meant to begin anew."""
        here = short_name(self._run)
        if self._owner is None:
            return ""
        if self._owner == here:
            return f" (made by the run {here})"
        return (
            f" (made by the run {self._owner}; this one is {here}: if that is another training, "
            "name another mirror or another run folder)"
        )

    def newest_step(self) -> int | None:
        """The newest step there; None when there is none, or nobody can tell."""
        try:
            return max((int(copy["step"]) for copy in self.copies()), default=None)
        except MirrorFailed:
            return None

    def copies(self) -> list[dict[str, Any]]:
        """The complete checkpoints there, newest first."""
        for answer in self._ask("list"):
            if "copies" in answer:
                return list(answer["copies"])
        return []

    def bring_back(
        self,
        newer_than: int | None,
        say: Say,
        step: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int | None:
        """Fetch the newest good one that is newer than what is here; its step, or None when there is none."""
        passed = PassedOver(say)
        brought = self._fetch(passed, newer_than, step, progress, None)
        passed.close()
        return brought

    def search(self, passed: PassedOver, newer_than: int | None) -> int | None:
        """The same for a training, whose home it is from now on; `UsageError` when it is another run's."""
        return self._fetch(passed, newer_than, None, None, life_of(self._run))

    def _fetch(
        self,
        passed: PassedOver,
        newer_than: int | None,
        step: int | None,
        progress: Callable[[int, int], object] | None,
        life: str | None,
    ) -> int | None:
        """`life`: of the training that makes the home its own with this; None for one who only reads."""
        for answer in self._ask("fetch", newer_than=newer_than, step=step, life=life):
            if "refused" in answer:
                what, received, expected, hint = answer["refused"]
                raise UsageError(what, received=received, expected=expected, hint=hint)
            if "owner" in answer:
                self._owner = answer["owner"]
            elif "unusable" in answer:
                found = Unusable(**answer["unusable"])
                self._unusable.append(found.name)
                passed.note(found, f"step {found.step} in the mirror is {found.fault} ({found.what})")
            elif "progress" in answer and progress is not None:
                progress(*answer["progress"])
            elif answer.get("step") is not None:
                return int(answer["step"])
        return None

    def _refuse_anothers(self) -> None:
        """Before the flight log or anything else is written there; of a URL the search tells it."""
        home = FolderHome(self.where, self._name, self._mount)
        try:
            refuse_anothers(owner_there(home), home, self._run, f"{self.shown}/{self._name}")
        except OSError:
            pass  # the search says what is wrong with it

    def _watch(self, pid: object) -> None:
        if self._process is not None:
            os.close(self._process)
        try:
            self._process = os.pidfd_open(pid) if isinstance(pid, int) else None
        except ProcessLookupError:
            # Ended already: always ready to read, as its own is.
            self._process = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            self._process = None  # an old kernel: its end is not seen

    def _is_gone(self) -> bool:
        """Whether the process that copies has ended; while the training lives, it never does so by itself."""
        return (
            self._started and self._process is not None and bool(select.select([self._process], [], [], 0)[0])
        )

    def _start_again(self, say: Say) -> bool:
        if self._restarts == _MOST_STARTS:
            return False
        self._restarts += 1
        say(
            f"the process that copies to the mirror {self.shown} has ended (was it killed?): started again, "
            f"{self._restarts} of {_MOST_STARTS} times"
        )
        try:
            self.start(self._attempt)
            self.begin()
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def _end_in_words(self) -> str:
        return (
            f"its process has ended {self._restarts + 1} times (was it killed?); "
            "a new start of the training goes on with it"
        )

    def _ask(self, mode: str, **orders: object) -> Iterator[dict[str, Any]]:
        """The answers of a process that reads the home; given up when it is silent for too long."""
        asked = {"newer_than": None, "step": None, "life": None, **orders}
        process = self._spawn(mode, stdout=subprocess.PIPE, **asked)
        lines: queue.Queue[bytes] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        try:
            while line := lines.get(timeout=_ANSWER_SECONDS):
                answer = json.loads(line)
                if "error" in answer:
                    raise self._failed(str(answer["error"]))
                yield answer
        except queue.Empty:
            raise self._failed(f"no answer for {format_duration(_ANSWER_SECONDS)}") from None
        finally:
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            threading.Thread(target=process.wait, daemon=True).start()  # a hanging drive may not let it go

    def _failed(self, words: str) -> MirrorFailed:
        return MirrorFailed(
            "the mirror cannot be read",
            received=f"{self.shown}: {words}",
            expected="a folder or a store that answers",
            hint="look whether it is mounted and belongs to this user, or its credentials are set",
        )

    def _spawn(self, mode: str, stdout: int, **orders: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _WORKER, mode],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        path = sys.path if is_url(self.where) else []
        orders = {**orders, "run": self._run, "name": self._name, "where": self.where, "shown": self.shown,
                  "mount": self._mount, "keep": asdict(self._keep), "path": path,
                  "retry": self.retry_seconds, "life": orders.get("life")}  # fmt: skip
        try:
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        return process


def _pump(stream: Any, lines: queue.Queue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")
