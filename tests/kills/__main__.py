"""The campaign: `python -m tests.kills --number 1000` (or `make kills N=1000`)."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from bench.measure import table
from tests.kills.kind import Tally
from tests.kills.kinds import ALL

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "kills.json"


def main() -> int:
    """Run the campaign; 1 if a run was unreadable, unequal, stuck, or lost what was promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument(
        "--number", type=int, default=100, help="how many kills at random instants; the rest scales"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], metavar="GLOB", help="only these kinds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kinds = [
        kind for kind in ALL if not arguments.only or any(fnmatch(kind.name, glob) for glob in arguments.only)
    ]
    tallies: dict[str, tuple[Tally, float]] = {}
    for kind in kinds:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="buoy-kills-") as folder:
            tally = kind.run(arguments.number, random.Random(f"{arguments.seed} {kind.name}"), Path(folder))
        tallies[kind.name] = (tally, time.monotonic() - started)
        print(f"{kind.name}: {tally.tried} in {tallies[kind.name][1]:.1f} s", file=sys.stderr, flush=True)
    rows = [_row(kind.name, kind.about, *tallies[kind.name]) for kind in kinds]
    print(table(["kind", "tried", "unreadable", "lost", "unequal", "stuck", "seconds", ""], rows))
    for name, (tally, _) in tallies.items():
        for failure in tally.failures[:5]:
            print(f"{name}: {failure}")
    if not arguments.only:
        arguments.output.parent.mkdir(exist_ok=True)
        arguments.output.write_text(json.dumps(_result(arguments, tallies), indent=1) + "\n")
    return 0 if all(tally.good for tally, _ in tallies.values()) else 1


def _row(name: str, about: str, tally: Tally, seconds: float) -> list[object]:
    words = f"skipped: {tally.skipped}" if tally.skipped else about
    return [
        name,
        tally.tried,
        tally.unreadable,
        tally.lost,
        tally.unequal,
        tally.stuck,
        f"{seconds:.1f}",
        words,
    ]


def _result(arguments: argparse.Namespace, tallies: dict[str, tuple[Tally, float]]) -> dict[str, object]:
    return {
        "number": arguments.number,
        "seed": arguments.seed,
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "kinds": {
            name: {**vars(tally), "seconds": round(seconds, 1)} for name, (tally, seconds) in tallies.items()
        },
        "good": all(tally.good for tally, _ in tallies.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
