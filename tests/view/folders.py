"""Run folders made with the recorder's own writers: hours of samples without waiting for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from buoy.flight.attempt import new_attempt
from buoy.flight.log import FIELDS, SampleLog
from buoy.machine.files import write_json

GIB = 1 << 30
WALL = 1_790_000_000.0


def make_attempt(
    run: Path,
    seconds: float,
    *,
    every: float = 1.0,
    limit: int = 12 * GIB,
    dies_of: str | None = "kernel-oom",
    name: str | None = None,
    first_step: int = 0,
) -> Path:
    """One attempt whose memory rises to the limit, with a spike in its last second when it dies of memory."""
    attempt = new_attempt(str(run))
    folder = Path(attempt.folder)
    start = 1000.0 * attempt.number
    wall = WALL + 100_000.0 * attempt.number
    about = {
        "schema": "buoy.attempt/1", "number": attempt.number, "mode": "run", "pid": 4242, "t": start, "wall": wall,
        "command": ["python", "train.py", "--api-key", "***"], "cwd": "/home/secret-place", "hostname": "secret-host",
        "time_limit": 43200.0, "session_started": wall, "platform": "colab-t4", "python": "3.12.1", "kernel": "6.1",
        "buoy": "0.1.0",
        "limits": {"ram": limit, "disk": 100 * GIB, "cpus": 2, "gpus": [{"name": "Tesla T4", "total": 15 * GIB}]},
    }  # fmt: skip
    write_json(str(folder / "attempt.json"), about)
    if name is not None:
        write_json(str(run / "run.json"), {"schema": "buoy.run/1", "name": name, "created": wall})
    log = SampleLog(str(folder))
    moment, step = 0.0, first_step
    while moment < seconds:
        fine = seconds - moment < 600
        step = first_step + int(moment * 4)
        share = moment / seconds
        used = int(limit * (0.3 + 0.55 * share + 0.02 * math.sin(moment / 60)))
        if dies_of == "kernel-oom" and seconds - moment < 0.5:
            used = limit - 1
        log.add(
            _sample(start + moment, wall + moment, step, used, limit, int((90 - 40 * share) * GIB), share)
        )
        moment += 0.1 if fine else every
    log.flush()
    events = [{"kind": "start", "t": start, "wall": wall}]
    events += [
        {"kind": "save", "t": start + at, "wall": wall + at, "what": "buoy", "step": first_step + int(at * 4)}
        for at in range(600, int(seconds), 1800)
    ]
    events.append({"kind": "warning", "t": start + 0.8 * seconds, "wall": wall + 0.8 * seconds, "alarm": "ram",
                   "text": "RAM will be full in 40 min"})  # fmt: skip
    if dies_of is not None:
        events.append({"kind": "end", "t": start + seconds, "wall": wall + seconds})
        write_json(str(folder / "verdict.json"), _verdict(run, attempt.number, dies_of, seconds, step))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def add_events(folder: Path, *events: dict[str, Any]) -> None:
    """Events a minute after the attempt began."""
    start = json.loads((folder / "attempt.json").read_text())["t"]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"t": start + 60.0, "wall": 0.0, "pid": 1, **event}) + "\n" for event in events
        )


def plan(device: str = "t4", **values: Any) -> dict[str, Any]:
    """The event that a plan leaves."""
    answer = {
        "on": "colab-t4", "device": device, "verdict": "does not fit", "memory": 15 * GIB, "peak": [8 * GIB, 10 * GIB],
        "host_ram": [1 * GIB, 2 * GIB], "micro_batch": 16, "samples": 16,
    }  # fmt: skip
    event = {"kind": "plan", "source": "Net", "batch": 64, "micro_batch": 16, "fits": False,
             "cheapest": "micro-batches of 16", "answers": [answer]}  # fmt: skip
    return {**event, **values}


def _sample(t: float, wall: float, step: int, used: int, limit: int, disk: int, share: float) -> list[object]:
    values: dict[str, object] = {
        "t": round(t, 3), "wall": round(wall, 3), "step": step, "phase": "train", "rss": used - (1 << 20),
        "tree_rss": used, "processes": 3, "cgroup_used": used, "cgroup_limit": limit, "available": limit - used,
        "cpu_seconds": t, "disk_free": disk, "shm_free": 5 * GIB, "gpu_used": int(9 * GIB * (0.9 + 0.1 * share)),
        "gpu_util": 80, "data_wait": 0.0,
    }  # fmt: skip
    return [values.get(field) for field in FIELDS]


def _verdict(run: Path, number: int, cause: str, seconds: float, step: int) -> dict[str, object]:
    return {
        "run": str(run), "attempt": number, "ran_for": seconds,
        "mechanism": {"text": "signal 9 (SIGKILL)", "grade": "certain", "evidence": []},
        "cause": {
            "id": cause,
            "claim": {"text": "The kernel killed it: its memory group was full", "grade": "certain",
                      "evidence": [{"text": "12.0 GiB of 12.0 GiB used", "source": "samples", "wall": None}]},
            "actor": None, "cascade": [], "next": ["`buoy run --restart -- python train.py` goes on from step 900"],
        },
        "where": {"step": step, "epoch": 3, "file": "train.py", "line": 31},
    }  # fmt: skip
