"""The campaign: `python -m tests.deaths --repeat 20` (or `make deaths N=20`)."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from tests.deaths.ground import missing
from tests.deaths.kind import Kind
from tests.deaths.kinds import ALL
from tests.deaths.report import passed, summarise, tables
from tests.deaths.trial import Outcome, run_trial
from tests.processes import die_as_usual

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "deaths.json"


def main() -> int:
    """Run the campaign; 1 if any "certain" was wrong or fewer than 99 % were right."""
    arguments = _parse()
    kinds = [
        kind for kind in ALL if not arguments.only or any(fnmatch(kind.name, glob) for glob in arguments.only)
    ]
    if not kinds:
        print(f"no kind is called {', '.join(arguments.only)}; `--list` names them", file=sys.stderr)
        return 2
    reasons = {need: missing(need) for kind in kinds for need in kind.requirements()}
    skipped = {kind.name: why for kind in kinds for why in [_first(reasons, kind)] if why}
    if arguments.list:
        for kind in kinds:
            print(
                f"{kind.name:45} {'skipped: ' + skipped[kind.name] if kind.name in skipped else ''}".rstrip()
            )
        return 0
    trials = [kind for kind in kinds if kind.name not in skipped] * arguments.repeat
    random.Random(arguments.seed).shuffle(trials)
    print(f"{len(trials)} deaths of {len(kinds) - len(skipped)} kinds, seed {arguments.seed}", flush=True)
    die_as_usual()
    with _load(arguments.load):
        outcomes = _campaign(trials, arguments.jobs, arguments.keep)
    summary = {**summarise(outcomes, skipped, arguments.seed), "load": arguments.load}
    print("\n" + tables(summary))
    if not arguments.only:
        _write(summary, arguments.output)
    if arguments.details:
        arguments.details.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 0 if passed(summary) else 1


_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"


@contextmanager
def _load(count: int) -> Iterator[None]:
    """So many processes beside the campaign that compute without end; they leave with it, however it ends."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _first(reasons: dict[str, str | None], kind: Kind) -> str | None:
    return next((reasons[need] for need in kind.requirements() if reasons[need]), None)


def _campaign(trials: list[Kind], jobs: int, keep: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(lambda kind: run_trial(kind, keep), trials):
            outcomes.append(outcome)
            for line in _remarks(outcome):
                print(line)
            if len(outcomes) % 20 == 0 or len(outcomes) == len(trials):
                print(f"{len(outcomes)}/{len(trials)} after {time.monotonic() - started:.0f} s", flush=True)
    return outcomes


def _remarks(outcome: Outcome) -> list[str]:
    """Everything about a trial that was not as it should be."""
    named = [*outcome.scores.items(), *([("while it hung", outcome.alive)] if outcome.alive else [])]
    lines = [
        f"  {outcome.kind}, {mode}: {'WRONG AND CERTAIN' if found.wrong_certain else 'not right'}: "
        f"{found.cause} ({found.grade}): {found.text}"
        for mode, found in named
        if not found.right or found.wrong_certain
    ]
    if outcome.trouble:
        lines.append(f"  {outcome.kind}: {outcome.trouble}")
    if lines and outcome.folder:
        lines.append(f"  {outcome.kind}: recording kept in {outcome.folder}")
    return lines


def _write(summary: dict[str, object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.deaths", description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="trials of each kind")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="KIND", help="these kinds (wildcards allowed)"
    )
    parser.add_argument("--list", action="store_true", help="name the kinds and stop")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="order of the trials")
    parser.add_argument(
        "--jobs", type=int, default=1, help="trials at the same time (times then mean little)"
    )
    parser.add_argument(
        "--load", type=int, default=0, metavar="N", help="let N processes compute beside the campaign"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the recordings, and say where those in doubt are"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the figures go (not with --only)")
    parser.add_argument("--details", type=Path, help="write every single outcome to this file too")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
