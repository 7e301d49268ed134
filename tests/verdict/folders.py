"""Builds attempt folders by hand, as docs/flight-log.md describes them: a plain SIGKILL unless told otherwise."""

from __future__ import annotations

import copy
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

from buoy.machine import host
from buoy.verdict.evidence import Evidence, load
from buoy.verdict.judge import judge
from buoy.verdict.model import Verdict

PID = 3_999_999  # above any pid a kernel gives by default: never alive
CHILD = 3_999_998
START_T, START_WALL = 1000.0, 1_790_000_000.0
DIED_T, DIED_WALL = START_T + 600.0, START_WALL + 600.0
GIB = 1 << 30
GROUP = "/sys/fs/cgroup/memory/session"


def signalled(number: int) -> int:
    return number


def exited(code: int) -> int:
    return code << 8


def oom_line(pid: int) -> dict[str, Any]:
    text = (
        f"Memory cgroup out of memory: Killed process {pid} (python) total-vm:71108kB, anon-rss:61184kB, "
        "file-rss:5780kB, shmem-rss:0kB, UID:0 pgtables:184kB oom_score_adj:0"
    )
    return {"t": DIED_T, "text": text}


def counters(
    group: tuple[int, int] | None = (3, 3), host_: tuple[int, int] | None = (7, 7)
) -> dict[str, Any]:
    def pair(values: tuple[int, int] | None) -> dict[str, Any] | None:
        return None if values is None else {"path": GROUP, "before": values[0], "after": values[1]}

    return {"cgroup": pair(group), "cgroup_parents": [], "host": pair(host_)}


class Attempt:
    """An attempt folder in the making. `verdict()` writes it out and judges it."""

    def __init__(self, tmp_path: Path, status: int | None = 9, source: str = "zombie") -> None:
        self.folder = tmp_path / "runs" / "train" / "attempts" / "0001"
        self.folder.mkdir(parents=True)
        (tmp_path / "runs" / "train" / "run.json").write_text(
            json.dumps({"schema": "buoy.run/1", "name": "train"})
        )
        self.attempt: dict[str, Any] = {
            "schema": "buoy.attempt/1", "number": 1, "mode": "run", "pid": PID, "command": ["python", "train.py"],
            "cwd": "/home/me", "t": START_T, "wall": START_WALL, "boot_id": host.boot_id(),
            "hostname": host.hostname(), "pid1_start": host.pid1_start(), "initial_pid_namespace": True,
            "time_limit": None, "time_limit_source": None, "platform": None, "limits": {},
        }  # fmt: skip
        self.death: dict[str, Any] | None = {
            "schema": "buoy.death/1", "t": DIED_T, "wall": DIED_WALL, "pid": PID,
            "status": {"raw": status, "source": source if status is not None else None},
            "counters": counters(),
            "cgroup": {"path": GROUP, "version": 1, "limit": 2 * GIB, "used": GIB, "peak": GIB, "group_kill": None,
                       "foreign": [], "foreign_age": None},
            "kernel_log": {"readable": True, "reason": None, "lines": []},
            "colab_events": {"readable": False, "lines": []},
            "disks": {"run": {"path": "/", "free": 50 * GIB, "total": 100 * GIB},
                      "shm": {"path": "/dev/shm", "free": GIB, "total": GIB}},
            "cpu": {"used": 580.0, "soft_limit": None, "hard_limit": None},
            "processes": [{"pid": PID, "name": "python train.py", "role": "main", "rss": GIB}],
            "alive": [], "last": 0.1, "gap": 0.3, "gpu": None,
        }  # fmt: skip
        self.exit: dict[str, Any] | None = None
        self.events: list[dict[str, Any]] = [
            {"t": START_T, "wall": START_WALL, "kind": "start", "sidecar": 5, "counters": counters(),
             "kernel_log": {"readable": True, "reason": None}},
        ]  # fmt: skip
        self.samples: list[dict[str, Any]] = [
            {"t": DIED_T - 1 + n / 10, "wall": DIED_WALL - 1 + n / 10, "step": 120, "phase": "train", "rss": GIB,
             "tree_rss": GIB, "processes": 1, "cgroup_used": GIB, "cgroup_limit": 2 * GIB, "available": GIB,
             "shm_free": GIB}
            for n in range(10)
        ]  # fmt: skip
        self.process(PID)

    def process(
        self,
        pid: int,
        note: dict[str, Any] | None = None,
        step: int = 120,
        fatal: tuple[int, int, int] | None = None,
        **texts: tuple[str, float],
    ) -> None:
        """An instrumented process; texts are `SIGTERM=(text, seconds before the death)`.

        `fatal`: signal, si_code and si_pid (or si_addr) of what the kernel told it last.
        """
        folder = self.folder / f"process-{pid}"
        folder.mkdir(exist_ok=True)
        page = bytearray(4096)
        page[:8] = b"BUOYBCN1"
        struct.pack_into("<QdddqQd", page, 64, step, DIED_T - 0.5, 0.5, 0.0, 2, 1, DIED_T)
        if fatal is not None:
            number, code, origin = fatal
            struct.pack_into("<iiiiQ", page, 256, number, 0, code, 0, origin)
        if note is not None:
            words = json.dumps(note).encode()
            struct.pack_into("<I", page, 1024, len(words))
            page[1028 : 1028 + len(words)] = words
        (folder / "beacon").write_bytes(page)
        for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "fault", "stacks"):
            text, age = texts.get(name, ("", 0.0))
            path = folder / f"{name}.txt"
            path.write_text(text)
            os.utime(path, (DIED_WALL - age, DIED_WALL - age))

    def raises(self, kind: str, message: str = "", bases: tuple[str, ...] = (), **more: Any) -> None:
        """The main process left an exception note and exit code 1."""
        assert self.death is not None
        self.death["status"]["raw"] = exited(1)
        self.process(PID, note(kind, message, bases, **more))

    def event(self, kind: str, before: float = 0.0, **values: Any) -> None:
        self.events.append({"t": DIED_T - before, "wall": DIED_WALL - before, "kind": kind, **values})

    def child_death(self, status: int | None, before: float = 0.5, **values: Any) -> None:
        event = {"pid": CHILD, "name": "pt_data_worker", "role": "child", "status": status, "source": "zombie",
                 "rss": GIB, "counters": counters(), "kernel_log": [], "instrumented": False, **values}  # fmt: skip
        self.event("process-death", before, **event)

    def oom_killed(self, *, named: bool = True, group: int = 1, machine: int = 1) -> None:
        assert self.death is not None
        self.death["counters"] = counters((3, 3 + group), (7, 7 + machine))
        self.death["kernel_log"]["lines"] = [oom_line(PID)] if named else []

    def alive(self) -> None:
        """As if this very process were the training."""
        self.attempt.update(pid=os.getpid(), t=time.monotonic() - 1.0, wall=time.time() - 1.0)
        self.death = None
        self.process(os.getpid())

    def write(self) -> Path:
        for name, value in (("attempt", self.attempt), ("death", self.death), ("exit", self.exit)):
            if value is not None:
                (self.folder / f"{name}.json").write_text(json.dumps(value))
        (self.folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events))
        if self.samples:
            fields = list(self.samples[0])
            rows = [
                {"schema": "buoy.samples/1", "fields": fields},
                *([row[key] for key in fields] for row in self.samples),
            ]
            (self.folder / "samples-0001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.folder

    def evidence(self) -> Evidence:
        return load(str(self.write()))

    def verdict(self) -> Verdict:
        return judge(self.evidence())

    def copy(self, tmp_path: Path) -> Attempt:
        other = copy.copy(self)
        other.folder = tmp_path
        return other


def note(kind: str, message: str = "", bases: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    place = {"file": "/home/me/train.py", "line": 31, "function": "loss"}
    return {
        "kind": "exception", "type": kind, "bases": [*bases, "builtins.Exception"], "message": message,
        "errno": None, "filename": None, "where": place, "inner": place, "thread": "MainThread", "chain": [],
        "disk_free": 50 * GIB, "shm_free": GIB, "exited": True, **more,
    }  # fmt: skip
