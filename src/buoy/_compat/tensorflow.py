"""What buoy uses of TensorFlow that TensorFlow calls private.

Checked: every name below in TensorFlow 2.18 and 2.21. `tf.data.Dataset.__iter__` is patched in
the training process while a shuffled pipeline is trained on (`watch_iterators`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# -- pipelines ----------------------------------------------------------------------------------------------------


def reads_pipelines() -> bool:
    """Whether the nodes of a pipeline show what they are made of. Without it no shuffle is seen: a resume is called
    approximate."""
    node = tf.data.Dataset.range(1).shuffle(1, seed=1)
    return hasattr(node, "_inputs") and hasattr(node, "_seed") and hasattr(node, "_functions")


def is_pipeline(dataset: Any) -> bool:
    """Whether its nodes can be seen: not of one that a strategy has distributed."""
    return hasattr(dataset, "_inputs")


def inputs_of(node: Any) -> list[Any]:
    """What a node of a pipeline reads."""
    return list(getattr(node, "_inputs", list)())


def seeds_of(node: Any) -> list[int] | None:
    """The two seeds of a shuffle or a random source; None: it is neither."""
    if not hasattr(node, "_seed") or not hasattr(node, "_seed2"):
        return None
    return [int(node._seed), int(node._seed2)]


def is_reshuffling(node: Any) -> bool:
    """Whether each pass through it draws another order, or other numbers, than the one before."""
    if hasattr(node, "_rerandomize"):  # Dataset.random
        return bool(node._rerandomize)
    return seeds_of(node) is not None and getattr(node, "_reshuffle_each_iteration", True) is not False


def repeats_of(node: Any) -> int:
    """How often a repeat repeats; -1 for ever."""
    return int(node._count)


def batch_size_of(node: Any) -> Any:
    """Of a node that makes batches; None: it makes none."""
    return getattr(node, "_batch_size", None)


def is_unordered(node: Any) -> bool:
    """Whether a parallel node may give its elements in any order. Only its graph still knows what `interleave` was
    given; a graph that cannot be read may hide anything."""
    kind = type(node).__name__
    if "Interleave" not in kind or "Parallel" not in kind:
        return getattr(node, "_deterministic", None) == "false"
    try:
        graph = tf.compat.v1.GraphDef.FromString(node._as_serialized_graph().numpy())
    except (tf.errors.OpError, AttributeError, ValueError):
        return True
    return any(op.attr["deterministic"].s == b"false" for op in graph.node if "deterministic" in op.attr)


def functions_of(node: Any) -> list[Any]:
    """The functions that a node calls on its elements, as graphs."""
    return [wrapper.function for wrapper in getattr(node, "_functions", list)()]


def watch_iterators(made: Callable[[Any], None]) -> Callable[[], None]:
    """Call `made(dataset)` whenever an iterator of a pipeline is made by Python; what ends it.

    Lost without it: the warning that something beside the training reads its shuffled data.
    """
    original = tf.data.Dataset.__iter__

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        if tf.executing_eagerly():
            made(self)
        return original(self)

    def end() -> None:
        if tf.data.Dataset.__iter__ is iterate:
            tf.data.Dataset.__iter__ = original

    tf.data.Dataset.__iter__ = iterate
    return end


# -- functions and graphs -----------------------------------------------------------------------------------------


def graphs_of(function: Any) -> list[Any]:
    """What a `tf.function` was traced to so far. Lost without it: the warning that a step draws from generators of
    TensorFlow that no checkpoint can hold."""
    return list(getattr(function, "_list_all_concrete_functions", list)())


def with_its_autograph(function: Any) -> Any:
    """A `tf.function` made anew, with the settings of this one. For `buoy plan` only."""
    return tf.function(function.python_function, autograph=function._autograph)


def own_books(attribute: str) -> bool:
    """Whether an attribute of a module is TensorFlow's own record of what the module holds."""
    return attribute.startswith("_self_")


def replicas_of(variable: Any) -> list[Any]:
    """Each replica's variable of a distributed one; a plain variable alone."""
    replicas = getattr(variable, "_values", None)
    return list(replicas) if isinstance(replicas, tuple) else [variable]


# -- random numbers -----------------------------------------------------------------------------------------------


def eager_seed() -> int | None:
    """What `tf.random.set_seed` was given."""
    return getattr(_eager(), "_seed", None)


def eager_generator() -> Any:
    """The generator (one of Python's) of seeds for operations outside of graphs; None before `set_seed`. Lost without
    it: what the script draws with `tf.random` outside of graphs is another number after a resume."""
    return getattr(_eager(), "_rng", None)


def _eager() -> Any:
    try:
        from tensorflow.python.eager import context

        return context.context()
    except (ImportError, AttributeError):
        return None


def global_generator() -> Any:
    """TensorFlow's own `tf.random.Generator`; None where nobody has asked for it: asking makes it."""
    stateful = sys.modules.get("tensorflow.python.ops.stateful_random_ops")
    return getattr(stateful, "global_generator", None)


# -- memory -------------------------------------------------------------------------------------------------------


def device_limit(device: str) -> int | None:
    """What TensorFlow's allocator may have on this device; None where it cannot be asked: sizes of micro-batches then
    follow from what fails."""
    try:
        from tensorflow.python import pywrap_tfe
        from tensorflow.python.client import pywrap_tf_session
        from tensorflow.python.eager import context

        devices = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
        for index in range(pywrap_tfe.TF_DeviceListCount(devices)):
            if pywrap_tfe.TF_DeviceListName(devices, index) == device:
                return int(pywrap_tf_session.TF_DeviceListMemoryBytes(devices, index))
    except (ImportError, AttributeError):
        return None
    return None
