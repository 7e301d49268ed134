"""A training loop without a framework, for the keeper's tests: a counter, a few floats, a step that sleeps.

Run as `python -m tests.training.loop FOLDER key=value...`; every line it prints is `step N` or an outcome.
"""

from __future__ import annotations

import ast
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from buoy.checkpoint.encoding import Tensor
from buoy.training.manager import CheckpointManager
from buoy.training.options import Options


def as_tensor(value: object) -> Tensor | None:
    """An `array` of doubles is this framework's tensor."""
    if not isinstance(value, array):
        return None

    def copy_into(memory: memoryview) -> None:
        memory[:] = value.tobytes()

    return Tensor("F64", (len(value),), copy_into, id(value))


def items(step: int, size: int) -> dict[str, object]:
    return {"model": {"weights": array("d", [float(step)]) * size}, "counter": {"step": step}}


@contextmanager
def kept(folder: str, **options: Any) -> Iterator[CheckpointManager]:
    keeper = CheckpointManager(folder, Options(**options))
    try:
        yield keeper
    finally:
        keeper.finish()


def train(
    folder: str,
    *,
    steps: int = 1000,
    pause: float = 0.01,
    size: int = 1000,
    each: Callable[[int], object] = int,
    **options: Any,
) -> None:
    """`each` is called with the number of every step."""
    with kept(folder, **options) as keeper:
        there = keeper.newest()
        step = there.step if there is not None else 0
        print(f"from {step}", flush=True)
        keeper.expect(items(step, size), as_tensor)
        with keeper.loop():
            while step < steps:
                step += 1
                time.sleep(pause)
                each(step)
                print(f"step {step}", flush=True)
                keeper.recorder.step(step)
                if (reason := keeper.due(step)) is not None:
                    receipt = keeper.save(
                        items(step, size), step=step, epoch=0, reason=reason, as_tensor=as_tensor
                    )
                    print(f"saved {step} {reason} {receipt.error}", flush=True)
                    keeper.stop_if_asked()
        keeper.save(
            items(step, size), step=step, epoch=1, reason="finished", finished=True, as_tensor=as_tensor
        )
    print("finished", flush=True)


if __name__ == "__main__":
    given = (word.partition("=") for word in sys.argv[2:])
    try:
        train(sys.argv[1], **{name: ast.literal_eval(value) for name, _, value in given})
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
        raise
