"""One writer for one run: a lock that dies with its holders, and a note in it of who that is.

Others ask whether a lock is held, and which writer processes have it: for messages, and to stop waiting for them.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable

from buoy.errors import BuoyError
from buoy.flight.attempt import is_kernel
from buoy.machine import files, host
from buoy.machine.files import open_regular, parse_json, read_at
from buoy.machine.procfs import ProcessReader, field, parse_stat, read_bytes
from buoy.text import whole_number
from buoy.units import format_duration


def is_held(path: str) -> bool | None:
    """Whether some process holds this lock file; None where that is not known."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        import fcntl
    except ImportError:
        os.close(descriptor)
        return None  # Windows
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(descriptor)


NAME = "lock"
"""The file in `checkpoints/`."""

_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for the disk"}


def writers_of(checkpoints: str) -> list[int]:
    """The numbers of the writer processes that hold this run's lock; empty where that cannot be seen."""
    try:
        lock = os.stat(os.path.join(checkpoints, NAME))
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    found = []
    for name in names:
        if b"writer.py" in read_bytes(f"/proc/{name}/cmdline", 4096) and _has_open(name, lock):
            found.append(int(name))
    return sorted(found)


def in_words(pids: list[int]) -> str:
    """`process 1234, stopped`; nothing where none was seen."""
    return "; ".join(f"process {pid}" + (f", {state}" if (state := _state(pid)) else "") for pid in pids)


def work_done(pids: list[int]) -> object:
    """A value that changes while any of them does something: processor time and bytes handed to the disk."""
    marks: list[object] = []
    for pid in pids:
        stat = parse_stat(read_bytes(f"/proc/{pid}/stat"))
        written = field(read_bytes(f"/proc/{pid}/io"), b"wchar:")
        marks.append((pid, stat.cpu_seconds if stat is not None else None, written))
    return tuple(marks)


def _state(pid: int) -> str | None:
    stat = parse_stat(read_bytes(f"/proc/{pid}/stat"))
    return _STATES.get(stat.state) if stat is not None else None


def _has_open(name: str, file: os.stat_result) -> bool:
    try:
        for descriptor in os.listdir(f"/proc/{name}/fd"):
            there = os.stat(f"/proc/{name}/fd/{descriptor}")
            if (there.st_dev, there.st_ino) == (file.st_dev, file.st_ino):
                return True
    except OSError:
        pass  # it is gone, or another user's
    return False


_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_POLL = 0.05
_SILENT = 0.5
_PATIENCE_DEAD = 300.0
"""Seconds for the writer of a trainer that has died: it has at most one checkpoint to finish."""
_PATIENCE_STILL = 60.0
"""The same, for one that does nothing at all meanwhile."""
_PATIENCE_UNKNOWN = 5.0


class WriterBusy(BuoyError):  # noqa: N818 - says what happened
    """Another process writes the checkpoints of this run."""


def take(
    checkpoints: str,
    say: Callable[[str], object],
    finished_since: Callable[[float], int | None] = lambda since: None,
) -> int:
    """The run's lock as a descriptor, held until every copy of it is closed; `WriterBusy` says who has it.

    A trainer that died may have left a writer that is still finishing its last checkpoint: that is waited for.
    `finished_since` knows the step at which the training was finished after this time, if it was.
    """
    descriptor = files.open_old(os.path.join(checkpoints, NAME), os.O_RDWR | os.O_CREAT)
    try:
        _take(descriptor, checkpoints, say, finished_since)
        note = {"pid": os.getpid(), "host": host.hostname(), "boot": host.boot_id(),
                "start_ticks": _start_ticks(os.getpid()), "since": time.time()}  # fmt: skip
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        files.write_all(descriptor, json.dumps(note).encode() + b"\n")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def writes_for(trainer: int, checkpoints: str) -> bool:
    """Whether a writer still has the lock of this run for a trainer that is gone."""
    path = os.path.join(checkpoints, NAME)
    held = is_held(path)
    if held is None:  # no locks here
        try:
            return _is_being_written(checkpoints)
        except OSError:
            return False  # the round that follows meets it too, and is tried again
    if not held:
        return False
    try:
        descriptor = open_regular(path)
    except OSError:
        return False
    try:
        # Else another training has it, with a mirror of its own.
        return _read_note(descriptor).get("pid") == trainer
    finally:
        os.close(descriptor)


def _take(
    descriptor: int,
    checkpoints: str,
    say: Callable[[str], object],
    finished_since: Callable[[float], int | None],
) -> None:
    started, told, pids = time.monotonic(), False, list[int]()
    moved, mark = started, object()
    while True:
        try:
            _flock(descriptor)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _without_locks(descriptor, checkpoints, say, finished_since)
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        holder = _read_note(descriptor)
        living = _lives(holder)
        waited = time.monotonic() - started
        if living and holder.get("pid") == os.getpid():
            living = None  # our own writer, about to leave
        patience = _PATIENCE_DEAD if living is False else _PATIENCE_UNKNOWN if living is None else 0.0
        if pids and (now := work_done(pids)) != mark:
            moved, mark = time.monotonic(), now
        still = time.monotonic() - moved >= _PATIENCE_STILL
        if waited >= patience or (pids and still and living is False):
            if pids and not living:
                raise _stuck(checkpoints, pids, waited)
            raise _busy(checkpoints, holder, finished_since)
        if waited > _SILENT and not told:
            told = True
            pids = writers_of(checkpoints)
            moved = time.monotonic()
            who = f" ({in_words(pids)})" if pids else ""
            say(
                f"the checkpoint writer of the previous attempt{who} is finishing its checkpoint; "
                f"waiting for it, at most {format_duration(_PATIENCE_STILL if pids else patience)} "
                "while it does nothing"
            )
        time.sleep(_POLL)


def _flock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _without_locks(
    descriptor: int,
    checkpoints: str,
    say: Callable[[str], object],
    finished_since: Callable[[float], int | None],
) -> None:
    holder = _read_note(descriptor)
    living = _lives(holder)
    if living and holder.get("pid") != os.getpid():
        raise _busy(checkpoints, holder, finished_since)
    started = time.monotonic()
    while living is False and _is_being_written(checkpoints) and time.monotonic() - started < _PATIENCE_DEAD:
        time.sleep(_POLL)
    say(
        f"{checkpoints} is on a file system without locks: buoy cannot stop a second machine from writing there"
    )


def _is_being_written(checkpoints: str) -> bool:
    """Whether a writer on this machine is busy with an unfinished checkpoint, which bears its number."""
    for name in os.listdir(checkpoints):
        _, found, pid = name.partition(".part-")
        if found and (number := whole_number(pid)) and _start_ticks(number) is not None:
            return True
    return False


def _read_note(descriptor: int) -> dict[str, object]:
    try:
        note = parse_json(read_at(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _lives(holder: dict[str, object]) -> bool | None:
    """Whether the process that took the lock is alive; None when it is not known from here."""
    pid = holder.get("pid")
    if (
        not isinstance(pid, int)
        or holder.get("host") != host.hostname()
        or holder.get("boot") != host.boot_id()
    ):
        return None
    ticks = _start_ticks(pid)
    return ticks is not None and ticks == holder.get("start_ticks")


def _command_of(pid: int) -> list[str]:
    return read_bytes(f"/proc/{pid}/cmdline", 4096).decode("utf-8", "replace").split("\0")


def _start_ticks(pid: int) -> int | None:
    process = ProcessReader(pid)
    found = process.stat()
    process.close()
    return None if found is None or found.state in ("Z", "X") else found.start_ticks


def _stuck(checkpoints: str, pids: list[int], waited: float) -> WriterBusy:
    """It has the run's lock, and may still commit what it was given: nobody else may write until it is gone."""
    many = " ".join(map(str, pids))
    return WriterBusy(
        "the checkpoint writer of the previous attempt does not finish",
        received=f"{in_words(pids)}, waited for {format_duration(waited)}: {checkpoints}",
        expected="a writer that finishes its last checkpoint and exits",
        hint=f"check that the disk responds; `kill -9 {many}` ends the writer: committed checkpoints "
        "stay, and this training resumes from the newest of them",
    )


def _busy(
    checkpoints: str, holder: dict[str, object], finished_since: Callable[[float], int | None]
) -> WriterBusy:
    since = holder.get("since")
    age = format_duration(time.time() - since) if isinstance(since, (int, float)) else "n/a"
    pid = holder.get("pid")
    is_notebook = isinstance(pid, int) and _lives(holder) is True and is_kernel(_command_of(pid))
    kind = "a notebook's kernel, " if is_notebook else ""
    who = f"{kind}process {pid} on {holder.get('host')}, for {age}" if pid else "an unknown process"
    done = finished_since(since) if isinstance(since, (int, float)) else None
    # What it holds in memory may be all that there is of somebody's work: nobody is advised to kill it.
    if done is not None:
        ways = ["call `run.finish()` there"]
    elif is_notebook:
        ways = ["interrupt it there and call `run.finish()`"]
    else:
        ways = [f"end it (`kill {pid}`)"] if pid else []
    ways += ["restart that kernel"] if is_notebook else []
    return WriterBusy(
        f"another process is writing the checkpoints of {os.path.dirname(checkpoints)}",
        received=who
        + (f"; it finished this training, at step {done}, and still has it open" if done else ""),
        expected="one training per run folder",
        hint=", or ".join([*ways, "give this one a folder of its own"]),
    )
