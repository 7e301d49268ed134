"""Every allocation of a training step refused in turn, by the real allocator; then compared bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from buoy.keras.step.transaction import Transaction, install
from buoy.testing import shim
from tests.keras_step.gradients import silent
from tests.keras_step.zoo import MODELS, Case, Options

SMALLEST = 4096
EAGERLY = "mlp, eagerly"  # XLA on the CPU does not survive a refused allocation


@dataclass
class Outcome:
    """What became of each refused allocation."""

    name: str
    points: int = 0
    results: Counter[str] = field(default_factory=Counter)

    @property
    def exact(self) -> bool:
        return self.points > 0 and self.results["exact"] == self.points

    def __str__(self) -> str:
        rest = {word: count for word, count in self.results.items() if word != "exact"}
        return f"{self.name:24} {self.results['exact']}/{self.points}" + (f"  {rest}" if rest else "")


class Bench:
    """One model under injection: its state can be put back, its step repeated."""

    def __init__(self, build: Any, options: Options, *, careful: bool) -> None:
        keras.utils.set_random_seed(0)
        self.case: Case = build(options)
        self.careful = careful
        model = self.case.model
        self.transaction: Transaction = install(model, say=silent, event=silent, inexact=self.case.inexact)
        x, y, weight = self.case.x, self.case.y, self.case.sample_weight
        self._data = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), (x, y, weight)
        )
        self._fresh: dict[str, Any] | None = None
        self.step(None)
        self._fresh = self.transaction.state_dict()  # what a sample needs was measured
        self.step(len(keras.tree.flatten(y)[0]) // 2)  # both graphs are traced before anything is refused
        self.before = self.state()

    def step(self, micro_batch: int | None) -> None:
        transaction = self.transaction
        if self._fresh is not None:
            transaction.load_state_dict(self._fresh)
        transaction.replay([])
        transaction._careful = 2 if self.careful else 0
        if micro_batch is not None:
            state = transaction.state_dict()
            transaction.replay([{"step": state["steps"], "samples": micro_batch, "sizer": state["sizer"]}])
        self.case.model.make_train_function()
        self.case.model.train_function(iter([self._data]))

    def variables(self) -> list[Any]:
        model = self.case.model
        return [*model.variables, *model.optimizer.variables, *model.metrics_variables]

    def state(self) -> list[Any]:
        return [variable.numpy() for variable in self.variables()]

    def restore(self) -> None:
        for variable, value in zip(self.variables(), self.before, strict=True):
            variable.assign(value)


def campaign(
    name: str, build: Any, options: Options | None = None, *, careful: bool = False, smallest: int = SMALLEST,
    every: int = 1, times: int = 1,
) -> Outcome:  # fmt: skip
    """Refuse each allocation of at least `smallest` bytes, `times` in a row; only each `every`-th for a sample."""
    bench = Bench(build, options or Options(), careful=careful)
    bench.restore()
    number = shim.count(lambda: bench.step(None), smallest=smallest)
    outcome = Outcome(name)
    references: dict[int, list[Any]] = {}
    for point in range(1, number + 1, every):
        bench.restore()
        try:
            with shim.failing(point, times=times, smallest=smallest):
                bench.step(None)
                if not shim.read().refused:
                    continue  # this run made fewer allocations: nothing was put to the test
                outcome.points += 1
        except Exception as error:
            outcome.points += 1
            outcome.results[f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"] += 1
            continue
        size = bench.transaction.state_dict()["history"]["samples"] or 0
        after = bench.state()
        if size not in references:
            bench.restore()
            bench.step(size or None)
            references[size] = bench.state()
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(after, references[size], strict=True))
        outcome.results["exact" if same else "DIFFERENT"] += 1
    return outcome


# For processes that share the work.


def recover_case(name: str) -> Outcome:
    options = Options(compile={"run_eagerly": True}) if name == EAGERLY else None
    # Careful: copies are made before the update, as they are when the reserve for it is refused; so that
    # allocations inside the optimizer may be refused as well.
    return campaign(name, MODELS[name.partition(",")[0]], options, careful=True, smallest=256)
