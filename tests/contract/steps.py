"""One training step in either framework, seen from outside: `python -m tests.contract.steps torch|keras`.

A scene on stdin is answered by a line of JSON: what buoy said, its events, how it ended. Both frameworks have the
same scenes, so what a test reads of one it reads of the other. Keras runs with the allocation shim, torch on a device
of a given size: each is the thinnest seam that refuses memory there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

ROWS, WIDTH = 512, 512


def numbers() -> tuple[Any, Any]:
    """Inputs and targets."""
    import numpy as np

    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 32)).astype("float32"), random.normal(size=(ROWS, 2)).astype("float32")


class TorchStep:
    """`Transaction` around a perceptron."""

    def __init__(self, kind: str, say: Callable[[str], object], event: Callable[..., object]) -> None:
        import torch

        from buoy.torch.step.transaction import Transaction

        torch.manual_seed(0)
        self.torch, self.kind = torch, kind
        norm = [torch.nn.BatchNorm1d(WIDTH)] if kind == "batchnorm" else []
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, WIDTH), *norm, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 2)
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.transaction = Transaction(say=say, event=event)
        self.transaction.track([self.model], [optimizer])

    def loss(self, part: Any) -> Any:
        made = self.model(part[0])
        if self.kind == "contrastive":  # each sample with each other
            return (made @ made.T).logsumexp(1).mean()
        return (made - part[1]).square().mean()

    def step(self, room: int | None) -> None:
        from contextlib import nullcontext

        from buoy.testing import byte_budget

        batch = tuple(map(self.torch.from_numpy, numbers()))
        held = sum(p.numel() * p.element_size() for p in self.model.parameters())
        held += sum(each.numel() * 4 for each in batch)
        with nullcontext() if room is None else byte_budget(held + room):  # type: ignore[no-untyped-call]
            self.transaction.backward(batch, self.loss)

    def gradient(self) -> list[float]:
        return [float(p.grad.double().sum()) for p in self.model.parameters() if p.grad is not None]


class KerasStep:
    """`install` on a compiled perceptron."""

    def __init__(self, kind: str, say: Callable[[str], object], event: Callable[..., object]) -> None:
        from tests.keras_step import kit  # isort: skip - says how TensorFlow is to start

        import keras
        from keras import layers, ops

        from buoy.keras.step.transaction import install

        keras.utils.set_random_seed(0)
        norm = [layers.BatchNormalization()] if kind == "batchnorm" else []
        self.model = keras.Sequential(
            [keras.Input((32,)), layers.Dense(WIDTH), *norm, layers.ReLU(), layers.Dense(2)]
        )

        def contrastive(_: Any, made: Any) -> Any:
            return ops.mean(ops.logsumexp(made @ ops.transpose(made), axis=1))

        self.model.compile(keras.optimizers.SGD(0.01), contrastive if kind == "contrastive" else "mse")
        self.kind, self.kit = kind, kit
        self.before = [each.numpy() for each in self.model.trainable_variables]
        self.transaction = install(self.model, say=say, event=event)

    def step(self, room: int | None) -> None:
        from contextlib import nullcontext

        from buoy.testing import shim

        x, y = numbers()
        if room is not None and self.kind != "batchnorm":
            # What TensorFlow loads for its first step is no part of a step.
            other = KerasStep(self.kind, lambda text: None, lambda kind, **values: None)
            other.model.train_on_batch(x, y)
        with nullcontext() if room is None else shim.budget(shim.read().live + room, smallest=65536):
            self.model.train_on_batch(x, y)

    def gradient(self) -> list[float]:
        pairs = zip(self.before, self.model.trainable_variables, strict=True)
        return [float((one - other.numpy()).astype("float64").sum() / 0.01) for one, other in pairs]


def scene(framework: str, kind: str, room: int | None) -> dict[str, Any]:
    said: list[str] = []
    events: list[str] = []
    made: Any = {"torch": TorchStep, "keras": KerasStep}[framework](
        kind, said.append, lambda name, **values: events.append(f"{name}: {' '.join(sorted(values))}")
    )
    error: dict[str, Any] = {}
    try:
        made.step(room)
    except Exception as caught:  # what the user would see
        error = {"type": type(caught).__name__, "message": getattr(caught, "message", str(caught)),
                 "expected": getattr(caught, "expected", None), "hint": getattr(caught, "hint", None)}  # fmt: skip
    return {"said": said, "events": events, "error": error, "gradient": [] if error else made.gradient()}


def main() -> None:
    for line in sys.stdin:
        kind, room = json.loads(line)
        print(json.dumps(scene(sys.argv[1], kind, room)), flush=True)


if __name__ == "__main__":
    main()
