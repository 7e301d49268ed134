"""The random state of a Keras process: python, numpy, TensorFlow's and Keras's own; and streams of one's own."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy
import tensorflow as tf

from buoy._compat.keras import global_seeds
from buoy._compat.tensorflow import eager_generator, eager_seed, global_generator

_lent = threading.RLock()
"""Held while the global RNGs belong to a reader of data; TensorFlow reads ahead in threads of its own."""


def _new_lock() -> None:
    global _lent
    _lent = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # whoever held it is not in the child


def capture() -> dict[str, Any]:
    """Every global RNG of this process, as plain values and arrays."""
    with _lent:
        state = _python_side()
        op_seeds = eager_generator()
        state["tensorflow.seed"] = eager_seed()
        state["tensorflow.op_seeds"] = op_seeds.getstate() if op_seeds is not None else None
        return {**state, **{name: variable.numpy() for name, variable in _global_variables().items()}}


def restore(state: dict[str, Any]) -> None:
    """Restore what `capture` took; what this process does not have is left out."""
    with _lent:
        _make_global_variables(state)  # making one draws from python's RNG: that comes after
        _restore_python_side(state)
        op_seeds, generator = state.get("tensorflow.op_seeds"), eager_generator()
        if op_seeds is not None and generator is not None:
            generator.setstate(op_seeds)
        for name, variable in _global_variables().items():
            if name in state:
                variable.assign(state[name])


def generator_state(generator: object) -> Any:
    """The state of somebody's own RNG: Keras's, TensorFlow's, numpy's, python's; None: it is none of them."""
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state()
    if isinstance(generator, keras.random.SeedGenerator | tf.random.Generator):
        return numpy.array(generator.state)
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore it."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.state.assign(state)


def seed_generator(generator: Any, seed: int) -> None:
    """Let it begin at this seed."""
    if isinstance(generator, random.Random | numpy.random.RandomState):
        generator.seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, tf.random.Generator):
        generator.reset_from_seed(seed)
    else:
        generator.state.assign(numpy.array([seed, 0], "uint32"))


def run_seed(given: int | None, stored: dict[str, Any] | None) -> int:
    """A run's seed: kept in its checkpoints, else as given, else that of `set_random_seed`, else drawn."""
    if stored is not None:
        return int(stored["seed"])
    known = given if given is not None else eager_seed()
    return int(known) if known is not None else int.from_bytes(os.urandom(4), "little")


def number(*parts: object) -> int:
    """A 32-bit seed out of anything, the same in every process.

    >>> number(1, "order", 3)
    3209386874
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global RNGs of python, numpy and (where it is loaded) torch begin at this seed, inside only."""
    with _lent:
        outside = _python_side()
        _seed_python_side(seed)
        try:
            yield
        finally:
            _restore_python_side(outside)


class Stream:
    """RNGs that belong to one reader of data: in force inside `with`, where they continue from last time."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._own = _python_side()
        self._outside: dict[str, Any] = {}

    def __enter__(self) -> None:
        _lent.acquire()
        self._outside = _python_side()
        _restore_python_side(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = _python_side()
        _restore_python_side(self._outside)
        _lent.release()


def _python_side() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        state["torch"] = torch.get_rng_state().numpy()
    return state


def _seed_python_side(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)


def _restore_python_side(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"]))


def _global_variables() -> dict[str, Any]:
    """Global RNGs that are variables, where they exist already; none is made by looking."""
    known = {"keras.global": global_seeds(), "tensorflow.global": global_generator()}
    return {name: generator.state for name, generator in known.items() if generator is not None}


def _make_global_variables(state: dict[str, Any]) -> None:
    """A generator that is made on first use must be there to be set."""
    missing = state.keys() - _global_variables().keys()
    if "keras.global" in missing:
        global_seeds(make=True)
    if "tensorflow.global" in missing:
        tf.random.get_global_generator()
