"""`make recovery`: every allocation of every model. `python -m tests.recovery lstm`: those with this word."""

from __future__ import annotations

import gc
import sys
import time

import torch

from tests.recovery.campaign import campaign, totals, undisturbed
from tests.recovery.models import MODELS


def main() -> int:
    torch.set_num_threads(1)
    undisturbed("dropout", 0, [])  # loads what torch loads at the first step
    gc.freeze()  # each recovery collects garbage: let it not walk over all of torch
    names = [name for name in MODELS if all(word in name for word in sys.argv[1:])]
    start, outcomes = time.monotonic(), []
    for outcome in campaign(names):
        outcomes.append(outcome)
        print(f"{outcome.exact:4d} of {outcome.points:4d} exact  {outcome.name}", flush=True)
        for wrong in outcome.wrong[:3]:
            print(f"       {wrong}")
    total = totals(outcomes)
    print(f"\n{len(names)} models, {total['exact']} of {total['points']} failed allocations recovered exactly, "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    return 0 if total["exact"] == total["points"] and total["points"] else 1


if __name__ == "__main__":
    sys.exit(main())
