"""A run's mirror, seen from the training and the command line: checked, started, watched, asked for what it holds.

Everything that touches the place happens in a process of its own (`worker.py`): a drive that hangs, vanishes
or fills up stops that process and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import IO, Any

from buoy.checkpoint.lock import is_held
from buoy.checkpoint.mirror.owner import life_of, owner_of, refuse_anothers, short_name
from buoy.checkpoint.mirror.storage import LOCK, STATUS, is_url, open_storage, place_of
from buoy.checkpoint.retention import Keep
from buoy.checkpoint.store import PassedOver, Unusable
from buoy.errors import BuoyError, UsageError
from buoy.machine import disk
from buoy.machine.files import read_json
from buoy.units import format_duration, format_share

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_LOOK_SECONDS = 2.0
_SILENCE = 120.0
"""Seconds without a byte after which a mirror is said not to answer."""
_ANSWER_SECONDS = 120.0
"""The same for a question that somebody waits for."""
_FINISH_SECONDS = 600.0
_MOST_STARTS = 3
"""So often a process that was killed is started again: what kills it more often will not stop."""
Trouble = Callable[[str, str], object]
Say = Callable[[str], object]


class MirrorFailed(BuoyError):  # noqa: N818 - says what happened
    """The mirror could not be read."""


class Mirror:
    """One run's mirror. `where` holds a folder per run, as the flight log's mirror does."""

    retry_seconds = 5.0
    """Pause after the first failure; it doubles with each further one, up to five minutes."""
    patience = 20.0
    """Seconds without a byte for which the end of the training waits for the last copy."""

    def __init__(self, run_folder: str, where: str, keep: Keep, name: str | None = None) -> None:
        """`name`: of the run there, for a user who reads; a training's own has the name of its folder."""
        self._run = os.path.abspath(run_folder)
        self._name = name or os.path.basename(self._run)
        self._keep = keep
        self.where = place_of(where)
        self.shown = re.sub(r"://[^/@]*@", "://***@", self.where)
        """The mirror without a password, for users and files."""
        self.log_folder = None if is_url(self.where) else self.where
        """Where the flight log's tail goes too; None when only fsspec reaches it."""
        self.newest_there: int | None = None
        """The newest step there when it was last searched; None when there is none."""
        self._mount: str | None = None
        self._look = 0.0
        self._was_safe = self._in_trouble = False
        self._attempt: str | None = None
        self._alive: IO[bytes] | None = None
        """The standard output of the process that copies: it says nothing, and ends with it."""
        self._restarts = 0
        self._owner: str | None = None
        self._unusable: list[str] = []
        """Names there that a search found damaged: no longer counted as copies."""
        if self.log_folder is None:
            _check_url(self.where)
            return
        _check_folder(self.where, self._run, self._name)
        self._mount = disk.mount_apart(self.where, self._run)
        if (
            name is None
        ):  # before the flight log or anything else is written there; of a URL the search says it
            try:
                owner = owner_of(open_storage(self.where, self._name, self._mount))
                refuse_anothers(owner, self._run, f"{self.shown}/{self._name}")
            except OSError:
                pass  # the search says what is wrong with it

    @property
    def doubt(self) -> str | None:
        """What a user should know of the place before training: it goes with this machine.

        A drive that is not mounted, or a typing error in its name, is such a folder: it is made without a warning.
        """
        try:
            if self.log_folder is None or os.stat(self._run).st_dev != os.stat(self.where).st_dev:
                return None
        except OSError:
            return None  # the search says what is wrong with it
        if disk.is_remote(self._run) is True:
            return None
        return (
            f"the mirror {self.where} is on the same disk as the run folder, so it does not survive this machine; "
            "check that the drive is mounted and its name is right"
        )

    @property
    def seconds_to_copy(self) -> float:
        """What the last copy took; 0 when none was made yet."""
        seconds = self._status().get("copy_seconds")
        return float(seconds) if isinstance(seconds, int | float) else 0.0

    def start(self, attempt: str | None = None) -> None:
        """Let a process copy, with the log of this attempt; it belongs to nobody and ends by itself.

        Comes after `search`: what that process removes may still be looked for.
        """
        try:
            os.unlink(os.path.join(self._run, STATUS))  # what an earlier one said is no longer so
        except OSError:
            pass
        self._attempt = attempt
        starter = self._spawn(
            "keep", pid=os.getpid(), attempt=attempt, life=life_of(self._run), unusable=self._unusable
        )
        starter.wait(_ANSWER_SECONDS)  # it forks at once
        if self._alive is not None:
            self._alive.close()
        self._alive = starter.stdout

    # -- while the training runs ----------------------------------------------------------------------------

    def report(self, now: float, trouble: Trouble, say: Say) -> None:
        """Look every few seconds at what its process says, and pass on what a user should know."""
        if now < self._look:
            return
        self._look = now + _LOOK_SECONDS
        if self._is_gone and not self._start_again(say):
            trouble("mirror", f"copying to the mirror {self.shown} has stopped: {self._end}")
            return
        status = self._status()
        problem = status.get("trouble")
        silent = time.time() - status["copying"]["moved"] if status.get("copying") else 0.0
        if problem is None and silent > _SILENCE:
            problem = f"it has not answered for {format_duration(silent)}"
        if problem is not None:
            self._in_trouble = True
            newest = status.get("newest")
            there = (
                f"step {newest} is the newest there"
                if newest is not None
                else "it has no checkpoint of this training"
            )
            trouble(
                "mirror",
                f"the mirror {self.shown} cannot take a checkpoint: {problem}; {there}; training continues",
            )
        elif status.get("damaged_here") is not None:
            trouble("mirror source", f"{status['damaged_here']}: it is not copied to the mirror {self.shown}")
        elif status.get("newest_safe") is not None and (self._in_trouble or not self._was_safe):
            again = "again " if self._in_trouble else ""
            self._was_safe, self._in_trouble = True, False
            lag = format_duration(max(0.0, status["newest_safe"] - status["newest_made"]))
            say(
                f"step {status['newest']} is {again}{safety(status)} the mirror {self.shown}, {lag} after it was made"
            )

    def finish(self, newest: int, made: float | None, say: Say) -> None:
        """Wait until the newest checkpoint, made then, is there, for as long as it moves."""
        if self._alive is None:
            return
        try:
            if self._wait_for(newest, made, say):
                say(f"step {self._status()['newest']} is {safety(self._status())} the mirror {self.shown}")
                return
        except KeyboardInterrupt:
            pass
        status = self._status()
        problem = status.get("trouble") or status.get("damaged_here")
        if status.get("not_ours"):
            then = "it is not copied"
        elif self._is_gone:
            then = f"copying has stopped: {self._end}"
        else:
            then = "copying continues in the background"
        why = f" ({problem})" if problem else ""
        say(f"step {newest} is not yet in the mirror {self.shown}{why}; {then}")

    def _wait_for(self, newest: int, made: float | None, say: Say) -> bool:
        """Whether it is there; False as soon as there is no reason to wait."""
        began = moved = time.monotonic()
        done, was_said = -1, False
        while time.monotonic() - began < _FINISH_SECONDS:
            status = self._status()
            copying = status.get("copying") or {}
            step = status.get("newest")
            # A newer one counts when it was sent by this session: an earlier life may have left its own.
            is_there = step == newest or ((step or 0) > newest and status.get("newest_safe") is not None)
            if step == newest and made is not None:
                is_there = status.get("newest_made") == made  # not one of that step from an earlier life
            if is_there and (not copying or self._is_gone):  # what a killed one was copying says nothing
                return True
            if self._is_gone:
                if not self._start_again(say):
                    return False
                moved = time.monotonic()
            if copying.get("done", 0) != done:
                moved, done = time.monotonic(), copying.get("done", 0)
            still = time.monotonic() - moved
            if status.get("trouble") or status.get("damaged_here") or still > self.patience:
                return False
            if not was_said and still > _LOOK_SECONDS:
                was_said = True
                say(f"copying step {newest} to the mirror {self.shown}; Ctrl-C leaves that to the background")
            time.sleep(0.05)
        return False

    def _status(self) -> dict[str, Any]:
        """What the mirror's process last said; empty before it said anything."""
        return read_json(os.path.join(self._run, STATUS)) or {}

    @property
    def _is_gone(self) -> bool:
        """Whether the process that copies has ended; while the training lives, it never does so by itself."""
        return self._alive is not None and _says_something(self._alive, 0.0)

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
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    @property
    def _end(self) -> str:
        count = f"{self._restarts + 1} times" if self._restarts else "once"
        return (
            f"its process has ended {count} (was it killed?); "
            "the next start of the training copies what is missing"
        )

    # -- the way back -----------------------------------------------------------------------------------------

    @property
    def made_by(self) -> str:
        """Whose work was found there, to be added to a message: a new training may have meant to start over."""
        here = short_name(self._run)
        if self._owner is None:
            return ""
        if self._owner == here:
            return f" (made by the run {here})"
        return (
            f" (made by the run {self._owner}; this one is {here}: if that is another training, "
            "name another mirror or another run folder)"
        )

    def bring_back(
        self,
        newer_than: int | None,
        say: Say,
        step: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int | None:
        """Fetch the newest good one that is newer than what is here; its step, or None when there is none."""
        passed = PassedOver(say)
        brought = self._fetch(passed, say, newer_than=newer_than, step=step, life=None, progress=progress)
        passed.close()
        return brought

    def search(self, passed: PassedOver, newer_than: int | None, say: Say) -> int | None:
        """The same for a training, whose mirror it is from now on; `UsageError` when it is another run's."""
        return self._fetch(passed, say, newer_than=newer_than, step=None, life=life_of(self._run))

    def _fetch(
        self,
        passed: PassedOver,
        say: Say,
        progress: Callable[[int, int], object] | None = None,
        **orders: object,
    ) -> int | None:
        """`life`: of the training that makes the mirror its own with this; None for one who only reads."""
        for answer in self._ask("fetch", **orders):
            if "refused" in answer:
                what, received, expected, hint = answer["refused"]
                raise UsageError(what, received=received, expected=expected, hint=hint)
            if "waits" in answer:
                say(answer["waits"])
            elif "owner" in answer:
                self._owner = answer["owner"]
            elif "newest" in answer:
                self.newest_there = answer["newest"]
            elif "unusable" in answer:
                found = Unusable(**answer["unusable"])
                self._unusable.append(found.name)
                passed.note(found, f"step {found.step} in the mirror is {found.fault} ({found.what})")
            elif "progress" in answer and progress is not None:
                progress(*answer["progress"])
            elif answer.get("step") is not None:
                return int(answer["step"])
        return None

    def _ask(self, mode: str, **orders: object) -> Iterator[dict[str, Any]]:
        """The answers of a process that reads the mirror; given up when it is silent for too long."""
        process = self._spawn(mode, **orders)
        assert process.stdout is not None
        rest = b""
        try:
            while True:
                if not _says_something(process.stdout, _ANSWER_SECONDS):
                    raise self._failed(f"no answer for {format_duration(_ANSWER_SECONDS)}")
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise self._failed(str(answer["error"]))
                    yield answer
        finally:
            process.kill()
            process.stdout.close()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass  # a hanging drive does not let it go

    def _failed(self, words: str) -> MirrorFailed:
        return MirrorFailed(
            "the mirror cannot be read",
            received=f"{self.shown}: {words}",
            expected="a folder or a store that responds",
            hint="check that it is mounted and belongs to this user, or that its credentials are set",
        )

    def _spawn(self, mode: str, **orders: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _WORKER, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        orders = {**orders, "run": self._run, "name": self._name, "where": self.where, "shown": self.shown,
                  "mount": self._mount, "keep": asdict(self._keep), "retry": self.retry_seconds,
                  "path": sys.path if is_url(self.where) else []}  # fmt: skip
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass
        return process


def _says_something(stream: IO[bytes], seconds: float) -> bool:
    """Whether it can be read, or has ended, within this time; `select` knows no descriptor above 1023."""
    if not hasattr(select, "poll"):
        return True  # Windows cannot wait for a pipe: whoever reads waits
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _check_folder(where: str, run: str, name: str) -> None:
    """What can be known at once: said before training, not after the first checkpoint."""
    if disk.is_missing_drive(where):
        raise UsageError(
            "Google Drive is not mounted",
            received=f"mirror={where!r}",
            expected="a mounted drive",
            hint="`from google.colab import drive; drive.mount('/content/drive')`",
        )
    try:
        os.makedirs(where, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the mirror cannot be written",
            received=f"mirror={where!r} ({error.strerror})",
            expected="a folder that can be made, or a URL such as s3://bucket/runs",
            hint="check that the drive is mounted",
        ) from None
    here, there = os.path.realpath(run), os.path.realpath(os.path.join(where, name))
    if os.path.commonpath([here, there]) == here:  # a copy there would be lost with it
        raise UsageError(
            "the mirror is the run folder itself",
            received=f"mirror={where!r} for the run {run}",
            expected="a second place: another disk, a mounted drive, a URL",
            hint="`mirror='/content/drive/MyDrive/runs'`",
        )


def _check_url(where: str) -> None:
    protocol = where.partition("://")[0]
    if protocol == "memory":
        raise UsageError(
            "the mirror cannot be in memory",
            received=f"mirror={where!r}",
            expected="a place that outlives this machine",
            hint="`s3://bucket/runs` or a mounted folder",
        )
    package = "fsspec"
    if find_spec(package) is not None:
        from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped,unused-ignore]

        if protocol not in registry and protocol not in known_implementations:
            raise UsageError(
                "unknown kind of mirror",
                received=f"mirror={where!r}",
                expected="a folder, or a URL that fsspec knows",
                hint="`s3://bucket/runs`, `gs://bucket/runs`, `hf://...`",
            )
        # The class that speaks it, by its whole name; the package is called like its first word.
        package = known_implementations.get(protocol, {}).get("class", package).partition(".")[0]
    if find_spec(package) is None:
        raise UsageError(
            f"the mirror needs {package}, which is not installed",
            received=f"mirror={where!r}",
            expected="fsspec and the package that speaks this protocol",
            hint=f"`pip install {package}`",
        )


def read_status(run: str) -> dict[str, Any]:
    """What the mirror's process last said, and whether it is still there (`running`; None: cannot be known)."""
    status = read_json(os.path.join(run, STATUS)) or {}
    return {**status, "running": is_held(os.path.join(run, LOCK))} if status else {}


def lag_in_words(status: dict[str, Any], newest_here: int | None, now: float) -> str | None:
    """`step 1150 safe in s3://runs 41 s ago, 50 steps behind`; None when nothing is known of a mirror."""
    if not status:
        return None
    where, newest, safe = status.get("home"), status.get("newest"), status.get("newest_safe")
    is_behind = True
    if not isinstance(newest, int):
        words = f"nothing in the mirror {where} yet"
    else:
        age = ", by its size: it was sent earlier"
        if isinstance(safe, int | float):
            age = f" {format_duration(max(0.0, now - safe))} ago"
        is_behind = newest_here is not None and newest_here > newest
        behind = f", {(newest_here or 0) - newest} steps behind" if is_behind else ""
        words = f"step {newest} {safety(status)} the mirror {where}{age}{behind}"
    copying = status.get("copying")
    if status.get("running") is False and (copying or is_behind):
        words += (
            "; copying has stopped: its process has ended; the next start of the training copies the rest"
        )
    elif isinstance(copying, dict):
        done, size = copying.get("done"), copying.get("bytes")
        if isinstance(done, int) and isinstance(size, int) and size:
            words += f"; copying step {copying.get('step')}: {format_share(done, size)}"
    if status.get("trouble"):
        words += f"; in trouble: {status['trouble']}"
    return words


def safety(status: dict[str, Any]) -> str:
    """Of the newest copy. Google Drive's mount takes it at once and uploads it at a time of its own."""
    if status.get("newest_safe") is None:
        return "in"
    return "handed to Drive (which uploads it by itself) in" if status.get("uploads_later") else "safe in"
