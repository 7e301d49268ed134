"""What a checkpoint costs: the training's wait, the time until it is safe, the steps meanwhile, and loading it again.

Asked, for about 0.8 GB of state: a stall of at most 1.15 of one memcpy and below DCP's async_save in every mode; with
the trainer idle durable in at most 1.3 of a raw sequential write; steps during the write slowed by at most 10 %; no
memory but the arena; committed in 100 of 100 kills right after `save`; a verified load no slower than torch.load.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import interval, table

ROUNDS = 5
_PATIENCE = 3600
_KILLS = 100


def main() -> dict[str, object]:
    here = Path(__file__).parent / "results"
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=here) as folder:  # on the project's own disk
        torch = _child("bench.checkpoint_torch", folder)
        keras = _child("bench.checkpoint_keras", folder)
        killed = _killed(Path(folder))
    yard = {name: interval([row[name] for row in torch["yardsticks"]]) for name in torch["yardsticks"][0]}
    print(
        f"{torch['bytes'] / 1e6:.0f} MB of weights and Adam state; "
        + ", ".join(f"{n} {_shown(v)}" for n, v in yard.items())
    )
    rows, shown = _methods(torch)
    print(table(["method", "stall s", "x memcpy", "durable s", "steps x", "lost s", "extra MB"], shown))
    print(table(["Keras, " + f"{keras['bytes'] / 1e6:.0f} MB", "stall s"],
                [[name, _shown(interval(values))] for name, values in keras["stall"].items()]))  # fmt: skip
    loads = {state: {who: interval([row[state][who] for row in torch["load"]]) for who in ("buoy", "torch.load")}
             for state in ("cold", "warm")}  # fmt: skip
    loaded = [[state, _shown(both["buoy"]), _shown(both["torch.load"])] for state, both in loads.items()]
    print(table(["load", "buoy, every byte verified", "torch.load"], loaded))
    print(f"trainer killed right after save returned: committed in {killed} of {_KILLS}")
    rivals = {name: interval([turn["buoy"] / turn[name] for turn in torch["rivals"]])
              for name in torch["rivals"][0] if name != "buoy"}  # fmt: skip
    print(
        table(
            ["our stall over that of", "in turn"], [[name, _shown(ratio)] for name, ratio in rivals.items()]
        )
    )
    checks = _checks(rows, yard, rivals, loads, killed, torch["bytes"])
    for words, met in checks.items():
        print(f"asked: {words}: {'met' if met else 'NOT met'}")
    return {"rows": rows, "yardsticks": yard, "keras": keras, "rivals": rivals, "loads": loads, "killed": killed,
            "checks": checks, "met": all(checks.values())}  # fmt: skip


def _child(module: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, folder, str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _killed(folder: Path) -> int:
    from tests.kills.instants import killed_at_once

    tally = killed_at_once(_KILLS, random.Random(0), folder)
    return tally.tried - tally.unreadable - tally.lost - tally.unequal


def _methods(found: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[list[object]]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in found["idle"].items():
        training = found["training"].get(name)
        rows[name] = {
            "stall": interval([run["stall"] for run in runs]),
            "ratio": interval([run["stall"] / run["memcpy"] for run in runs]),
            "durable": interval([run["durable"] for run in runs]),
            "memory": found["memory"][name] / 1e6,
            "slowdown": interval([run["slowdown"] for run in training]) if training else None,
            "lost": interval([run["lost"] for run in training]) if training else None,
        }
    order = sorted(rows, key=lambda name: rows[name]["stall"][0])
    return rows, [[name, *(_shown(rows[name][key]) for key in ("stall", "ratio", "durable", "slowdown", "lost")),
                   f"{rows[name]['memory']:.0f}"] for name in order]  # fmt: skip


def _checks(
    rows: dict[str, Any], yard: Any, rivals: Any, loads: Any, killed: int, size: int
) -> dict[str, bool]:
    ours = rows["buoy"]
    raw = min(yard["raw write, direct"][0], yard["raw write, buffered"][0])
    return {
        "stall <= 1.15 of one memcpy": ours["ratio"][0] <= 1.15,
        "stall below DCP's async_save in every mode": max(ratio for ratio, _, _ in rivals.values()) < 1,
        f"durable <= 1.3 of the raw write ({ours['durable'][0] / raw:.2f})": ours["durable"][0] <= 1.3 * raw,
        "steps during the write slowed by <= 10 %": ours["slowdown"][0] <= 1.10,
        "no memory but the arena (<= 1.02 of the state)": ours["memory"] * 1e6 <= 1.02 * size,
        f"committed in {_KILLS} of {_KILLS}": killed == _KILLS,
        **{
            f"verified load <= torch.load, {state}": both["buoy"][0] <= both["torch.load"][0]
            for state, both in loads.items()
        },
    }


def _shown(found: tuple[float, float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.3g} [{found[1]:.3g}, {found[2]:.3g}]"
