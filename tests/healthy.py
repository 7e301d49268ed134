"""Trainings that are slow, greedy or silent for a while, and well: no alarm of buoy's may call them anything else.

`python -m tests.healthy --repeat 5` (or `make healthy N=5`) runs every shape so often, as a real process under
`buoy run`, and asks `buoy why` while it lives. Patience is one thirtieth of the usual (BUOY_HANG_SECONDS=1: idle 1 s,
busy 10 s, marked 40 s), and so are the pauses here; the alarms' own logic is untouched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
TRUE_ANYWHERE = ("starved", "bottleneck")
"""Alarms that are measured facts: where the machine is crowded a second without a CPU is real, whatever the shape."""
_NOT_KNOWN = "the cause is not known"

_TRAIN = """
import os, random, sys, time
import buoy
watch = buoy.watch()
def work(seconds, clock=time.monotonic):
    end = clock() + seconds
    while clock() < end: pass
def train(steps=60, seconds=0.01, pause=0.02):
    for _ in range(steps):
        work(seconds); time.sleep(pause); watch.step()
"""
_SOCKET = """
import socket, threading
def download(seconds, rate=200_000):
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname()); peer, _ = server.accept()
    def send():
        for _ in range(int(seconds * 10)): peer.sendall(bytes(rate // 10)); time.sleep(0.1)
        peer.close()
    threading.Thread(target=send, daemon=True).start()
    while client.recv(1 << 16): pass
"""
_TORCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(4096, 64))
def learn(steps, batch=32, pause=0.02):
    for _, (x,) in zip(range(steps), DataLoader(data, batch_size=batch, shuffle=True)):
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad(); time.sleep(pause)
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to be well."""

    code: str
    seconds: float
    """When `buoy why` is asked, after the first sign of life."""
    allowed: tuple[str, ...] = ()
    """Alarms and verdicts that are the plain truth of it."""
    memory: int | None = None
    """Limit in MiB of the memory group that holds everything of it."""
    quota: float | None = None
    """Cores that it may use from then on when it says `starve`."""


SHAPES = {
    "long evaluation": Shape(
        _TRAIN + _TORCH + "learn(60); model.eval(); work(15); model.train(); learn(60)", 12,
    ),
    "evaluation that nobody marked": Shape(
        _TRAIN + _TORCH + "learn(60)\n"
        "for (x,) in DataLoader(data, batch_size=32): work(0.12); model(x)\n"
        "learn(60)",
        12,
    ),
    "slow save": Shape(
        _TRAIN + _TORCH + "learn(60); target = 'model.pt'; os.mkfifo(target)\n"
        "import subprocess\n"
        "read = \"file = open('model.pt', 'rb', 0)\\nimport time\\nwhile file.read(1000): time.sleep(0.1)\"\n"
        "reader = subprocess.Popen([sys.executable, '-c', read])\n"
        "torch.save(torch.zeros(30_000), target); reader.wait(); learn(60)",
        12, ("waiting",),
    ),
    "download first": Shape(_TRAIN + _SOCKET + "download(12); train(120)", 9),
    "download of the next shard": Shape(_TRAIN + _SOCKET + "train(); download(8); train()", 6),
    "slow import": Shape(
        _TRAIN + "open('heavy.py', 'w').write('import time; time.sleep(10)'); sys.path.insert(0, '.'); import heavy\n"
        "train(120)",
        8,
    ),
    "long first step": Shape(_TRAIN + "work(14); train(120)", 12),
    "waits without countable steps": Shape(
        _TRAIN + "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(12)'])\n"
        "while child.poll() is None: time.sleep(0.2)",
        9,
    ),
    "backs off and tries again": Shape(_TRAIN + "train(); time.sleep(8); train()", 6),
    "a child works": Shape(
        _TRAIN + "import subprocess\n"
        "train(); subprocess.run([sys.executable, '-c', 'import time\\nend = time.monotonic() + 7\\n"
        "while time.monotonic() < end: pass']); train()",
        5,
    ),
    "starved of CPU": Shape(
        _TRAIN + "train(); open('starve', 'w').close()\n"
        "while os.path.exists('starve'): time.sleep(0.01)\n"
        "work(0.4, time.thread_time); train(5, 0.002)",
        5, ("starved",), quota=0.05,
    ),
    "cache that levels off": Shape(
        _TRAIN + "cache = {}\n"
        "for _ in range(900):\n"
        "    cache.setdefault(random.randrange(230), bytearray(b'x' * (1 << 20))); time.sleep(0.015); watch.step()",
        8, memory=400,
    ),
    "big first epoch": Shape(
        _TRAIN + "kept = []\n"
        "for _ in range(300): kept.append(bytearray(b'x' * (500 << 10))); time.sleep(0.02); watch.step()\n"
        "train(300)",
        8, memory=400,
    ),
    "memory that rises and falls": Shape(
        _TRAIN + "for epoch in range(8):\n"
        "    kept = []\n"
        "    for _ in range(60): kept.append(bytearray(b'x' * (4 << 20))); time.sleep(0.02); watch.step()",
        8, memory=400,
    ),
    "learning-rate finder": Shape(
        _TRAIN + "end = time.monotonic() + 65\n"
        "while time.monotonic() < end: train(10, 0.002, 0.002)\n"
        "end = time.monotonic() + 65\n"
        "while time.monotonic() < end: train(10, 0.02, 0.02)",
        125,
    ),
}  # fmt: skip
LONG = ("learning-rate finder",)
"""More than two minutes: the pace is judged over ticks of twenty seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What buoy said of one healthy training."""

    shape: str
    false: tuple[str, ...]
    true: tuple[str, ...]
    """What it said that is so."""
    seconds: float


def run_shape(name: str) -> Outcome:
    """Run one training to its end, ask about it on the way, and sort what was said."""
    shape, began = SHAPES[name], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="buoy-healthy-") as folder, _group(shape) as enter:
        program = Path(folder) / "train.py"
        program.write_text(shape.code)
        command = [
            sys.executable,
            "-m",
            "buoy",
            "run",
            "--run",
            f"{folder}/run",
            "--",
            sys.executable,
            str(program),
        ]
        environment = {**os.environ, "BUOY_HANG_SECONDS": "1"}
        process = subprocess.Popen(
            [*enter, *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = _asked(Path(folder), shape, process)
        _, errors = process.communicate(timeout=300)
        events = _events(Path(folder))
        alarms = [
            (str(event["alarm"]), str(event["text"])) for event in events if event.get("kind") == "warning"
        ]
        false = [f"{alarm}: {text}" for alarm, text in alarms if not _is_true(alarm, text, shape)]
        if said not in ("still-running", *shape.allowed, *TRUE_ANYWHERE):
            false.append(f"asked while it ran: {said}")
        if process.returncode != 0:
            false.append(f"it ended with {process.returncode}: {errors[-300:]}")
    true = [alarm for alarm, text in alarms if _is_true(alarm, text, shape)]
    return Outcome(name, tuple(false), tuple(true), time.monotonic() - began)


def _is_true(alarm: str, text: str, shape: Shape) -> bool:
    return alarm in shape.allowed or (alarm in TRUE_ANYWHERE and _NOT_KNOWN not in text)


def _asked(folder: Path, shape: Shape, process: subprocess.Popen[str]) -> str:
    """The cause that `buoy why` names of it in the middle of its pause."""
    while not (folder / "run" / "attempts" / "0001" / "events.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    due = time.monotonic() + shape.seconds
    while time.monotonic() < due and process.poll() is None:
        if shape.quota is not None and (folder / "starve").exists():
            _starve(folder, shape.quota)
            (folder / "starve").unlink()
        time.sleep(0.05)
    if process.poll() is not None:
        return "still-running"  # over before it could be asked
    command = [sys.executable, "-m", "buoy", "why", str(folder / "run"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    cause = str(json.loads(done.stdout)["cause"]["id"])
    return "still-running" if cause == "clean-exit" else cause


def _starve(folder: Path, cores: float) -> None:
    pid = json.loads((folder / "run" / "attempts" / "0001" / "attempt.json").read_text())["pid"]
    group = CGROUPS / "cpu" / f"buoy-healthy-{os.getpid()}"
    (group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
    (group / "cgroup.procs").write_text(str(pid))


@contextmanager
def _group(shape: Shape) -> Iterator[list[str]]:
    """The groups that this shape needs, and the words that put a command into the one of them that it starts in."""
    name = f"buoy-healthy-{os.getpid()}"
    groups = [CGROUPS / "memory" / name] if shape.memory else []
    groups += [CGROUPS / "cpu" / name] if shape.quota else []
    for group in groups:
        group.mkdir()
    try:
        enter: list[str] = []
        if shape.memory:
            (groups[0] / "memory.limit_in_bytes").write_text(str(shape.memory << 20))
            enter = ["sh", "-c", f'echo $$ > {groups[0]}/cgroup.procs; exec "$@"', "sh"]
        yield enter
    finally:
        deadline = time.monotonic() + 10
        for group in groups:
            while time.monotonic() < deadline:
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


def missing(name: str) -> str | None:
    """Why this machine cannot run a shape, in words; None when it can."""
    shape = SHAPES[name]
    for controller, wanted in (("memory", shape.memory), ("cpu", shape.quota)):
        if wanted and not os.access(CGROUPS / controller, os.W_OK):
            return f"no writable {controller} cgroup (v1) on this machine"
    return None


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "run" / "attempts" / "0001" / "events.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def main() -> int:
    """Run the campaign; 1 if there was a single false alarm."""
    parser = argparse.ArgumentParser(prog="python -m tests.healthy", description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="trials of each shape")
    parser.add_argument("--only", nargs="+", default=list(SHAPES), metavar="SHAPE", help="these shapes")
    arguments = parser.parse_args()
    trials = [name for name in arguments.only if not missing(name)] * arguments.repeat
    random.shuffle(trials)
    outcomes = []
    for name in trials:
        outcomes.append(run_shape(name))
        for words in outcomes[-1].false:
            print(f"  {name}: FALSE: {words}")
        print(f"{len(outcomes)}/{len(trials)} {name}: {outcomes[-1].seconds:.0f} s", flush=True)
    print(f"\n{'shape':32} {'runs':>5} {'false alarms':>13}  said, and true")
    for name in arguments.only:
        of_it = [outcome for outcome in outcomes if outcome.shape == name]
        true = Counter(alarm for outcome in of_it for alarm in outcome.true)
        said = missing(name) or ", ".join(f"{alarm} {times}" for alarm, times in true.items())
        print(f"{name:32} {len(of_it):>5} {sum(len(outcome.false) for outcome in of_it):>13}  {said}")
    return int(any(outcome.false for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
