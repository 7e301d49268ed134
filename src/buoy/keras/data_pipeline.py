"""tf.data pipelines: opened at a position by making the iterators that were made before, then reading again.

What a pass of a pipeline yields depends on three things, measured with TensorFlow 2.21:
- `shuffle` draws the seeds of a pass when the iterator is *made*: making one and not reading it is enough to
  have the next pass in its own order.
- random ops in a `map` (`tf.random.uniform`) begin anew with every iterator.
- generators kept in variables (`tf.random.Generator`, the seed of a Keras layer) go on from pass to pass: their
  values at the beginning of the pass are kept in the checkpoint.
In a parallel `map` the last two are drawn in the order of the threads: nobody can repeat that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from buoy.keras.data import APPROXIMATE, SAME_DATA, Exactness, Replay, Say

_RANDOM_OPS = (
    "Random", "Multinomial", "StatelessRandomGetKeyCounter", "TruncatedNormal", "ParameterizedTruncatedNormal",
)  # fmt: skip
_DRAWS_FROM_VARIABLE = ("RngReadAndSkip", "RngSkip", "AssignVariableOp", "AssignAddVariableOp")
_PYTHON_OPS = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


class PipelineFeed:
    """A tf.data.Dataset, walked pass by pass."""

    def __init__(self, dataset: Any, batches: int | None, say: Say) -> None:
        self.dataset = dataset
        self.batches = batches
        self.exactness = examine(dataset)
        self._say = say
        self._made = 0
        self._seeds = [_seeds_of(node) for node in _nodes(dataset) if _shuffles(node)]
        self._variables = _variables_of(dataset)
        self._begun: list[Any] = []
        self._stored: list[Any] = []

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """The iterator of this pass, after reading `offset` batches of it."""
        while self._made < number:
            iter(dataset)  # unread: it only moves the seeds of every shuffle on
            self._made += 1
        self._made = number + 1
        for variable, value in zip(self._variables, self._stored, strict=False):
            variable.assign(value)
        self._stored = []
        self._begun = [variable.numpy() for variable in self._variables]
        iterator = iter(dataset)
        if offset:
            with Replay(offset, "the input pipeline", self._say):
                skip(iterator, offset)
        return iterator

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """Nothing to do."""

    def epoch_ends(self, epoch: int) -> None:
        """Nothing to do."""

    def state(self, offset: int) -> dict[str, Any]:
        """The seeds, to compare; and what generators in variables were worth when this pass began."""
        values = self._begun if offset else [variable.numpy() for variable in self._variables]
        return {"seeds": self._seeds, "variables": values}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the values at the beginning of the pass; other seeds mean another order."""
        self._stored = list(state["variables"])
        if state["seeds"] != self._seeds and self.exactness.grade != APPROXIMATE:
            self.exactness = Exactness(
                APPROXIMATE,
                "the pipeline shuffles with other seeds than the attempt before",
                "call keras.utils.set_random_seed(...) before the pipeline is made, and change nothing above it",
            )


def examine(dataset: Any) -> Exactness:
    """How exactly this pipeline repeats itself, from what can be read of it without running it."""
    nodes = list(_nodes(dataset))
    shuffled = [node for node in nodes if _shuffles(node)]
    if any(seeds == [0, 0] for seeds in map(_seeds_of, shuffled)):
        return Exactness(
            APPROXIMATE,
            "the pipeline shuffles without a seed: after a resume some samples of the epoch come twice or never",
            "call keras.utils.set_random_seed(...) before the pipeline is made, or give shuffle(seed=...)",
        )
    if any(_is_cache(node) and any(map(_shuffles, _nodes(node))) for node in nodes):
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
        for ops in map(_operations, _functions(node)):
            random = [op for op in ops if op.startswith(_RANDOM_OPS) or op in _DRAWS_FROM_VARIABLE]
            if random and "Parallel" in type(node).__name__:
                return Exactness(
                    SAME_DATA,
                    f"a parallel map draws random numbers ({random[0]}) in the order of its threads: the same "
                    "samples in the same order, with other augmentation",
                    "use tf.random.stateless_* with a seed from the sample, augment in the model, or leave out "
                    "num_parallel_calls",
                )
            if any(op in _PYTHON_OPS for op in ops):
                return Exactness(
                    SAME_DATA,
                    "the pipeline calls Python functions, whose random state buoy cannot see",
                    "use a keras.utils.PyDataset: its batches are seeded one by one",
                )
    return Exactness()


@tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
def _skip_in_graph(iterator: Any, count: Any) -> None:
    for _ in tf.range(count):
        iterator.get_next()


def skip(iterator: Any, count: int) -> None:
    """Read so many batches and drop them; fewer when there are fewer."""
    try:
        if isinstance(iterator, tf.data.Iterator):
            _skip_in_graph(iterator, tf.constant(count))
        else:
            for _ in range(count):
                iterator.get_next()
    except tf.errors.OutOfRangeError:
        pass  # fewer batches than before: the training loop will see the end itself


def _nodes(dataset: Any) -> Iterator[Any]:
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


def _shuffles(node: Any) -> bool:
    return hasattr(node, "_seed") and hasattr(node, "_seed2")


def _seeds_of(node: Any) -> list[int]:
    return [int(node._seed), int(node._seed2)]


def _is_cache(node: Any) -> bool:
    return type(node).__name__ == "CacheDataset"


def _out_of_order(node: Any) -> bool:
    return getattr(node, "_deterministic", None) == "false"


def _functions(node: Any) -> list[Any]:
    return [wrapper.function for wrapper in getattr(node, "_functions", list)()]


def _operations(function: Any) -> list[str]:
    """The kinds of stateful operations in a function and all it calls."""
    graph = function.graph
    found = [op.type for op in graph.get_operations() if op.op_def is not None and op.op_def.is_stateful]
    library = graph.as_graph_def().library.function
    return found + [node.op for body in library for node in body.node_def]


def _variables_of(dataset: Any) -> list[Any]:
    """Variables that the pipeline's functions draw from, each once."""
    found: dict[int, Any] = {}
    for node in _nodes(dataset):
        for function in _functions(node):
            if any(op in _DRAWS_FROM_VARIABLE for op in _operations(function)):
                for variable in function.graph.variables:
                    found.setdefault(id(variable), variable)
    return list(found.values())
