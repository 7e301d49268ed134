"""Copies the tail of the log to a second home, such as a mounted drive that outlives the machine.

Each copy is made by a short-lived fork: a drive that hangs or vanishes stops that process and nothing else.
A home that is named while the recorder runs already (a notebook's, joined by a run with a mirror) is left in
`mirrors.json` of the attempt; the run's folder there then points to the copy of the recording, as it does here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from buoy.flight.attempt import new_marker
from buoy.machine import disk
from buoy.machine.disk import SharedFolder
from buoy.machine.files import read_bounded, read_end, read_json, write_json

PERIOD = 45.0
_TAIL_BYTES = 512 << 10
"""At full rate about five minutes; the minutes and events go whole."""
_MOST_BYTES = 8 << 20
_MOST_HEADER = 64 << 10
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

Read = Callable[[str, int], bytes | None]
"""The first bytes of a file in a mirror, by its path below the run's folder there; None where there is none."""
Write = Callable[[str, bytes], object]


def ask_for_copies(attempt_folder: str, mirror: str, run_folder: str) -> None:
    """Let the recorder of this attempt copy its log to this mirror too, on behalf of the run in this folder."""
    path = os.path.join(attempt_folder, _ASKED)
    asked = (read_json(path) or {}).get("mirrors")
    asked = asked if isinstance(asked, list) else []
    mirror, run_folder = os.path.abspath(mirror), os.path.abspath(run_folder)
    home = {"folder": mirror, "run": run_folder, "mount": disk.mount_apart(mirror, run_folder)}
    if home not in asked:
        write_json(path, {"mirrors": [*asked, home]})


class Mirrors:
    """Every second home of one attempt's log: the one given at its start, and those asked for since."""

    def __init__(self, attempt_folder: str, first: object, mount: object) -> None:
        """`mount`: where the first one was mounted when the attempt began, and must still be."""
        self._folder = attempt_folder
        self._homes: dict[str, Mirror] = {}
        self._asked = 0
        self._told: dict[str, str | None] = {}
        if isinstance(first, str):
            self._homes[first] = Mirror(attempt_folder, first, mount)

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
                self._homes[folder] = Mirror(self._folder, folder, home.get("mount"))
            self._homes[folder].serve(run)


class Mirror:
    """The second home of one attempt's log."""

    def __init__(self, attempt_folder: str, mirror: str, mount: object = None) -> None:
        self._from = attempt_folder
        self._mirror = mirror
        self._mount = mount if isinstance(mount, str) else None
        self._recording = os.path.dirname(os.path.dirname(attempt_folder))
        self._runs: list[str] = []
        self._copier: int | None = None
        self._words = -1
        """A pipe on which the copier says what is wrong."""
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
        words, to_say = os.pipe()
        try:
            child = os.fork()
        except OSError as error:
            self.trouble = f"cannot fork: {error.strerror}"
            os.close(words)
            os.close(to_say)
            return
        if child:
            os.close(to_say)
            self._forget_copier()
            self._copier, self._words = child, words
            return
        code = 1
        try:
            _let_go_of_streams()
            os.nice(5)
            self._copy()
            code = 0
        except OSError as error:
            os.write(to_say, (error.strerror or str(error)).encode(errors="replace")[:500])
        finally:
            os._exit(code)

    def _copy(self) -> None:
        name = os.path.basename(self._recording)
        tree = SharedFolder(self._mirror, name, self._mount)
        number = number_there(self._from, tree.read)
        copy_tail(self._from, os.path.join(self._recording, "run.json"), number, tree.write)
        for run in self._runs:
            there = SharedFolder(self._mirror, os.path.basename(run), self._mount)
            _point_there(run, there, self._from, name, number)

    def _reap(self) -> None:
        if self._copier is None:
            return
        try:
            pid, status = os.waitpid(self._copier, os.WNOHANG)
        except OSError:
            self._copier = None
            return
        if pid:
            code = os.waitstatus_to_exitcode(status)
            said = os.read(self._words, 4096).decode(errors="replace")
            self.trouble = (
                None if code == 0 else said or (f"signal {-code}" if code < 0 else "an error of buoy's")
            )
            self._forget_copier()

    def _forget_copier(self) -> None:
        """One that hangs is left alone: it is in nobody's way."""
        if self._words >= 0:
            os.close(self._words)
        self._copier, self._words = None, -1


def _let_go_of_streams() -> None:
    """The training's own, which the sidecar has for its warnings: `python train.py 2>&1 | tee log` waits for them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)


def number_there(attempt_folder: str, read: Read) -> int:
    """The attempt's number in a mirror: its own, unless a lost machine's has that one; then the next that is free."""
    mine = identity_of(read_json(os.path.join(attempt_folder, "attempt.json")))
    number = int(os.path.basename(attempt_folder))
    while (there := read(f"attempts/{number:04d}/attempt.json", _MOST_BYTES)) is not None:
        if identity_of(_parsed(there)) == mine:
            break
        number += 1
    return number


def identity_of(about: dict[str, object] | None) -> dict[str, object] | None:
    """By what an attempt is known wherever its log is copied, from its attempt.json; None when that is not there."""
    return {key: about.get(key) for key in _IDENTITY} if about is not None else None


def _parsed(data: bytes | None) -> dict[str, object] | None:
    try:
        value = json.loads(data or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _point_there(run: str, there: SharedFolder, attempt_folder: str, recording: str, number: int) -> None:
    """Write the run's marker beside its checkpoints in the mirror; what machines before this one left there stays."""
    marker = read_json(os.path.join(run, "run.json")) or new_marker(run)
    place = {"run": os.path.join(os.pardir, recording), "attempt": number}
    mine = {**place, **(identity_of(read_json(os.path.join(attempt_folder, "attempt.json"))) or {})}
    kept = (_parsed(there.read("run.json", _MOST_BYTES)) or {}).get("recorded")
    kept = [each for each in kept if each != mine] if isinstance(kept, list) else []
    there.write("run.json", json.dumps({**marker, "recorded": [*kept, mine]}).encode())


def copy_tail(attempt_folder: str, run_json: str, number: int, write: Write) -> None:
    """Copy what a reader needs to judge this attempt somewhere else, under this number."""
    to = f"attempts/{number:04d}"
    _copy(run_json, "run.json", write)
    names = sorted(os.listdir(attempt_folder))
    for name in names:
        source = os.path.join(attempt_folder, name)
        if name in _WHOLE:
            _copy(source, f"{to}/{name}", write)
        elif name.startswith("process-"):
            for words in _names_in(source):
                _copy(os.path.join(source, words), f"{to}/{name}/{words}", write)
    _copy_samples([name for name in names if name.startswith("samples-")], attempt_folder, to, write)


def _copy_samples(segments: list[str], attempt_folder: str, to: str, write: Write) -> None:
    """The last lines of the last two segments, under one fixed name so that the drive holds one file of them."""
    tail = header = b""
    for name in segments[-2:]:
        path = os.path.join(attempt_folder, name)
        try:
            first, end = read_bounded(path, _MOST_HEADER), read_end(path, _TAIL_BYTES)[0]
        except OSError:
            continue  # no plain file
        header = first.partition(b"\n")[0]
        tail += end.removeprefix(header + b"\n")
    if len(tail) > _TAIL_BYTES:
        tail = tail[-_TAIL_BYTES:].partition(b"\n")[2]
    if header:
        write(f"{to}/samples-tail.jsonl", header + b"\n" + tail)


def _copy(source: str, target: str, write: Write) -> None:
    try:
        data = read_bounded(source, _MOST_BYTES)
    except OSError:
        return  # not there, or no plain file: nothing that a reader could use
    write(target, data)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
