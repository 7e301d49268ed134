"""What can be read of a tf.data pipeline without running it: its seeds, its random operations, its order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from buoy.keras.data import APPROXIMATE, SAME_DATA, Exactness

_RANDOM_OPS = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal", "SampleDistorted")
_RANDOM_DATASETS = ("ShuffleDataset", "ShuffleAndRepeat", "RandomDataset")
_DRAWS_FROM_VARIABLE = ("RngReadAndSkip", "RngSkip", "AssignVariableOp", "AssignAddVariableOp")
_PYTHON_OPS = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
# Their iterators make those of their inputs when they are made; that of a shuffle waits for the first element.
_MAKE_INPUTS_AT_ONCE = ("Map", "ParallelMap", "Batch", "ParallelBatch", "PaddedBatch", "Prefetch", "Filter", "Take",
                        "Skip", "Options", "Zip", "Shard", "Window", "Unbatch", "Repeat", "Interleave", "FlatMap",
                        "ParallelInterleave", "Rebatch", "Concatenate")  # fmt: skip
_SET_SEED = "call keras.utils.set_random_seed(...) before the pipeline is made"


def examine(dataset: Any) -> Exactness:
    """How exactly this pipeline repeats itself in a new process."""
    nodes = list(nodes_of(dataset))
    if any(seeds == [0, 0] for seeds in seeds_of(dataset)) or any(map(_shuffles_inside_unseeded, nodes)):
        return Exactness(
            APPROXIMATE,
            "the pipeline shuffles without a seed: after a resume some samples of the epoch come twice or never",
            f"{_SET_SEED}, or give shuffle(seed=...)",
        )
    if any(shuffle.times is None for shuffle in shuffles_of(dataset)):
        return Exactness(
            APPROXIMATE,
            "how often the pipeline shuffles in one epoch depends on its data (a repeated shuffle is cut by take)",
            "shuffle after repeat and take, or leave take out and give fit(steps_per_epoch=...)",
        )
    if any(is_cache(node) and any(map(_has_seeds, nodes_of(node))) for node in nodes):
        return Exactness(
            APPROXIMATE,
            "the pipeline caches what it has shuffled: a new process shuffles the cache anew",
            "put .cache() before .shuffle()",
        )
    if dataset.options().deterministic is False or any(map(_out_of_order, nodes)):
        return Exactness(
            APPROXIMATE,
            "the pipeline may give its elements in any order (deterministic=False)",
            "leave out deterministic=False",
        )
    for node in nodes:
        for function in _functions(node):
            reason = _why_other_numbers(_operations(function), "Parallel" in type(node).__name__)
            if reason is not None:
                return reason
    return Exactness()


@dataclass(slots=True)
class Shuffle:
    """A shuffle (or random source) of a pipeline, and when it draws the seeds of its next order."""

    node: Any
    times: int | None
    """Draws in one pass that is read to its end; None when that depends on the data."""
    late: bool
    """Whether it draws when the pass is first read, not when the iterator is made."""

    def advance(self, made: int, read: int) -> None:
        """Draw as often as so many iterators did, of which so many were read.

        An iterator of the shuffle alone draws once, when it is made, and touches nothing above it.
        """
        for _ in range((read if self.late else made) + read * ((self.times or 1) - 1)):
            iter(self.node)


def shuffles_of(dataset: Any) -> list[Shuffle]:
    """Every shuffle of a pipeline."""
    found: dict[int, Shuffle] = {}
    _visit(dataset, 1, False, False, found)
    return list(found.values())


def _visit(node: Any, times: int | None, late: bool, cut: bool, found: dict[int, Shuffle]) -> None:
    """`cut`: something below may stop reading before the end."""
    if _has_seeds(node):
        known = found.setdefault(id(node), Shuffle(node, 0, late))
        known.late = known.late and late
        known.times = None if times is None or known.times is None else known.times + times
    kind = type(node).__name__
    if "Repeat" in kind:
        count = int(node._count)
        if cut:
            times = None
        elif count >= 0 and times is not None:
            times *= count  # an endless repetition is one pass for good
    elif "Concatenate" in kind and cut:
        times = None
    late = late or not kind.strip("_").startswith(_MAKE_INPUTS_AT_ONCE)
    for above in getattr(node, "_inputs", list)():
        _visit(above, times, late, cut or "Take" in kind, found)


def seeds_of(dataset: Any) -> list[list[int]]:
    """The seeds of every shuffle and random source, in the order of the pipeline."""
    return [[int(node._seed), int(node._seed2)] for node in nodes_of(dataset) if _has_seeds(node)]


def variables_of(dataset: Any) -> list[Any]:
    """Variables that the pipeline's functions draw from, each once."""
    found: dict[int, Any] = {}
    for node in nodes_of(dataset):
        for function in _functions(node):
            if any(op.op in _DRAWS_FROM_VARIABLE for op in _operations(function)):
                for variable in function.graph.variables:
                    found.setdefault(id(variable), variable)
    return list(found.values())


def _why_other_numbers(operations: list[Any], parallel: bool) -> Exactness | None:
    """What in a function makes other numbers of the same samples, if anything does."""
    drawing = [op for op in operations if op.op.startswith(_RANDOM_OPS) or op.op in _DRAWS_FROM_VARIABLE]
    if drawing and parallel:
        return Exactness(
            SAME_DATA,
            f"a parallel map draws random numbers ({drawing[0].op}) in the order of its threads: the same samples "
            "in the same order, with other augmentation",
            "use tf.random.stateless_* with a seed from the sample, augment in the model, or leave out "
            "num_parallel_calls",
        )
    unseeded = [
        op for op in drawing if "seed" in op.attr and not op.attr["seed"].i and not op.attr["seed2"].i
    ]
    if unseeded:
        return Exactness(
            SAME_DATA,
            f"the pipeline draws random numbers ({unseeded[0].op}) without a seed: the same samples in the same "
            "order, with other augmentation",
            _SET_SEED,
        )
    if any(op.op in _PYTHON_OPS for op in operations):
        return Exactness(
            SAME_DATA,
            "the pipeline calls Python functions, whose random state buoy cannot see",
            "use a keras.utils.PyDataset: its batches are seeded one by one",
        )
    return None


def nodes_of(dataset: Any) -> Iterator[Any]:
    """The dataset and everything upstream of it."""
    seen: set[int] = set()
    waiting = [dataset]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting += list(getattr(node, "_inputs", list)())


def is_reshuffling(node: Any) -> bool:
    """Whether each pass through it draws another order, or other numbers, than the one before."""
    if hasattr(node, "_rerandomize"):  # Dataset.random
        return bool(node._rerandomize)
    return _has_seeds(node) and getattr(node, "_reshuffle_each_iteration", True) is not False


def _has_seeds(node: Any) -> bool:
    return hasattr(node, "_seed") and hasattr(node, "_seed2")


def is_cache(node: Any) -> bool:
    """Whether it keeps what its first pass gave."""
    return type(node).__name__ == "CacheDataset"


def _out_of_order(node: Any) -> bool:
    if "Interleave" in type(node).__name__ and "Parallel" in type(node).__name__:
        return _interleaves_out_of_order(node)
    return getattr(node, "_deterministic", None) == "false"


def _interleaves_out_of_order(node: Any) -> bool:
    """Only its graph still knows what `interleave` was given; a graph that cannot be read may hide anything."""
    try:
        graph = tf.compat.v1.GraphDef.FromString(node._as_serialized_graph().numpy())
    except (tf.errors.OpError, AttributeError, ValueError):
        return True
    return any(op.attr["deterministic"].s == b"false" for op in graph.node if "deterministic" in op.attr)


def _shuffles_inside_unseeded(node: Any) -> bool:
    """A shuffle inside `interleave` or `flat_map`."""
    for function in _functions(node):
        operations = _operations(function)
        constants = {op.name: op for op in operations if op.op == "Const"}
        for op in operations:
            if op.op.startswith(_RANDOM_DATASETS):
                seeds = [constants.get(name.partition(":")[0]) for name in op.input[-3:]]
                values = [tf.make_ndarray(seed.attr["value"].tensor) for seed in seeds if seed is not None]
                if values and not any(value.any() for value in values):
                    return True
    return False


def _functions(node: Any) -> list[Any]:
    return [wrapper.function for wrapper in getattr(node, "_functions", list)()]


def _operations(function: Any) -> list[Any]:
    """Every operation in a function and in all it calls."""
    graph = function.graph.as_graph_def()
    return [*graph.node, *(op for body in graph.library.function for op in body.node_def)]
