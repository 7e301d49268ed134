"""`python -m tests.keras_step`: refuse every allocation of a step of every model, and compare bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

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
    from tests.keras_step.injection import EAGERLY, recover_case
    from tests.keras_step.zoo import MODELS

    start, outcomes = time.monotonic(), []
    cores, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        cores, context
    ) as pool:  # a crash of one is an error, where a Pool would wait for ever
        for outcome in pool.map(recover_case, sys.argv[1:] or [*MODELS, EAGERLY]):
            outcomes.append(outcome)
            print(outcome, flush=True)
    points = sum(outcome.points for outcome in outcomes)
    exact = sum(outcome.results["exact"] for outcome in outcomes)
    print(f"{exact}/{points} bit for bit, {len(outcomes)} models, {time.monotonic() - start:.0f} s")
    return 0 if all(outcome.exact for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
