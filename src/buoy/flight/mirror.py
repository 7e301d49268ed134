"""Copies the tail of the log to a second home, such as a mounted drive that outlives the machine.

Each copy is made by a short-lived fork: a drive that hangs or vanishes stops that process and nothing else.
"""

from __future__ import annotations

import os

PERIOD = 45.0
_TAIL_BYTES = 512 << 10
"""At full rate about five minutes; the minutes and events go whole."""
_WHOLE = (
    "attempt.json",
    "events.jsonl",
    "minutes.jsonl",
    "exit.json",
    "death.json",
    "verdict.json",
)


class Mirror:
    """The second home of one attempt's log."""

    def __init__(self, attempt_folder: str, mirror: str) -> None:
        self._from = attempt_folder
        run_folder = os.path.dirname(os.path.dirname(attempt_folder))
        self._run_json = os.path.join(run_folder, "run.json")
        self._run_to = os.path.join(mirror, os.path.basename(run_folder))
        self._to = os.path.join(self._run_to, "attempts", os.path.basename(attempt_folder))
        self._copier: int | None = None
        self._due = 0.0
        self.trouble: str | None = None
        """Why the last copy failed, in words, or None."""

    def tick(self, now: float, alarm: bool = False) -> None:
        """Copy if it is time, or at once on an alarm; never waits."""
        self._reap()
        if self._copier is None and (alarm or now >= self._due):
            self._due = now + PERIOD
            self._start()

    def last_copy(self) -> None:
        """The attempt has ended: copy once more, in a process of its own that outlives the sidecar."""
        self._start()

    def _start(self) -> None:
        try:
            child = os.fork()
        except OSError as error:
            self.trouble = f"cannot fork: {error.strerror}"
            return
        if child:
            self._copier = child
            return
        code = 1
        try:
            os.nice(5)
            copy_tail(self._from, self._run_json, self._run_to, self._to)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(min(code, 255))

    def _reap(self) -> None:
        if self._copier is None:
            return
        try:
            pid, status = os.waitpid(self._copier, os.WNOHANG)
        except OSError:
            self._copier = None
            return
        if pid:
            self._copier = None
            code = os.waitstatus_to_exitcode(status)
            self.trouble = None if code == 0 else (os.strerror(code) if code > 0 else f"signal {-code}")


def copy_tail(attempt_folder: str, run_json: str, run_to: str, to: str) -> None:
    """Copy what a reader needs to judge this attempt somewhere else; every file whole or not at all."""
    os.makedirs(to, exist_ok=True)
    _copy(run_json, os.path.join(run_to, "run.json"))
    names = sorted(os.listdir(attempt_folder))
    for name in names:
        source = os.path.join(attempt_folder, name)
        if name in _WHOLE:
            _copy(source, os.path.join(to, name))
        elif name.startswith("process-"):
            os.makedirs(os.path.join(to, name), exist_ok=True)
            for words in os.listdir(source):
                _copy(os.path.join(source, words), os.path.join(to, name, words))
    _copy_samples([name for name in names if name.startswith("samples-")], attempt_folder, to)


def _copy_samples(segments: list[str], attempt_folder: str, to: str) -> None:
    """The last lines of the last two segments, under one fixed name so that the drive holds one file of them."""
    tail = header = b""
    for name in segments[-2:]:
        with open(os.path.join(attempt_folder, name), "rb") as file:
            header, _, lines = file.read().partition(b"\n")
            tail += lines
    if len(tail) > _TAIL_BYTES:
        tail = tail[-_TAIL_BYTES:].partition(b"\n")[2]
    if header:
        _write(os.path.join(to, "samples-tail.jsonl"), header + b"\n" + tail)


def _copy(source: str, target: str) -> None:
    try:
        with open(source, "rb") as file:
            data = file.read(8 << 20)
    except FileNotFoundError:
        return
    _write(target, data)


def _write(target: str, data: bytes) -> None:
    beside = target + ".part"
    with open(beside, "wb") as file:
        file.write(data)
    os.replace(beside, target)
