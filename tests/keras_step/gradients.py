"""The gradient in micro-batches against the whole batch's: stock Keras is the judge."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from buoy.keras.transaction import install
from buoy.microbatch.errors import CannotSplit
from tests.keras_step.zoo import Case, Options


def silent(*args: object, **kwargs: object) -> None:
    pass


def sgd() -> Any:
    return keras.optimizers.SGD(1.0)


def update(
    build: Any, micro_batch: int | None, rows: int | None = None
) -> tuple[list[Any], dict[str, float]]:
    """What one step of plain gradient descent changes, and the logs; stock Keras without a micro-batch."""
    keras.utils.set_random_seed(0)
    case: Case = build(Options(optimizer=sgd, drop=0.0))
    if micro_batch is not None:
        install(case.model, say=silent, event=silent, micro_batch=micro_batch, inexact=case.inexact)
    x, y, weight = cut(case, rows)
    case.model.evaluate(x, y, verbose=0)  # builds it
    before = [variable.numpy() for variable in case.model.trainable_variables]
    logs = case.model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
    after = [variable.numpy() for variable in case.model.trainable_variables]
    return [old - new for old, new in zip(before, after, strict=True)], logs


def cut(case: Case, rows: int | None) -> tuple[Any, Any, Any]:
    def take(leaf: Any) -> Any:
        return None if leaf is None else leaf[:rows]

    return tuple(keras.tree.map_structure(take, part) for part in (case.x, case.y, case.sample_weight))


def error(build: Any, micro_batch: int, rows: int | None = None) -> tuple[float, float] | str:
    """Relative differences of gradient and logs; or why it was refused."""
    whole, logs = update(build, None, rows)
    try:
        parts, split_logs = update(build, micro_batch, rows)
    except CannotSplit as refusal:
        return str(refusal)
    difference = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(whole, parts, strict=True)))
    size = np.sqrt(sum(np.sum(a**2) for a in whole))
    in_logs = max(abs(logs[name] - split_logs[name]) / max(1e-30, abs(logs[name])) for name in logs)
    return float(difference / size), float(in_logs)
