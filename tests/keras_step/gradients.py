"""The gradient in micro-batches against the whole batch's: stock Keras is the judge.

`python -m tests.keras_step.gradients` compares every (model, loss) pair of the zoo in both precisions: at most 1e-12 in
fp64, and in fp32 at most 4 times the difference that other orders of the same samples make (in half precision at most
its unit roundoff); or refused in words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np

from buoy.keras.step.transaction import install
from buoy.microbatch.errors import CannotSplit
from tests.keras_step.zoo import MODELS, Case, Options

ORDERS = 4
FP64, TIMES = 1e-12, 4.0
HALF = 2**-11
"""Where layers compute in half precision each part's gradient is rounded to it: its unit roundoff bounds the rest."""


def silent(*args: object, **kwargs: object) -> None:
    pass


def sgd() -> Any:
    return keras.optimizers.SGD(1.0)


def update(
    build: Any, micro_batch: int | None, rows: int | None = None, order: int | None = None
) -> tuple[list[Any], dict[str, float]]:
    """What one step of plain gradient descent changes, and the logs; stock Keras without a micro-batch."""
    keras.utils.set_random_seed(0)
    case: Case = build(Options(optimizer=sgd, drop=0.0))
    if micro_batch is not None:
        install(case.model, say=silent, event=silent, micro_batch=micro_batch)
    x, y, weight = cut(case, rows, order)
    case.model.evaluate(x, y, verbose=0)  # builds it
    before = [variable.numpy() for variable in case.model.trainable_variables]
    logs = case.model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
    after = [variable.numpy() for variable in case.model.trainable_variables]
    return [old - new for old, new in zip(before, after, strict=True)], logs


def cut(case: Case, rows: int | None, order: int | None) -> tuple[Any, Any, Any]:
    def take(leaf: Any) -> Any:
        if leaf is None:
            return None
        few = leaf[:rows]
        return few if order is None else few[np.random.default_rng(order).permutation(len(few))]

    return tuple(keras.tree.map_structure(take, part) for part in (case.x, case.y, case.sample_weight))


def distance(first: list[Any], second: list[Any]) -> float:
    """Relative to the whole gradient."""
    pairs = [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in zip(first, second, strict=True)]
    difference = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    return float(difference / np.sqrt(sum(np.sum(a**2) for a, _ in pairs)))


def error(build: Any, micro_batch: int, rows: int | None = None) -> tuple[float, float] | str:
    """Relative differences of gradient and logs; or why it was refused."""
    whole, logs = update(build, None, rows)
    try:
        parts, split_logs = update(build, micro_batch, rows)
    except CannotSplit as refusal:
        return str(refusal)
    in_logs = max(abs(logs[name] - split_logs[name]) / max(1e-30, abs(logs[name])) for name in logs)
    return distance(whole, parts), float(in_logs)


def order_error(build: Any, rows: int | None = None) -> float:
    """The largest difference that other orders of the same samples make, without any micro-batch."""
    whole, _ = update(build, None, rows)
    return max(distance(whole, update(build, None, rows, order)[0]) for order in range(ORDERS))


@contextmanager
def double_precision() -> Iterator[None]:
    """Models made within it compute in fp64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def main() -> int:
    wrong = 0
    for name, build in MODELS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        words = []
        with double_precision():
            found = error(build, 7, rows=31)
        if isinstance(found, str):
            words.append("fp64 refused")
        else:
            wrong += found[0] > FP64
            words.append(f"fp64 {found[0]:.1e}")
        found = error(build, 7, rows=31)
        if isinstance(found, str):
            words.append(f"fp32 refused: {found.splitlines()[0]}")
        else:
            allowed = max(TIMES * order_error(build, rows=31), HALF if name == "half" else 0.0)
            wrong += found[0] > allowed
            words.append(
                f"fp32 {found[0]:.1e} of {allowed:.1e}" + (" TOO MUCH" if found[0] > allowed else "")
            )
        print(f"{name:12} {', '.join(words)}", flush=True)
    print(f"silently wrong: {wrong} of {2 * len(MODELS)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
