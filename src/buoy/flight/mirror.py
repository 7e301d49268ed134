"""Copies the tail of the log to a second home, such as a mounted drive that outlives the machine.

Each copy is made by a short-lived fork: a drive that hangs or vanishes stops that process and nothing else.
A home that is named while the recorder runs already (a notebook's, joined by a run with a mirror) is left in
`mirrors.json` of the attempt; the run's folder there then points to the copy of the recording, as it does here.
"""

from __future__ import annotations

import json
import os

from buoy.flight.attempt import attempt_numbers, new_marker, read_json, write_json

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


_ASKED = "mirrors.json"
_IDENTITY = ("wall", "boot_id", "pid")
"""By what one attempt is known from another of the same number, which a new machine makes too; pointers hold it."""


def ask_for_copies(attempt_folder: str, mirror: str, run_folder: str) -> None:
    """Let the recorder of this attempt copy its log to this home too, on behalf of the run in this folder."""
    path = os.path.join(attempt_folder, _ASKED)
    asked = (read_json(path) or {}).get("mirrors")
    asked = asked if isinstance(asked, list) else []
    home = {"folder": os.path.abspath(mirror), "run": os.path.abspath(run_folder)}
    if home not in asked:
        write_json(path, {"mirrors": [*asked, home]})


class Mirrors:
    """Every second home of one attempt's log: the one given at its start, and those asked for since."""

    def __init__(self, attempt_folder: str, first: object) -> None:
        self._folder = attempt_folder
        self._homes: dict[str, Mirror] = {}
        self._asked = 0
        self._told: dict[str, str | None] = {}
        if isinstance(first, str):
            self._homes[first] = Mirror(attempt_folder, first)

    def tick(self, now: float, alarm: bool = False) -> None:
        """Copy where it is time; never waits."""
        self._look()
        for home in self._homes.values():
            home.tick(now, alarm)

    def last_copy(self) -> None:
        """The attempt has ended."""
        self._look()
        for home in self._homes.values():
            home.last_copy()

    def new_troubles(self) -> list[tuple[str, str]]:
        """(home, why it takes no copy), each once."""
        found = [
            (folder, home.trouble)
            for folder, home in self._homes.items()
            if home.trouble is not None and home.trouble != self._told.get(folder)
        ]
        self._told = {folder: home.trouble for folder, home in self._homes.items()}
        return found

    def _look(self) -> None:
        path = os.path.join(self._folder, _ASKED)
        try:
            changed = os.stat(path).st_mtime_ns
        except OSError:
            return
        if changed == self._asked:
            return
        self._asked = changed
        asked = (read_json(path) or {}).get("mirrors")
        for home in asked if isinstance(asked, list) else ():
            folder, run = home["folder"], home["run"]
            if folder not in self._homes:
                self._homes[folder] = Mirror(self._folder, folder)
            self._homes[folder].serve(run)


class Mirror:
    """The second home of one attempt's log."""

    def __init__(self, attempt_folder: str, mirror: str) -> None:
        self._from = attempt_folder
        self._mirror = mirror
        self._recording = os.path.dirname(os.path.dirname(attempt_folder))
        self._runs: list[str] = []
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

    def serve(self, run_folder: str) -> None:
        """This run is recorded by the attempt: let its folder in the mirror point to the copy, from now on."""
        if os.path.basename(run_folder) != os.path.basename(self._recording):
            self._runs.append(run_folder)
        self._due = 0.0

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
            self._copy()
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(min(code, 255))

    def _copy(self) -> None:
        name = os.path.basename(self._recording)
        run_to = os.path.join(self._mirror, name)
        number = _number_there(self._from, run_to)
        to = os.path.join(run_to, "attempts", f"{number:04d}")
        copy_tail(self._from, os.path.join(self._recording, "run.json"), run_to, to)
        for run in self._runs:
            _point_there(run, os.path.join(self._mirror, os.path.basename(run)), self._from, name, number)

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


def _number_there(attempt_folder: str, run_to: str) -> int:
    """Its number in the mirror: its own, unless a lost machine's attempt has that one; never over that."""
    mine = _identity(attempt_folder)
    number = int(os.path.basename(attempt_folder))
    taken = attempt_numbers(run_to)
    for there in (number, *reversed(taken)):
        found = _identity(os.path.join(run_to, "attempts", f"{there:04d}"))
        if found == mine or (found is None and there == number):
            return there
    return max(taken) + 1


def _identity(attempt_folder: str) -> dict[str, object] | None:
    return identity_of(read_json(os.path.join(attempt_folder, "attempt.json")))


def identity_of(about: dict[str, object] | None) -> dict[str, object] | None:
    """By what an attempt is known wherever its log is copied, from its attempt.json; None when that is not there."""
    return {key: about.get(key) for key in _IDENTITY} if about is not None else None


def _point_there(run: str, run_to: str, attempt_folder: str, recording: str, number: int) -> None:
    """Write the run's marker beside its checkpoints in the mirror; what machines before this one left there stays."""
    marker = read_json(os.path.join(run, "run.json")) or new_marker(run)
    place = {"run": os.path.join(os.pardir, recording), "attempt": number}
    mine = {**place, **(_identity(attempt_folder) or {})}
    kept = (read_json(os.path.join(run_to, "run.json")) or {}).get("recorded")
    kept = [each for each in kept if each != mine] if isinstance(kept, list) else []
    os.makedirs(run_to, exist_ok=True)
    _write(os.path.join(run_to, "run.json"), json.dumps({**marker, "recorded": [*kept, mine]}).encode())


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
