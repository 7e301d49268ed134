"""One death being staged: the processes, the words exchanged with them, and the moment of death."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buoy.flight.log import read_samples
from tests.deaths.ground import Ground
from tests.deaths.kind import Kind

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = PROGRAMS.parents[2] / "src"
MARK = "DEATHS_TRIAL"
"""Variable by which everything a trial started is found again."""


class StageError(Exception):
    """The death could not be staged as the kind says; no fault of the verdict's."""


class Scene:
    """A trial's processes. `main` is the training process whose death is judged."""

    def __init__(self, kind: Kind, ground: Ground) -> None:
        self.kind = kind
        self.ground = ground
        self.folder = ground.folder
        self.run_folder = Path(ground.fill_in(kind.run_folder))
        # A machine on which ten processes wait for each core takes ten times as long.
        self.patience = kind.seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        self.deadline = time.monotonic() + self.patience
        self.main = 0
        self.died: float | None = None
        """Wall-clock time at which the campaign saw the main process die."""
        self.judged: float | None = None
        """Wall-clock time at which a verdict was first on disk; `buoy run` may write it again later."""
        self.alive_verdict: dict[str, Any] | None = None
        self._watcher: threading.Thread | None = None
        self._output = (self.folder / "output.txt").open("ab")
        self._closed = False
        self._neighbours: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Launch the program, under `buoy run` or plainly."""
        prefix, variables = self.ground.prefix()
        if self.kind.launch == "run":
            prefix += [
                sys.executable,
                "-m",
                "buoy",
                "run",
                "--run",
                str(self.run_folder),
                *self.kind.options,
                "--",
            ]
        else:
            variables["DEATHS_WATCH"] = str(self.run_folder)
        self.process = self._spawn([*prefix, *self._command()], variables)
        if self.kind.launch == "watch" and not self.kind.below and "pid-namespace" not in self.kind.needs:
            self._watch_death(self.process.pid)

    def _command(self) -> list[str]:
        first, *rest = self.kind.command
        words = [sys.executable, str(PROGRAMS / first), *rest] if first.endswith(".py") else [first, *rest]
        places = {"{python}": sys.executable, "{programs}": str(PROGRAMS)}
        for name, place in places.items():
            words = [word.replace(name, place) for word in words]
        return [self.ground.fill_in(word) for word in words]

    def _spawn(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BUOY_")},
            "PYTHONPATH": str(SOURCES),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "DEATHS_STAGE": str(self.folder),
            MARK: self.folder.name,
            **dict(self.kind.environment),
            **variables,
        }
        return subprocess.Popen(
            command,
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def neighbour(self, *command: str) -> subprocess.Popen[bytes]:
        """A process that is not ours, in the same memory group."""
        prefix, variables = self.ground.prefix()
        stage = self.folder / "neighbour"
        stage.mkdir()
        words = [sys.executable, str(PROGRAMS / command[0]), *command[1:]]
        process = self._spawn([*prefix, *words], {**variables, "DEATHS_STAGE": str(stage)})
        self._neighbours.append(process)
        self.wait_for(lambda: (stage / "ready").exists(), "the neighbour to be ready")
        return process

    def wait_ready(self) -> None:
        """Wait for the main process to say that it is ready; from then on its death is watched."""
        said = self.wait_word("ready")
        # A program in a process namespace of its own knows itself by another number: that one is somebody else here.
        self.main = said if said in _marked(self.folder.name) else self.pid_seen_from_here(said)
        if self._watcher is None and "pid-namespace" not in self.kind.needs:
            self._watch_death(self.main)

    def wait_word(self, word: str) -> int:
        """Wait for a word of a program; the pid of whoever said it."""
        self.wait_for(lambda: (self.folder / word).exists(), f"the program to say {word!r}")
        return int((self.folder / word).read_text() or 0)

    def say(self, word: str = "go") -> None:
        """Leave a word for the program."""
        (self.folder / word).touch()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something, but not for ever and not for the dead."""
        while not condition():
            if time.monotonic() > self.deadline:
                raise StageError(f"waited in vain for {what}; output: {self.output()[-400:]}")
            if self.process.poll() is not None and not condition():
                raise StageError(f"it ended before {what}; output: {self.output()[-400:]}")
            time.sleep(0.005)

    def kill(self, number: int, pid: int | None = None) -> None:
        """Send a signal, to the main process if no other is named."""
        os.kill(self.main if pid is None else pid, number)

    def pid_seen_from_here(self, inner: int) -> int:
        """The pid of a process of this trial that has another pid in its own namespace."""
        for pid in _marked(self.folder.name):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                words = line.split()
                if words[:1] == ["NSpid:"] and len(words) > 2 and int(words[-1]) == inner:
                    return pid
        raise StageError(f"no process of this trial has pid {inner} in a namespace of its own")

    def attempt_folder(self) -> Path:
        """The recording that `buoy why` would speak of: the last."""
        attempts = sorted((self.run_folder / "attempts").glob("[0-9]*"))
        if not attempts:
            raise StageError(f"nothing was recorded; output: {self.output()[-400:]}")
        return attempts[-1]

    def events(self) -> list[dict[str, Any]]:
        """The events recorded so far."""
        try:
            lines = (self.attempt_folder() / "events.jsonl").read_text().splitlines()
        except (OSError, StageError):
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def sidecar(self) -> int | None:
        """The recorder's pid, once it has said so."""
        pids = [
            event["sidecar"]
            for event in self.events()
            if event.get("kind") == "start" and event.get("sidecar")
        ]
        return pids[-1] if pids else None

    def _sidecar_here(self) -> int | None:
        """The recorder's pid, unless it is one of another namespace: to us that number is somebody else."""
        return None if "pid-namespace" in self.kind.needs else self.sidecar()

    def wait_sidecar(self) -> int:
        """Wait until the recorder is at work."""
        self.wait_for(lambda: self.sidecar() is not None, "the recorder to start")
        pid = self.sidecar()
        assert pid is not None
        if self.kind.starved:
            self.ground.starve(5)
        return pid

    def wait_followed(self) -> None:
        """Wait until two samples have counted child processes: from then on the recorder learns of their deaths."""

        def counted() -> int:
            rows = (read_samples(str(path)) for path in self.run_folder.glob("attempts/[0-9]*"))
            return sum((row.get("processes") or 0) > 1 for found in rows for row in found)

        self.wait_for(lambda: counted() >= 2, "the recorder to follow the children")

    def output(self) -> str:
        """What the programs printed."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def _watch_death(self, pid: int) -> None:
        """Learn the moment of death as a waiting parent does: at once, and leaving no zombie behind."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return

        def watch() -> None:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
            self.died = time.time()
            if pid == self.process.pid:
                self.process.wait()
            os.close(descriptor)
            self.judged = self._first_verdict()

        self._watcher = threading.Thread(target=watch, daemon=True)
        self._watcher.start()

    def _first_verdict(self) -> float | None:
        patience = time.monotonic() + 2
        while time.monotonic() < patience and not self._closed:
            try:
                return (self.attempt_folder() / "verdict.json").stat().st_mtime_ns / 1e9
            except (OSError, StageError):
                pass
            time.sleep(0.002)
        return None

    def wait_end(self) -> None:
        """Wait until the launched command, and then the recorder, are gone."""
        try:
            self.process.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StageError(f"it did not die; output: {self.output()[-400:]}") from None
        sidecar = self._sidecar_here()
        patience = time.monotonic() + self.patience / 2
        while sidecar is not None and _runs(sidecar) and time.monotonic() < patience:
            time.sleep(0.005)
        if sidecar is not None and _runs(sidecar):
            raise StageError(f"the recorder (pid {sidecar}) still runs long after the death")
        if self._watcher is not None:
            self._closed = True  # nobody is left who could write a verdict
            self._watcher.join(5)

    def close(self) -> None:
        """Kill whatever this trial started and is still there."""
        self._closed = True
        leftovers = {*_marked(self.folder.name), *(p.pid for p in self._neighbours if p.poll() is None)}
        sidecar = self._sidecar_here()
        if sidecar is not None and _runs(sidecar):
            leftovers.add(sidecar)
        for pid in leftovers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in [*self._neighbours, *([self.process] if hasattr(self, "process") else [])]:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        self._output.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _marked(name: str) -> list[int]:
    """Processes that carry the trial's mark."""
    mark = f"{MARK}={name}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
