"""What users keep beside their models (counters, histories, buffers, RNGs), restored in place.

In place all the way down: `history = []; run.track(counters={"history": history})` goes on filling the list that is
tracked, a nested `defaultdict` stays one, and a generator in `vars(environment)` goes on where it was.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from buoy.errors import BuoyError

_KINDS = (dict, list, set, deque)
_GENERATOR = "buoy.generator"
"""The only key of a dict that stands for a generator inside a container."""

Read = Callable[[object], Any]
"""The state of a generator, None for anything else; the framework knows which ones there are."""
Write = Callable[[Any, Any], None]
Refill = Callable[[Any, Any], bool]
"""Copies what is stored into what is there, where that must stay the object it is; whether it did."""


class CannotTrack(BuoyError):  # noqa: N818 - says what happened
    """`track` was given something that has no state, or whose state cannot be restored."""


class Value(Protocol):
    """Something with a state of plain values, arrays and tensors."""

    def state(self) -> object:
        """Its state now."""
        ...

    def mismatches(self, state: Any) -> list[str]:
        """In what a stored state does not fit, in words; empty when it can be loaded."""
        ...

    def load(self, state: Any) -> None:
        """Restore a stored state."""
        ...


def _refill_nothing(there: object, stored: object) -> bool:
    return False


def value_of(thing: Any, read: Read, write: Write, refill: Refill = _refill_nothing) -> Value | None:
    """How this is saved and loaded; None: no container, array or generator, and without a state of its own."""
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return Stateful(thing)
    if isinstance(thing, _KINDS):
        return Container(thing, read, write, refill)
    if type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray":
        return Array(thing)
    if read(thing) is not None:
        return Generator(thing, read, write)
    return None


def refuse(name: str, thing: object, *, expected: str, owner: str) -> NoReturn:
    """What `track` says of something that cannot be saved; `owner` is what users call their run."""
    if thing is None or isinstance(thing, (bool, int, float, str, bytes, tuple, frozenset)):
        raise CannotTrack(
            f"{name} cannot be restored in place: it is a plain value",
            received=f"{name}={thing!r}"[:100],
            expected="something that can be changed in place",
            hint=f"keep it in a dict: `counters = {{{name!r}: ...}}; {owner}.track(counters=counters)`",
        )
    hint = "give its class both methods, or keep what it holds in a dict and track that"
    if hasattr(thing, "__dict__"):
        hint = f"`{owner}.track({name}=vars({name}))` keeps its attributes; or give its class both methods"
    raise CannotTrack(
        f"{name} cannot be saved: it has no state_dict() and load_state_dict()",
        received=f"{type(thing).__module__}.{type(thing).__qualname__}",
        expected=f"{expected}, anything with both methods, a dict, list, set or deque, a numpy array, an RNG",
        hint=hint,
    )


class Stateful:
    """Anything with `state_dict` and `load_state_dict`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def state(self) -> object:
        """What it says itself."""
        return self._owner.state_dict()

    def mismatches(self, state: Any) -> list[str]:
        """It may refuse when it is loaded."""
        return []

    def load(self, state: Any) -> None:
        """Its own way."""
        self._owner.load_state_dict(state)


class Container:
    """A dict, list, set or deque, with what lies in it."""

    def __init__(self, container: Any, read: Read, write: Write, refill: Refill = _refill_nothing) -> None:
        self._container, self._read, self._write, self._refill = container, read, write, refill
        # Looked for once: a replay buffer of a million steps is not copied at each checkpoint for nothing.
        self._has_generators = any(read(leaf) is not None for leaf in leaves(container))

    def state(self) -> object:
        """Itself; or a copy in which generators are what they hold."""
        return self._described(self._container) if self._has_generators else self._container

    def mismatches(self, state: Any) -> list[str]:
        """It stays the kind it is."""
        kind = next(kind for kind in _KINDS if isinstance(self._container, kind))
        if isinstance(state, kind):
            return []
        return [f"is a {kind.__name__} here, but in the checkpoint a {type(state).__name__}"]

    def load(self, state: Any) -> None:
        """Fill it and the containers in it."""
        self._fill(self._container, state, _in_two_places(self._container))

    def _described(self, value: Any) -> Any:
        if isinstance(value, dict):
            described = {key: self._described(item) for key, item in value.items()}
            if type(value) is defaultdict:  # saved as what it is
                return defaultdict(value.default_factory, described)
            return Counter(described) if type(value) is Counter else described
        if isinstance(value, deque):
            return deque(map(self._described, value), value.maxlen)
        if type(value) in (list, tuple):
            return type(value)(map(self._described, value))
        held = self._read(value)
        return value if held is None else {_GENERATOR: held}

    def _fill(self, container: Any, stored: Any, shared: set[int]) -> None:
        if isinstance(container, dict):
            old = dict(container)
            container.clear()
            for key, value in stored.items():
                container[key] = self._put_back(old.get(key), value, shared)
        elif isinstance(container, set):
            container.clear()
            container.update(stored)
        else:
            was = list(container)
            container.clear()
            container.extend(
                self._put_back(was[place] if place < len(was) else None, value, shared)
                for place, value in enumerate(stored)
            )

    def _put_back(self, old: Any, stored: Any, shared: set[int]) -> Any:
        """What was there, filled with what is stored; or that itself, where another kind of thing was there."""
        if isinstance(stored, dict) and set(stored) == {_GENERATOR}:
            if self._read(old) is None:
                raise ValueError(f"an RNG was saved here, now it is a {type(old).__name__}")
            self._write(old, stored[_GENERATOR])
            return old
        if type(old) is tuple and type(stored) is tuple and len(old) == len(stored):
            return tuple(self._put_back(one, other, shared) for one, other in zip(old, stored, strict=True))
        if self._refill(old, stored):
            return old
        same = any(isinstance(old, kind) and isinstance(stored, kind) for kind in _KINDS)
        if not same or id(old) in shared or getattr(old, "maxlen", None) != getattr(stored, "maxlen", None):
            return stored
        self._fill(old, stored, shared)
        return old


class Array:
    """A numpy array; it has its shape and its type for good."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def state(self) -> object:
        """Itself."""
        return self._array

    def mismatches(self, state: Any) -> list[str]:
        """Shape and type."""
        if type(state) is not type(self._array):
            return [f"is a numpy array here, but in the checkpoint a {type(state).__name__}"]
        if state.shape != self._array.shape:
            return [f"is {shape_of(state)} in the checkpoint, but {shape_of(self._array)} here"]
        if state.dtype != self._array.dtype:
            return [f"is {state.dtype} in the checkpoint, but {self._array.dtype} here"]
        return []

    def load(self, state: Any) -> None:
        """Copy into it."""
        self._array[...] = state


class Generator:
    """Somebody's own generator of random numbers."""

    def __init__(self, generator: object, read: Read, write: Write) -> None:
        self._generator, self._read, self._write = generator, read, write

    def state(self) -> object:
        """Where it is in its sequence."""
        return self._read(self._generator)

    def mismatches(self, state: Any) -> list[str]:
        """It may refuse when it is loaded."""
        return []

    def load(self, state: Any) -> None:
        """Go there."""
        self._write(self._generator, state)


def shape_of(array: Any) -> str:
    """A shape in words.

    >>> shape_of(memoryview(b"abc"))
    '(3)'
    """
    return f"({', '.join(str(size) for size in array.shape)})"


def _in_two_places(container: Any) -> set[int]:
    """Containers that occur twice in it: each place has its own stored value, so they cannot be filled."""
    seen: set[int] = set()
    twice: set[int] = set()
    for here in _walk(container):
        if isinstance(here, _KINDS):
            (twice if id(here) in seen else seen).add(id(here))
    return twice


def leaves(container: Any) -> Iterator[Any]:
    """What lies in containers, at any depth; the thing itself where it is none."""
    return (thing for thing in _walk(container) if not isinstance(thing, (*_KINDS, tuple)))


def _walk(container: Any) -> Iterator[Any]:
    """Everything in it, each container looked into once; what lies in two places comes twice."""
    seen: set[int] = set()
    ahead = [container]
    while ahead:
        here = ahead.pop()
        yield here
        if isinstance(here, (*_KINDS, tuple)) and id(here) not in seen:
            seen.add(id(here))
            ahead.extend(here.values() if isinstance(here, dict) else here)
