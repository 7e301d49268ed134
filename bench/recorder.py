"""What recording costs a torch training on the CPU, per step, beside psutil and nvitop sampling in the process.

Asked: 95 % upper bound at most +0.5 % wall per step.

Each way of recording has a process of its own that runs the same loop. Its windows come in pairs, one recorded and one
not, next to each other and in random order, so that a pair differs in the recording alone: two processes with the same
program differ by more than what is measured. "Not recorded" means that the step hook is taken out and the sidecar
stopped (SIGSTOP), or that the peer's sampling thread rests. Windows are short and many, since the noise of a shared
machine is slow. A sidecar that goes on after a stop samples at once, so a short window sees more samples than the same
time of a real training: the figure errs against us. "nothing" is the control: pairs of plain windows.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import interval, table

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "850"))
PEERS_EVERY = 8
"""The peers' effect is larger: fewer pairs show it."""
WINDOW_STEPS = 10
WAYS = ("nothing", "buoy", "psutil", "nvitop")

_PROGRAM = r"""
import sys, threading, time
way, folder = sys.argv[1], sys.argv[2]
import torch
from torch.optim import optimizer as optimizers
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(),
                            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
def train(steps):
    start = time.perf_counter()
    for _ in range(steps):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
    return time.perf_counter() - start
active = threading.Event()
if way == "buoy":
    import buoy
    buoy.watch(folder)
elif way == "psutil":
    import psutil
    me = psutil.Process()
    def sample():
        while True:
            active.wait()
            for process in [me, *me.children(recursive=True)]:
                try: process.memory_info(), process.cpu_times()
                except psutil.Error: pass
            psutil.virtual_memory()
            time.sleep(0.1)
    threading.Thread(target=sample, daemon=True).start()
elif way == "nvitop":
    from nvitop import ResourceMetricCollector
    collector = ResourceMetricCollector(interval=0.1)
    collector.daemonize(on_collect=lambda metrics: active.wait() or True)
hooks = optimizers._global_optimizer_post_hooks
kept = dict(hooks)
train(60)
print("ready", flush=True)
for line in sys.stdin:
    recorded, steps = line.split()
    if recorded == "on":
        hooks.update(kept); active.set()
    else:
        hooks.clear(); active.clear()
    print(train(int(steps)), flush=True)
    active.clear()
"""


class Way:
    """One way of recording, in a process that waits for its turn."""

    def __init__(self, name: str, program: str, folder: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, program, name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.works = self._process.stdout.readline() == "ready\n"
        self._sidecar = self._find_sidecar(Path(folder)) if name == "buoy" and self.works else None
        self._signal(signal.SIGSTOP)

    def _find_sidecar(self, folder: Path) -> int:
        events = (folder / "attempts" / "0001" / "events.jsonl").read_text()
        return int(json.loads(events.splitlines()[0])["sidecar"])

    def _signal(self, number: int) -> None:
        if self._sidecar is not None:
            os.kill(self._sidecar, number)

    def pair(self) -> float:
        """The logarithm of recorded over plain time, from two windows next to each other."""
        seconds = {recorded: self._window(recorded) for recorded in random.sample(("on", "off"), 2)}
        return math.log(seconds["on"] / seconds["off"])

    def _window(self, recorded: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        if recorded == "on":
            self._signal(signal.SIGCONT)
        self._process.stdin.write(f"{recorded} {WINDOW_STEPS}\n")
        self._process.stdin.flush()
        seconds = float(self._process.stdout.readline())
        self._signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        """Let it go."""
        self._signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


def main() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(_PROGRAM)
        ways = [Way(name, str(program), f"{folder}/{name}") for name in WAYS]
        try:
            ratios = _measure([way for way in ways if way.works])
        finally:
            for way in ways:
                way.end()
            time.sleep(0.5)
    rows: list[dict[str, object]] = []
    for way in ways:
        if not way.works:
            rows.append({"way": way.name, "percent": None})
            continue
        median, low, high = (100 * math.expm1(value) for value in interval(ratios[way.name]))
        rows.append({"way": way.name, "percent": median, "low": low, "high": high})
    print(table(["way of recording", "over the plain loop, % [95 %]"], list(map(_shown, rows))))
    upper = next(row["high"] for row in rows if row["way"] == "buoy")
    met = upper <= 0.5  # type: ignore[operator]
    print(
        f"asked: upper bound <= +0.5 %: {'met' if met else 'NOT met'} ({ROUNDS} pairs of {WINDOW_STEPS} steps)"
    )
    return {"rows": rows, "met": met, "pairs": ROUNDS}


def _shown(row: dict[str, object]) -> tuple[object, ...]:
    if row["percent"] is None:
        return row["way"], "does not run here"
    return row["way"], f"{row['percent']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"


def _measure(ways: list[Way]) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(ROUNDS):
        turn = [way for way in ways if way.name in ("nothing", "buoy") or number % PEERS_EVERY == 0]
        for way in random.sample(turn, len(turn)):
            ratios[way.name].append(way.pair())
    return ratios
