"""The campaign: `python -m tests.fuzz --number 5000` (or `make fuzz N=5000`)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.measure import table
from tests.fuzz.ground import build
from tests.fuzz.trial import KINDS, MOST_BYTES, run_trial

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "fuzz.json"
SHARES = {"run": 0.45, "checkpoint": 0.15, "mirror": 0.1, "notebook": 0.3}
_CHUNK = 100
_WHAT = {
    "traceback": "tracebacks", "hang": "hangs", "memory": f"above {MOST_BYTES >> 20} MiB", "died": "deaths",
    "escape": "escapes", "injected": "injected lines", "json": "no JSON", "changed": "changed files",
    "lost": "lost files", "hidden": "hidden runs", "exit": "odd exit codes", "words": "long errors",
}  # fmt: skip


def main() -> int:
    """Run the campaign; 1 if a verb failed, hung, took too much, or did harm."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--number", type=int, default=500, help="how many mutants")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--again", metavar="MUTANT", help='one of them alone, such as "1 run 17"')
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="buoy-fuzz-", ignore_cleanup_errors=True) as folder:
        base = Path(folder) / "base"
        build(base)
        if arguments.again:
            (room := Path(folder) / "room").mkdir()
            print(json.dumps(run_trial(arguments.again.split()[1], base, room, arguments.again), indent=1))
            return 0
        found = _campaign(arguments, base, Path(folder))
    seconds = time.monotonic() - started
    problems = [(trial, problem) for trial in found for problem in trial["problems"]]
    print(table(["mutants of", "number", "seconds", "most MiB", *_WHAT.values()], _rows(found)))
    for trial, problem in problems[:20]:
        print(f"\n{trial['seed']!r} ({trial['done']}): {problem['what']} in `buoy {problem.get('verb')}`")
        print(str(problem["detail"])[-1500:])
    result = {
        "number": len(found),
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "kinds": {kind: sum(trial["kind"] == kind for trial in found) for kind in KINDS},
        "most_bytes": max((trial["bytes"] for trial in found), default=0),
        "problems": dict(Counter(problem["what"] for _, problem in problems)),
        "good": not problems and len(found) >= arguments.number,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(found)} mutants in {seconds:.0f} s: {len(problems)} problems")
    return 0 if result["good"] else 1


def _campaign(arguments: argparse.Namespace, base: Path, folder: Path) -> list[dict[str, Any]]:
    chunks = [
        (kind, first, min(first + _CHUNK, number))
        for kind in KINDS
        if (number := round(arguments.number * SHARES[kind]))
        for first in range(0, number, _CHUNK)
    ]

    def try_chunk(chunk: tuple[str, int, int]) -> list[dict[str, Any]]:
        kind, first, last = chunk
        room = folder / f"room-{kind}-{first}"
        command = [sys.executable, "-m", "tests.fuzz.trial", kind, str(base), str(room), arguments.seed]
        done = subprocess.run(
            [*command, str(first), str(last)], stdout=subprocess.PIPE, text=True, check=True
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        bad = sum(bool(trial["problems"]) for trial in found)
        print(f"{kind} {first} to {last - 1}: {bad} bad", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(arguments.workers) as pool:
        return [trial for found in pool.map(try_chunk, chunks) for trial in found]


def _rows(found: list[dict[str, Any]]) -> list[list[object]]:
    rows: list[list[object]] = []
    for kind in KINDS:
        trials = [trial for trial in found if trial["kind"] == kind]
        count = Counter(problem["what"] for trial in trials for problem in trial["problems"])
        most = max((trial["bytes"] for trial in trials), default=0) >> 20
        seconds = f"{sum(trial['seconds'] for trial in trials):.0f}"
        rows.append([kind, len(trials), seconds, most, *(count[what] for what in _WHAT)])
    return rows


if __name__ == "__main__":
    sys.exit(main())
