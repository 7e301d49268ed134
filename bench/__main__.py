"""`make bench`: every figure in one run, as tables and as bench/results/*.json. `python -m bench startup` runs one."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib import import_module
from pathlib import Path

BENCHES = (
    "startup", "beacon", "sidecar", "recorder", "leaks", "check", "checkpoint", "resume", "recovery", "keras_step",
    "keras_sizes", "estimate", "estimate_keras", "estimate_timm", "report",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which of: {', '.join(BENCHES)} (default: all)"
    )
    names = parser.parse_args().names or BENCHES
    unknown = set(names) - set(BENCHES)
    if unknown:
        parser.error(f"unknown bench {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    RESULTS.mkdir(exist_ok=True)
    met = True
    for name in names:
        print(f"\n== {name}: {(import_module(f'bench.{name}').__doc__ or '').splitlines()[0]}")
        result = import_module(f"bench.{name}").main()
        result.update(name=name, when=time.strftime("%Y-%m-%d %H:%M:%S"), python=platform.python_version(),
                      kernel=platform.release(), cores=len(__import__("os").sched_getaffinity(0)))  # fmt: skip
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        met = met and result.get("met", True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
