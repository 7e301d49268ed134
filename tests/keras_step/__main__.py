"""`python -m tests.keras_step`: refuse every allocation of a step of every model, and compare bit for bit."""

from __future__ import annotations

import os
import sys
import time

from buoy.testing import shim


def main() -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")  # the n-th allocation is then always the same one
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # oneDNN's fused matrix product does not look whether its output could be allocated: it crashes the process.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    if not shim.loaded():
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.keras_step", *sys.argv[1:]], shim.environment()
        )
    from tests.keras_step.injection import campaign
    from tests.keras_step.zoo import MODELS, Options

    chosen = sys.argv[1:]
    start = time.monotonic()
    outcomes = []
    for name, build in MODELS.items():
        if chosen and name not in chosen:
            continue
        # Careful: copies are made before the update, as they are when the reserve for it is refused; so that
        # allocations inside the optimizer may be refused as well.
        outcomes.append(campaign(name, build, careful=True, smallest=256))
        print(outcomes[-1], flush=True)
    if not chosen:  # XLA on the CPU does not survive a refused allocation
        eager = Options(compile={"run_eagerly": True})
        outcomes.append(campaign("mlp, eagerly", MODELS["mlp"], eager, careful=True, smallest=256))
        print(outcomes[-1], flush=True)
    points = sum(outcome.points for outcome in outcomes)
    exact = sum(outcome.results["exact"] for outcome in outcomes)
    print(f"{exact}/{points} bit for bit, {len(outcomes)} models, {time.monotonic() - start:.0f} s")
    return 0 if all(outcome.exact for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
