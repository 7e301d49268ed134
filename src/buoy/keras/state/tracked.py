"""Everything a Keras training holds: built before it is needed, saved under a few names, checked, loaded.

What a loop of one's own names with `track`: Keras's and TensorFlow's objects, and the values kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from buoy._compat.keras import build_on_symbols, layers_of, loss_of, metrics_of, places_in_weights_file, raw
from buoy._compat.tensorflow import own_books
from buoy.checkpoint.values import CannotTrack, Value, leaves, refuse, value_of
from buoy.errors import BuoyError, UsageError, trouble
from buoy.keras.data import rng
from buoy.keras.state import state_dict
from buoy.keras.state.tensors import Lent, to_tensor

_MOST = 1000
"""In one list or dict of a layer: a vocabulary need not be walked at each checkpoint."""
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
_OF_TENSORFLOW = (tf.Variable, tf.random.Generator)
_KEPT = "kept "
"""Begins the names of variables in lists and dicts of layers."""
_BUILD = "build each before `fit`: `model.d_optimizer.build(model.discriminator.trainable_variables)`"


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
                    build_on_symbols(self._model, batch)
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
        items = {"model": {**state_dict.state_of(self._model), **self._plain_variables()}}
        if self._model.optimizer is not None:
            items["optimizer"] = state_dict.state_of(self._model.optimizer)
        for name, optimizer in self._other_optimizers().items():
            if optimizer.built:
                items[name] = state_dict.state_of(optimizer)
        items["metrics"] = state_dict.state_of(list(self._model.metrics))
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
            places = places_in_weights_file(self._model)
        except Exception as error:  # noqa: BLE001 - only the export to that format is lost, and it says so
            trouble("where Keras would put weights in a file", error)
            return {}
        return {
            place: names[id(raw(variable))]
            for place, variable in places.items()
            if id(raw(variable)) in names
        }

    def load(self, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """All of it, or nothing and an error that names what does not fit.

        Returns what starts over, in words: older checkpoints have no variables out of containers, and a container may
        be filled in training.
        """
        others = self._other_optimizers()
        late = {name for name, each in others.items() if not each.built}
        if missed := sorted(late & stored.keys()):
            raise OtherModel(
                "an optimizer has no variables yet, so what was saved of it cannot be restored; nothing was loaded",
                received=f"{_listed(set(missed))} without variables",
                expected="optimizers that are built before `fit`, as they were when the checkpoint was made",
                hint=_BUILD,
            )
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
            state_dict.assign(variables, stored[name])
        where = {
            "not in the checkpoint": here_only,
            "in the checkpoint, but not here yet": alone - here_only,
        }
        return [f"{_listed(names)} start over: {words}" for words, names in where.items() if names]

    def unbuilt(self) -> str | None:
        """The optimizers that only the training step builds, in words: a resume could not restore them."""
        names = {name for name, each in self._other_optimizers().items() if not each.built}
        if not names:
            return None
        return f"{_listed(names)} has no variables before its first step, so a resume will be refused; hint: {_BUILD}"

    def _is_built(self) -> bool:
        model = self._model
        parts = [metrics_of(model), loss_of(model), model.optimizer]
        return all(layer.built for layer in layers_of(model)) and all(
            part is None or part.built for part in parts
        )

    def _other_optimizers(self) -> dict[str, Any]:
        """A model with a training step of its own may keep several: as attributes (`self.d_optimizer`), in a list or
        dict, or in models inside it that were compiled on their own (`self.generator.optimizer`)."""
        found: dict[str, Any] = {}
        known = {id(self._model.optimizer)}
        layers = [self._model, *layers_of(self._model, include_self=False)]
        names = state_dict.renumbered([layer.name for layer in layers[1:]])
        for layer in layers:
            prefix = "optimizer" if layer is self._model else f"optimizer.{names[layer.name]}"
            # An attribute keeps its own name (as in older checkpoints), whatever TensorFlow's books hold it too.
            own = [item for item in vars(layer).items() if not own_books(item[0])]
            for name, value in sorted(own, key=_is_container):
                for place, optimizer in _each(keras.optimizers.Optimizer, f"{prefix}.{name}", value):
                    if id(optimizer) not in known:
                        known.add(id(optimizer))
                        found[place if place not in found else f"{place}~{len(found)}"] = optimizer
        return found

    def _losses(self) -> list[Any]:
        """The losses that `compile` was given, each once; one of the user's own may hold variables."""
        given = keras.tree.flatten(getattr(self._model, "loss", None))
        return [each for each in given if isinstance(each, keras.Loss)]

    def _plain_variables(self) -> dict[str, Any]:
        """Attributes of layers and losses that Keras itself does not count: tf.Variable, tf.random.Generator (also in
        lists and dicts), the states of a stateful RNN, the weight in a loss that a callback moves."""
        found: dict[str, Any] = {}
        counted = {id(variable) for variable in self._model.variables}
        plain = {id(raw(variable)) for variable in self._model.variables}
        layers = layers_of(self._model)
        names = state_dict.renumbered([layer.name for layer in layers])
        for layer in layers:
            for name, value in vars(layer).items():
                if _are_others(value, counted):
                    held = [(name, value)]
                else:  # `_self_...` are TensorFlow's own books of all that a layer holds
                    held = [] if own_books(name) else list(_each(_OF_TENSORFLOW, name, value))
                for place, each in held:
                    if place != name and id(each) in plain:
                        continue
                    mark = _KEPT if place != name else ""
                    for inner, variable in state_dict.state_of(each).items():
                        found[f"{mark}{names[layer.name]}.{place}/{inner}"] = variable
        for number, loss in enumerate(self._losses()):
            for name, value in vars(loss).items():
                if isinstance(value, (tf.Variable, keras.Variable, tf.random.Generator)):
                    for inner, variable in state_dict.state_of(value).items():
                        if id(value) not in counted:
                            found[f"loss {number}.{name}/{inner}"] = variable
        return found


def _listed(names: set[str]) -> str:
    shown = [name.removeprefix(_KEPT) for name in sorted(names)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _is_container(item: tuple[str, Any]) -> bool:
    return isinstance(item[1], (dict, list, tuple))


def _each(kinds: Any, place: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """(its name, the object) of each of these kinds in a value: itself, or what a list or dict holds."""
    if isinstance(value, kinds):
        yield place, value
    elif depth and isinstance(value, (dict, list, tuple)) and len(value) <= _MOST:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if type(item) not in _PLAIN:  # first: asking TensorFlow takes long, a million times
                yield from _each(kinds, f"{place}.{key}", item, depth - 1)


def _are_others(value: Any, counted: set[int]) -> bool:
    """A layer's own list of Keras variables, none of which is among the model's."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(each, keras.Variable) and id(each) not in counted for each in value)


def stored_training(checkpoint: Any, by: str) -> dict[str, Any] | None:
    """What `Guard` or `Loop` keeps about itself; a checkpoint of anything else is refused in words."""
    if checkpoint is None:
        return None
    found = checkpoint.value("training", to_tensor) if "training" in checkpoint.names else {}
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


def check_all(here: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `OtherModel` unless everything here has its counterpart in the checkpoint, and fits."""
    refuse_others(
        problem
        for name, variables in here.items()
        for problem in state_dict.check(variables, stored.get(name, {}), name)
    )


def refuse_others(differences: Iterable[str]) -> None:
    """Raise `OtherModel` if there is any difference to what was saved."""
    problems = list(differences)
    if not problems:
        return
    shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
    raise OtherModel(
        "the checkpoint belongs to another model; nothing was loaded",
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


_VALUE = "value"
"""Under this key a checkpoint has a plain value, so that nobody takes it for variables."""


class Variables:
    """Models, layers, optimizers, metrics, variables, seed generators, and lists of them."""

    def __init__(self, name: str, owner: Any) -> None:
        self._name, self._owner = name, owner
        self.state()  # unbuilt ones are refused here

    def state(self) -> dict[str, Any]:
        """Its variables by name."""
        return state_dict.state_of(self._owner)

    def mismatches(self, stored: Any) -> list[str]:
        """What keeps the stored ones from fitting, in words."""
        return state_dict.check(self.state(), {} if stored is None else stored(Lent), self._name)

    def load(self, stored: Any) -> None:
        """Give them their stored values."""
        state_dict.assign(self.state(), stored(Lent))


class Beside:
    """A dict, list, set, deque, numpy array, generator, or anything with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, value: Value) -> None:
        self._name, self._value = name, value

    def state(self) -> dict[str, Any]:
        """As the store takes it."""
        return {_VALUE: self._value.state()}

    def mismatches(self, stored: Any) -> list[str]:
        """In what the stored one differs; it may be missing in an older checkpoint."""
        if not self.is_in(stored):
            return []
        return [f"{self._name} {words}" for words in self._value.mismatches(stored(_own)[_VALUE])]

    def load(self, stored: Any) -> None:
        """Restore it in place."""
        if self.is_in(stored):
            self._value.load(stored(_own)[_VALUE])

    def is_in(self, stored: Any) -> bool:
        """Whether the checkpoint has it: before this was possible, names were kept without their values."""
        return stored is not None and _VALUE in stored(_own)


Tracked = Variables | Beside
Stored = Callable[[Callable[[Any], Any]], Any]
"""A stored value, once it is said how to make its tensors."""


def tracked(name: str, thing: Any) -> Tracked:
    """How this is saved and loaded; what cannot be is refused by its name, at the start."""
    found = list(leaves(thing))
    with_variables = [leaf for leaf in found if state_dict.has_variables(leaf)]
    if with_variables and (len(with_variables) < len(found) or isinstance(thing, dict)):
        raise CannotTrack(
            f"{name} cannot be restored: it mixes Keras objects with other values",
            received=f"a {type(thing).__name__} with a {type(with_variables[0]).__name__} in it",
            expected="a model, an optimizer, a list of variables, or a container of plain values",
            hint=f"name them one by one: `loop.track({name}_model=..., {name}=...)`",
        )
    if with_variables:
        return Variables(name, thing)
    value = value_of(thing, rng.generator_state, rng.set_generator_state)
    if value is None:
        refuse(name, thing, expected="a built model, optimizer or metric, a variable", owner="loop")
    return Beside(name, value)


def trainable_flags(model: Any) -> list[bool]:
    """The `trainable` of every layer, in order."""
    return [bool(layer.trainable) for layer in layers_of(model)]


def trains_along(objects: list[Any]) -> bool:
    """Whether the optimizer that a tracked model was compiled with has stepped, and is not tracked itself."""
    within = list(leaves(objects))
    known = {id(each) for each in within}
    own = [getattr(each, "optimizer", None) for each in within if isinstance(each, keras.Model)]
    others = [each for each in own if each is not None and id(each) not in known]
    return any(each.built and int(each.iterations) for each in others)


def _own(stored: Any) -> Any:
    """A stored tensor as one of TensorFlow's, with memory of its own."""
    return tf.constant(to_tensor(stored))
