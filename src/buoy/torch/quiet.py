"""Randomness made the same for every sample, so that a whole batch and its parts can be compared."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from buoy.torch.backward import LossFunction

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random operations constant: masks of the whole and of the parts can never be the same otherwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tolerance = min(_TOLERANCE.values())
        """Of the coarsest numbers that were computed with."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and made.is_floating_point():
                self.tolerance = max(self.tolerance, _TOLERANCE.get(made.dtype, 0.0))
            return made
        name = func._schema.name
        if name == "aten::native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        args = list(args)
        for number, argument in enumerate(func._schema.arguments):
            if argument.name in ("dropout_p", "dropout"):
                if number < len(args):
                    args[number] = 0.0
                elif argument.name in kwargs:
                    kwargs = {**kwargs, argument.name: 0.0}
        made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            made.fill_(1.0 if "bernoulli" in name else 0.0 if "norm" in name or "randn" in name else 0.5)
        return made


def same_random(loss_fn: LossFunction) -> LossFunction:
    """The loss function with every generator at the same place before each call."""

    def same(part: Any) -> Any:
        random.seed(0)
        torch.manual_seed(0)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)
        return loss_fn(part)

    return same


def eager() -> Any:
    """A compiled model is asked as it was before compilation: no new shapes are compiled for a probe."""
    compiled = "torch._dynamo" in sys.modules  # whose import takes seconds
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
