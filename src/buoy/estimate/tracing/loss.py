"""How a user's loss function is called: with the model's output and the target, or with the model and the batch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch

from buoy._compat.torch import tree_map
from buoy.estimate.child import EstimateError
from buoy.estimate.tracing.fake import empty_like, fake_device, moved, ordinary_values, together

OUTPUTS = ("input", "outputs", "output", "y_pred", "preds", "logits", "pred")
MODELS = ("model", "net", "network", "module")


@dataclass(frozen=True, slots=True)
class EitherWay:
    """A loss whose parameters' names do not say what it takes."""

    function: Callable[..., Any]

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """As a function of (output, target), which is what most are."""
        return of_output(self.function, model, batch)

    def decided(
        self, model: torch.nn.Module, batch: Any, loss_modules: Sequence[torch.nn.Module] = ()
    ) -> Callable[[torch.nn.Module, Any], torch.Tensor]:
        """The way that works, tried on fake tensors: with the output first, then with the model."""
        first = _why_not(partial(of_output, self.function), model, batch, loss_modules)
        if first is None or _reads_values(first):
            return partial(of_output, self.function)
        second = _why_not(self.function, model, batch, loss_modules)
        if second is None or _reads_values(second):
            return self.function
        raise EstimateError(
            "the loss function cannot be called",
            received=f"{_name(self.function)}(output, target): {_said(first)}; "
            f"{_name(self.function)}(model, batch): {_said(second)}",
            expected="a function of (output, target) or of (model, batch)",
            hint="call its first parameter `output` or `model`, and only that way is tried",
        )


def modules_of_loss(loss: Any, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules with weights or buffers that a loss is, or holds, or calls by name, and that are no part of the model."""
    found: dict[int, torch.nn.Module] = {}
    seen = {id(part) for part in model.modules()}

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module) and any(
            True for _ in chain(value.parameters(), value.buffers())
        ):
            found[id(value)] = value
        for inner in _held_by(value):
            look(inner)

    look(loss)
    return list(found.values())


def _held_by(value: Any) -> Sequence[Any]:
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType) and value.__module__.partition(".")[0] != "torch":
        with contextlib.suppress(ValueError):  # a name of the function around it that has no value yet
            known = inspect.getclosurevars(value)
            return (*known.nonlocals.values(), *known.globals.values())
    return ()


def of_output(function: Callable[..., Any], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of the model's output and the target."""
    result: torch.Tensor = function(call_model(model, inputs_of(batch)), target_of(batch))
    return result


def inputs_of(batch: Any) -> Any:
    """What the model is given of a batch."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def target_of(batch: Any) -> Any:
    """What its output is compared with; None where the batch has none."""
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _why_not(
    loss: Callable[..., Any], model: torch.nn.Module, batch: Any, loss_modules: Sequence[torch.nn.Module]
) -> Exception | None:
    host = torch.device("cpu")

    def fake(leaf: Any) -> Any:
        return empty_like(leaf, host) if isinstance(leaf, torch.Tensor) else leaf

    try:
        with ordinary_values(), fake_device(), moved(together(model, loss_modules), host), torch.no_grad():
            found = loss(model, tree_map(fake, batch))
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return error
    return (
        None
        if isinstance(found, torch.Tensor)
        else TypeError(f"returned {type(found).__name__}, not a tensor")
    )


def _reads_values(error: Exception) -> bool:
    return "DataDependent" in type(error).__name__ or "DynamicOutput" in type(error).__name__


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[
        :160
    ]
