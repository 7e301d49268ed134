"""Everything a Keras training holds: built before it is needed, saved under a few names, checked, loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy.errors import BuoyError, UsageError
from buoy.keras import state
from buoy.keras.late_optimizers import load_when_built, waiting_state

_MOST_OPTIMIZERS = 100
"""Nobody keeps more; a layer's vocabulary need not be walked at each checkpoint."""
_MOST_VARIABLES = 1000
"""In one list or dict of a layer, for the same reason."""
_NO_VARIABLES = frozenset((int, float, bool, str, bytes, type(None)))
_KEPT = "kept "
"""Begins the names of variables in lists and dicts of layers."""


class OtherModel(BuoyError):  # noqa: N818 - says what happened
    """A checkpoint does not fit this model; nothing was loaded."""


class Holdings:
    """The variables of a compiled model and of all that belongs to it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def build(self, spec: Any) -> None:
        """Make every variable now, from the shapes of the data: what is not there cannot be loaded."""
        batch = keras.tree.map_structure(_Described, spec)
        try:
            if not self._is_built():
                # Outside the strategy's scope the optimizer's slots cannot be made, and are left half made.
                with self._model.distribute_strategy.scope():
                    self._model._symbolic_build(data_batch=batch)
        except Exception as error:  # whatever a model's call raises on symbols
            if not self._model.built:
                raise UsageError(
                    "the model cannot be built from the shapes of the data",
                    received=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                    expected="a model whose variables exist before `fit`",
                    hint="call it once on a batch: `model(x[:1])`",
                ) from error
        optimizer = self._model.optimizer
        if optimizer is not None and not optimizer.built:
            with self._model.distribute_strategy.scope():
                optimizer.build(self._model.trainable_variables)

    def items(self) -> dict[str, dict[str, Any]]:
        """Name -> variables, as the store takes them."""
        items = {"model": {**state.state_of(self._model), **self._plain_variables()}}
        if self._model.optimizer is not None:
            items["optimizer"] = state.state_of(self._model.optimizer)
        for name, optimizer in self._other_optimizers().items():
            held = state.state_of(optimizer) if optimizer.built else waiting_state(optimizer)
            if held:
                items[name] = held
        items["metrics"] = state.state_of(list(self._model.metrics))
        return items

    def places_in_weights_file(self) -> dict[str, tuple[str, str]]:
        """Where Keras would put each variable in a `.weights.h5`: path -> (name of the item, name in it)."""
        names = {
            id(variable): (item, name)
            for item, variables in self.items().items()
            if item == "model"
            for name, variable in variables.items()
        }
        try:
            from keras.src.saving import saving_lib

            layout = _layout(saving_lib)
            saving_lib._save_state(self._model, layout, None, "", set())
        except Exception:  # noqa: BLE001 - only the export to that format is lost, and it says so
            return {}
        return {
            place: names[id(variable._value)]
            for place, variable in layout.places.items()
            if id(getattr(variable, "_value", None)) in names
        }

    def load(self, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """All of it, or nothing and an error that names what does not fit.

        Optimizers that a training step of its own has not built yet get theirs when it does. Returns what begins anew,
        in words: older checkpoints have no variables out of containers, and a container may be filled in training.
        """
        others = self._other_optimizers()
        late = {name: each for name, each in others.items() if not each.built}
        # Older checkpoints have no optimizers out of containers and inner models, and no variables of losses.
        unknown = {name for name in others if name.count(".") > 1 and name not in stored}
        here = {name: variables for name, variables in self.items().items() if name not in {*late, *unknown}}
        if not any(name.startswith("loss ") for name in stored.get("model", {})):
            here["model"] = {
                name: each for name, each in here["model"].items() if not name.startswith("loss ")
            }
        saved = stored.get("model", {})
        alone = {name for name in here["model"].keys() ^ saved.keys() if name.startswith(_KEPT)}
        here_only = alone - saved.keys()
        here["model"] = {name: each for name, each in here["model"].items() if name not in alone}
        stored = {**stored, "model": {name: each for name, each in saved.items() if name not in alone}}
        check_all(here, stored)
        for name, variables in here.items():
            state.assign(variables, stored[name])
        for name, optimizer in late.items():
            if name in stored:
                waiting = {key: numpy.asarray(each) for key, each in stored[name].items()}
                load_when_built(optimizer, waiting, partial(_load_one, name, optimizer, waiting))
        where = {
            "not in the checkpoint": here_only,
            "in the checkpoint and not here yet": alone - here_only,
        }
        return [f"{_listed(names)} begin anew: {words}" for words, names in where.items() if names]

    def _is_built(self) -> bool:
        model = self._model
        parts = [model._compile_metrics, model._compile_loss, model.optimizer]
        return all(layer.built for layer in model._flatten_layers()) and all(
            part is None or part.built for part in parts
        )

    def _other_optimizers(self) -> dict[str, Any]:
        """A model with a training step of its own may keep several: as attributes (`self.d_optimizer`), in a list or
        dict, or in models inside it that were compiled on their own (`self.generator.optimizer`)."""
        found: dict[str, Any] = {}
        known = {id(self._model.optimizer)}
        layers = [self._model, *self._model._flatten_layers(include_self=False)]
        names = state.renumbered([layer.name for layer in layers[1:]])
        for layer in layers:
            prefix = "optimizer" if layer is self._model else f"optimizer.{names[layer.name]}"
            # An attribute keeps its own name (as in older checkpoints), whatever TensorFlow's books hold it too.
            own = [item for item in vars(layer).items() if not item[0].startswith("_self_")]
            for name, value in sorted(own, key=_is_container):
                for place, optimizer in _optimizers(f"{prefix}.{name}", value):
                    if id(optimizer) not in known:
                        known.add(id(optimizer))
                        found[place if place not in found else f"{place}~{len(found)}"] = optimizer
        return found

    def _losses(self) -> list[Any]:
        """The losses that `compile` was given, each once; one of a person's own may hold variables."""
        given = keras.tree.flatten(getattr(self._model, "loss", None))
        return [each for each in given if isinstance(each, keras.Loss)]

    def _plain_variables(self) -> dict[str, Any]:
        """Attributes of layers and losses that Keras itself does not count: tf.Variable, tf.random.Generator (also in
        lists and dicts), the states of a stateful RNN, the weight in a loss that a callback moves."""
        found: dict[str, Any] = {}
        counted = {id(variable) for variable in self._model.variables}
        raw = {id(getattr(variable, "_value", None)) for variable in self._model.variables}
        layers = list(self._model._flatten_layers())
        names = state.renumbered([layer.name for layer in layers])
        for layer in layers:
            for name, value in vars(layer).items():
                if _are_others(value, counted):
                    held = [(name, value)]
                else:  # `_self_...` are TensorFlow's own books of all that a layer holds
                    held = [] if name.startswith("_self_") else list(_plain(name, value))
                for place, each in held:
                    if place != name and id(each) in raw:
                        continue
                    mark = _KEPT if place != name else ""
                    for inner, variable in state.state_of(each).items():
                        found[f"{mark}{names[layer.name]}.{place}/{inner}"] = variable
        for number, loss in enumerate(self._losses()):
            for name, value in vars(loss).items():
                if isinstance(value, (tf.Variable, keras.Variable, tf.random.Generator)):
                    for inner, variable in state.state_of(value).items():
                        if id(value) not in counted:
                            found[f"loss {number}.{name}/{inner}"] = variable
        return found


def _listed(names: set[str]) -> str:
    shown = [name.removeprefix(_KEPT) for name in sorted(names)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _is_container(item: tuple[str, Any]) -> bool:
    return isinstance(item[1], (dict, list, tuple))


def _optimizers(place: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """(its name, the optimizer) of each in a value: itself, or what a list or dict holds."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield place, value
    elif not depth or not isinstance(value, (dict, list, tuple)) or len(value) > _MOST_OPTIMIZERS:
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _optimizers(f"{place}.{key}", item, depth - 1)
    else:
        for number, item in enumerate(value):
            yield from _optimizers(f"{place}.{number}", item, depth - 1)


def _plain(place: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """(its name, the variable or generator) of each of TensorFlow in a value: itself, or in a list or dict."""
    if isinstance(value, (tf.Variable, tf.random.Generator)):
        yield place, value
    elif not depth or not isinstance(value, (dict, list, tuple)) or len(value) > _MOST_VARIABLES:
        return
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if type(item) not in _NO_VARIABLES:  # first: asking TensorFlow takes long, a million times
                yield from _plain(f"{place}.{key}", item, depth - 1)


def _are_others(value: Any, counted: set[int]) -> bool:
    """A layer's own list of Keras variables, none of which is among the model's."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(each, keras.Variable) and id(each) not in counted for each in value)


def stored_training(checkpoint: Any, by: str) -> dict[str, Any] | None:
    """What `Guard` or `Loop` keeps about itself; a checkpoint of anything else is refused in words."""
    if checkpoint is None:
        return None
    found = checkpoint.value("training", state.to_tensor) if "training" in checkpoint.names else {}
    if not isinstance(found, dict) or found.get("by") != by:
        made = (
            f"buoy.keras.{found['by']}" if isinstance(found, dict) and found.get("by") else "something else"
        )
        raise OtherModel(
            "the checkpoints in this folder were made by another kind of training",
            received=f"{checkpoint.folder}, made by {made}",
            expected=f"a run of buoy.keras.{by}",
            hint="give this training a folder of its own",
        )
    return found


def _load_one(name: str, optimizer: Any, stored: Mapping[str, Any]) -> None:
    here = state.state_of(optimizer)
    check_all({name: here}, {name: stored})
    state.assign(here, stored)


def check_all(here: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `OtherModel` unless everything here has its counterpart in the checkpoint, and fits."""
    refuse_others(
        problem
        for name, variables in here.items()
        for problem in state.check(variables, stored.get(name, {}), name)
    )


def refuse_others(differences: Iterable[str]) -> None:
    """Raise `OtherModel` if there is any difference to what was saved."""
    problems = list(differences)
    if not problems:
        return
    shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
    raise OtherModel(
        "the checkpoint is of another model; nothing was loaded",
        received=f"{len(problems)} difference{'s' if len(problems) > 1 else ''}",
        details=shown,
        expected="the model, optimizer and metrics that were saved",
        hint="give this training a folder of its own, or build the model as before",
    )


class _Described:
    """The shape and type of one part of a batch, as Keras's builder asks for them."""

    def __init__(self, spec: Any) -> None:
        self.shape = tuple(spec.shape)
        self.dtype = spec.dtype


def _layout(saving_lib: Any) -> Any:
    """A store for Keras's own saver that writes nothing and notes which variable goes where."""

    class Layout(saving_lib.H5IOStore):  # type: ignore[misc]
        def __init__(self) -> None:
            self.places: dict[str, Any] = {}
            self._group = ""

        def __bool__(self) -> bool:
            return True

        def make(self, path: str, metadata: Any = None) -> Any:
            self._group = f"{path}/vars" if path else "vars"
            return self

        def __setitem__(self, key: str, value: Any) -> None:
            self.places[f"{self._group}/{key}"] = value

        def __del__(self) -> None:
            """Nothing is open."""

    return Layout()
