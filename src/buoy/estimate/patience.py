"""How long a script that is rehearsed for a plan may take to come to its first step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from buoy.estimate.request import EstimateError


@contextlib.contextmanager
def in_time(seconds: float, step: str) -> Iterator[None]:
    """Raises inside the script when it takes longer; `step` is what it did not come to, for people."""

    def late(*_: object) -> None:
        raise EstimateError(
            f"the script did not come to its first {step}",
            received=f"still running after {seconds:.0f} s",
            expected="a script that trains soon",
            hint="give it longer with --timeout, or a function: `buoy plan train.py:build`",
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
