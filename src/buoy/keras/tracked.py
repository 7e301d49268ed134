"""What a loop of one's own names with `track`: Keras's and TensorFlow's objects, and the values kept beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from buoy.checkpoint.values import CannotTrack, Value, leaves, refuse, value_of
from buoy.keras import rng, state

_VALUE = "value"
"""Under this key a checkpoint has a plain value, so that nobody takes it for variables."""


class Variables:
    """Models, layers, optimizers, metrics, variables, seed generators, and lists of them."""

    def __init__(self, name: str, owner: Any) -> None:
        self._name, self._owner = name, owner
        self.state()  # unbuilt ones are refused here

    def state(self) -> dict[str, Any]:
        """Its variables by name."""
        return state.state_of(self._owner)

    def mismatches(self, stored: Any) -> list[str]:
        """What keeps the stored ones from fitting, in words."""
        return state.check(self.state(), {} if stored is None else stored(state.Lent), self._name)

    def load(self, stored: Any) -> None:
        """Give them their stored values."""
        state.assign(self.state(), stored(state.Lent))


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
        """Put it back in place."""
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
    with_variables = [leaf for leaf in found if state.has_variables(leaf)]
    if with_variables and (len(with_variables) < len(found) or isinstance(thing, dict)):
        raise CannotTrack(
            f"{name} cannot be put back: Keras objects lie among other values in it",
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


def trains_along(objects: list[Any]) -> bool:
    """Whether the optimizer that a tracked model was compiled with has stepped, and is not tracked itself."""
    within = list(leaves(objects))
    known = {id(each) for each in within}
    own = [getattr(each, "optimizer", None) for each in within if isinstance(each, keras.Model)]
    others = [each for each in own if each is not None and id(each) not in known]
    return any(each.built and int(each.iterations) for each in others)


def _own(stored: Any) -> Any:
    """A stored tensor as one of TensorFlow's, with memory of its own."""
    import tensorflow as tf

    return tf.constant(state.to_tensor(stored))
