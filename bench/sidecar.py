"""What the sidecar itself uses, watching a small torch training with loader workers: CPU and private memory.

Asked: at most 0.4 % of a core at 10 Hz and 6 MB private memory (without NVML). The rate is 10 Hz for real: the
training sits in a memory cgroup of which it uses more than 60 %; where none can be made, the calm rate of 5 Hz is
measured, and said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import table

_SECONDS = 40.0
_LIMIT = 1 << 30
_PROGRAM = """
import os, sys, time
if len(sys.argv) > 2: open(sys.argv[2] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch
from torch.utils.data import DataLoader, TensorDataset
import buoy
if __name__ == "__main__":
    buoy.watch(sys.argv[1])
    held = torch.ones(150 << 20)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(100000, 64)), batch_size=32, num_workers=2, persistent_workers=True)
    end = time.monotonic() + float(SECONDS)
    while time.monotonic() < end:
        for (x,) in loader:
            model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
            if time.monotonic() > end: break
"""


def main() -> dict[str, object]:
    group = _make_group()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(_PROGRAM.replace("SECONDS", repr(_SECONDS)))
        run = Path(folder) / "run"
        process = subprocess.Popen([sys.executable, str(program), str(run), *([str(group)] if group else [])])
        try:
            reading = _measure(run)
        finally:
            process.wait()
            if group:
                time.sleep(1)
                group.rmdir()
    reading["hz_wanted"] = 10 if group else 5
    rows = [reading]
    figures = (f"{reading['hz']:.1f}", f"{reading['cpu_percent']:.3f}", f"{reading['private_mb']:.2f}")
    print(table(["samples a second", "CPU, % of a core", "private, MB"], [figures]))
    met = reading["cpu_percent"] <= 0.4 and reading["private_mb"] <= 6.0
    print(f"asked: <= 0.4 % of a core at 10 Hz, <= 6 MB private: {'met' if met else 'NOT met'}")
    return {"rows": rows, "met": met}


def _make_group() -> Path | None:
    group = Path("/sys/fs/cgroup/memory") / f"buoy-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(_LIMIT))
    except OSError as error:
        print(f"no memory cgroup can be made here ({error.strerror}): measuring at the calm rate of 5 Hz")
        return None
    return group


def _measure(run: Path) -> dict[str, float]:
    events = run / "attempts" / "0001" / "events.jsonl"
    while not events.exists() or not events.read_text():
        time.sleep(0.1)
    sidecar = json.loads(events.read_text().splitlines()[0])["sidecar"]
    time.sleep(10)  # imports and the first forks are over
    samples = run / "attempts" / "0001" / "samples-0001.jsonl"
    lines, cpu, start = samples.read_text().count("\n"), _cpu_seconds(sidecar), time.monotonic()
    time.sleep(_SECONDS - 18)
    seconds = time.monotonic() - start
    used = _cpu_seconds(sidecar) - cpu
    memory = _memory(sidecar)
    return {
        "hz": (samples.read_text().count("\n") - lines) / seconds,
        "cpu_percent": 100 * used / seconds,
        "private_mb": (memory["Private_Clean"] + memory["Private_Dirty"]) / 1000,
        "rss_mb": memory["Rss"] / 1000,
    }


def _cpu_seconds(pid: int) -> float:
    # Nanoseconds on the CPU: /proc/PID/stat counts in ticks of 10 ms, too coarse for a few of them a second.
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _memory(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: float(line.split()[1]) * 1.024 for line in lines if line.endswith("kB")}


if __name__ == "__main__":
    main()
