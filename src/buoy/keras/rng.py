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

_lent = threading.RLock()
"""Held while the global generators belong to a reader of data; TensorFlow reads ahead in threads of its own."""


def _new_lock() -> None:
    global _lent
    _lent = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # whoever held it is not in the child


def capture() -> dict[str, Any]:
    """Every global generator of this process, as plain values and arrays."""
    with _lent:
        return _capture()


def _capture() -> dict[str, Any]:
    state = {"python": random.getstate(), **_numpy_state()}
    eager = _eager_context()
    if eager is not None:
        state["tensorflow.seed"] = eager._seed
        state["tensorflow.op_seeds"] = eager._rng.getstate() if eager._rng is not None else None
    for name, variable in _global_variables().items():
        state[name] = variable.numpy()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        state["torch"] = torch.get_rng_state().numpy()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took; what this process does not have is left out."""
    with _lent:
        _restore(state)


def _restore(state: dict[str, Any]) -> None:
    import numpy

    _make_global_variables(state)  # making one draws from python's generator: that comes after
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    eager = _eager_context()
    op_seeds = state.get("tensorflow.op_seeds")
    if eager is not None and op_seeds is not None and eager._rng is not None:
        eager._rng.setstate(op_seeds)
    for name, variable in _global_variables().items():
        if name in state:
            variable.assign(state[name])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"]))


def generator_state(generator: object) -> Any:
    """The state of somebody's own generator: Keras's, TensorFlow's, numpy's, python's; None: it is none of them."""
    import keras
    import numpy

    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state()
    if isinstance(generator, keras.random.SeedGenerator) or _is_tensorflows(generator):
        return numpy.array(generator.state)  # type: ignore[attr-defined]
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    """Put it back."""
    import numpy

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
    import numpy

    if isinstance(generator, random.Random | numpy.random.RandomState):
        generator.seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif _is_tensorflows(generator):
        generator.reset_from_seed(seed)
    else:
        generator.state.assign(numpy.array([seed, 0], "uint32"))


def _is_tensorflows(generator: object) -> bool:
    stateful = sys.modules.get("tensorflow.python.ops.stateful_random_ops")
    return stateful is not None and isinstance(generator, stateful.Generator)


def run_seed(given: int | None, stored: dict[str, Any] | None) -> int:
    """A run's seed: kept in its checkpoints, else as given, else that of `set_random_seed`, else drawn."""
    if stored is not None:
        return int(stored["seed"])
    eager = _eager_context()
    known = given if given is not None else getattr(eager, "_seed", None)
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
    """The global generators of python, numpy and (where it is loaded) torch begin at this seed, inside only."""
    with _lent:
        outside = _python_side()
        _seed_python_side(seed)
        try:
            yield
        finally:
            _put_python_side(outside)


class Stream:
    """Generators that belong to one reader of data: in force inside `with`, where they go on from last time."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._own = _python_side()
        self._outside: dict[str, Any] = {}

    def __enter__(self) -> None:
        _lent.acquire()
        self._outside = _python_side()
        _put_python_side(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = _python_side()
        _put_python_side(self._outside)
        _lent.release()


def _python_side() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), **_numpy_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
    return state


def _seed_python_side(seed: int) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)


def _put_python_side(state: dict[str, Any]) -> None:
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(state["torch"])


def _numpy_state() -> dict[str, Any]:
    import numpy

    return {"numpy": numpy.random.get_state()}


def _eager_context() -> Any:
    """TensorFlow's source of op seeds for eager calls; private, hence asked for with care."""
    try:
        from tensorflow.python.eager import context

        eager = context.context()
    except (ImportError, AttributeError):
        return None
    return eager if hasattr(eager, "_rng") and hasattr(eager, "_seed") else None


def _global_variables() -> dict[str, Any]:
    """Global generators that are variables, where they exist already; none is made by looking."""
    found = {}
    try:
        from keras.src.backend.common import global_state

        generator = global_state.get_global_attribute("global_seed_generator")
        if generator is not None:
            found["keras.global"] = generator.state
    except ImportError:
        pass
    stateful = sys.modules.get("tensorflow.python.ops.stateful_random_ops")
    generator = getattr(stateful, "global_generator", None)
    if generator is not None:
        found["tensorflow.global"] = generator.state
    return found


def _make_global_variables(state: dict[str, Any]) -> None:
    """A generator that is made on first use must be there to be set."""
    if "keras.global" in state and "keras.global" not in _global_variables():
        from keras.src.random.seed_generator import global_seed_generator

        global_seed_generator()
    if "tensorflow.global" in state and "tensorflow.global" not in _global_variables():
        import tensorflow as tf

        tf.random.get_global_generator()
