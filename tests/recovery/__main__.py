"""`make recovery`: every allocation of every model. `python -m tests.recovery lstm`: those with this word."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.recovery.campaign import WARM, prepare, recover_case
from tests.recovery.models import MODELS


def main() -> int:
    names = [name for name in MODELS if all(word in name for word in sys.argv[1:])]
    # The short ones last, so that no core waits for another.
    cases = [(name, moment) for moment in WARM for name in names]
    start, points, exact = time.monotonic(), 0, 0
    cores, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        cores, context, prepare
    ) as pool:  # a crash is an error: a Pool would wait for ever
        for outcome in pool.map(recover_case, cases):
            points, exact = points + outcome.points, exact + outcome.exact
            print(f"{outcome.exact:4d} of {outcome.points:4d} exact  {outcome.name}", flush=True)
            for wrong in outcome.wrong[:3]:
                print(f"       {wrong}")
    print(f"\n{len(names)} models, {exact} of {points} failed allocations recovered exactly, "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    return 0 if exact == points and points else 1


if __name__ == "__main__":
    sys.exit(main())
