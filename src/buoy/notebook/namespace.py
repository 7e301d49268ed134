"""What a notebook's names hold of a training: model, batch, optimizer and loss, or a question in words."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buoy.errors import UsageError

_LOSS_WORDS = ("loss", "criterion")
_BATCH_NAME = "batch"


@dataclass(slots=True)
class Found:
    """What is to be planned, and how it was called."""

    model: Any
    batch: Any = None
    optimizer: Any = None
    loss: Any = None
    batch_size: int | None = None
    words: list[str] = field(default_factory=list)


class Names:
    """Those that the user gave, and those of the notebook for what was not given."""

    def __init__(self, held: Mapping[str, Any], named: Mapping[str, Any]) -> None:
        self.named = dict(named)
        self._held = {name: value for name, value in held.items() if not name.startswith("_")}

    def of(self, kind: Callable[[str, Any], bool]) -> dict[str, Any]:
        """All of a kind."""
        mine = {name: value for name, value in self.named.items() if kind(name, value)}
        return mine or {name: value for name, value in self._held.items() if kind(name, value)}


def find(held: Mapping[str, Any], named: Mapping[str, Any]) -> Found:
    """The training among these names. Asks, by raising, where there is none or more than one.

    Nothing is computed with what is found; of a loader only the samples of one batch are read.
    """
    names = Names(held, named)
    models = _models(names)
    if not models:
        raise UsageError(
            "there is no model in this notebook yet",
            expected="a torch.nn.Module with parameters, or a Keras model, in a variable",
            hint='run the cell that builds it, or name a function: `buoy.plan("train.py:build")`',
        )
    optimizers = names.of(lambda _, value: _is_optimizer(value))
    if len(models) > 1 and len(optimizers) == 1:  # a teacher, an average: the one that is trained is meant
        trained = _ids(_trained_by(next(iter(optimizers.values()))))
        models = {name: model for name, model in models.items() if trained <= _own(model)} or models
    name, model = _only(models, "model")
    if _is_keras_model(model):
        return _of_keras(names, name, model)
    return _of_torch(names, name, model, optimizers)


def _of_torch(names: Names, name: str, model: Any, optimizers: dict[str, Any]) -> Found:
    found = Found(getattr(model, "_orig_mod", model), words=[f"model `{name}`"])
    given = {key: value for key, value in names.named.items() if _is_function_of_two(value)}
    losses = given or names.of(_is_loss)
    _take_batch(found, names, set(losses))
    own = _own(model)
    optimizers = {key: value for key, value in optimizers.items() if _ids(_trained_by(value)) & own}
    if optimizers:
        key, found.optimizer = _only(optimizers, "optimizer")
        found.words.append(f"optimizer `{key}`")
    else:
        found.words.append("AdamW (assumed: no optimizer of this model was found)")
    if losses:
        key, found.loss = _only(losses, "loss")
        found.words.append(f"loss `{key}`")
    else:
        found.words.append("the model's own loss or cross-entropy (assumed: no loss was found)")
    return found


def _take_batch(found: Found, names: Names, losses: set[str]) -> None:
    from buoy.torch.data.loader import batch_of, is_source

    given = {
        name: value for name, value in names.named.items() if name not in losses and _may_be_batch(value)
    }
    given = given or names.of(lambda name, value: name == _BATCH_NAME and value is not None)
    loaders = names.of(lambda _, value: is_source(value))
    if given and not loaders.keys() & names.named.keys():
        name, found.batch = _only(given, "batch")
        found.words.append(f"batch `{name}`")
    elif loaders:
        name, loader = _only(_for_training(loaders), "loader")
        found.batch = batch_of(loader, name)
        found.words.append(f"one batch of `{name}`")
    else:
        raise UsageError(
            "a model alone is not enough: there is no batch and no loader in this notebook",
            expected="a variable `batch`, such as (images, labels), or a torch DataLoader",
            hint="`%buoy plan model images,labels` takes the batch from these names",
        )


def _of_keras(names: Names, name: str, model: Any) -> Found:
    from buoy.keras.data.loader import batch_size_of, is_source

    if not getattr(model, "compiled", False):
        raise UsageError(
            f"`{name}` is not compiled yet",
            received="a Keras model without optimizer and loss",
            expected="`model.compile(...)` before the plan",
            hint=f"`{name}.compile(optimizer='adam', loss=...)`, then `%buoy plan` again",
        )
    found = Found(model, words=[f"model `{name}` as it is compiled"])
    sources = names.of(lambda _, value: is_source(value))
    if sources:
        key, source = _only(_for_training(sources), "data set")
        found.batch = getattr(source, "element_spec", None)  # shapes and types: no batch is taken
        found.batch_size = batch_size_of(source)
        if found.batch_size is not None:
            found.words.append(f"batches of {found.batch_size} as `{key}` makes them")
    return found


def _models(names: Names) -> dict[str, Any]:
    """Models that are no part of another one here."""
    found = names.of(lambda _, value: _is_keras_model(value) or _is_torch_model(value))
    modules = [model for model in found.values() if _is_torch_model(model)]
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return {name: model for name, model in found.items() if id(model) not in parts}


def _for_training(sources: dict[str, Any]) -> dict[str, Any]:
    """Of loaders for training, validation and test the first is meant."""
    chosen = {name: value for name, value in sources.items() if "train" in name.lower()}
    return chosen or sources


def _only(found: dict[str, Any], what: str) -> tuple[str, Any]:
    """The only one, whatever it is called; two names of one object are one."""
    different = {id(value): (name, value) for name, value in reversed(found.items())}
    if len(different) == 1:
        return next(iter(different.values()))
    names = sorted(name for name, _ in different.values())
    raise UsageError(
        f"this notebook holds more than one {what}",
        received=", ".join(f"`{name}`" for name in names),
        expected="the name of the one that is meant",
        hint=f"`%buoy plan {names[0]}`; what is not named is found as before",
    )


def _is_torch_model(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    return next(iter(value.parameters()), None) is not None


def _is_optimizer(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def _is_loss(name: str, value: Any) -> bool:
    torch = sys.modules["torch"]
    if isinstance(value, torch.nn.modules.loss._Loss):
        return True
    if not any(word in name.lower() for word in _LOSS_WORDS):
        return False
    return _is_function_of_two(value)


def _is_function_of_two(value: Any) -> bool:
    """Of output and target, or model and batch; a function of one part of a batch is `run.backward`'s."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.nn.Module):
        return not _is_torch_model(value)
    return inspect.isroutine(value) and _takes_two(value)


def _takes_two(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len([each for each in positional if each.default is each.empty]) == 2


def _may_be_batch(value: Any) -> bool:
    return isinstance(value, tuple | list | dict) or hasattr(value, "shape")


def _is_keras_model(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "train_step") and any(
        base.__module__.split(".")[0] == "keras" for base in kind.__mro__
    )


def _own(model: Any) -> set[int]:
    return _ids(model.parameters()) if _is_torch_model(model) else set()


def _trained_by(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _ids(things: Any) -> set[int]:
    return {id(thing) for thing in things}
