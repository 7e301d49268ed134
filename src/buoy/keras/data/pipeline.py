"""tf.data pipelines: opened at a position by drawing the seeds that were drawn before, then reading again. And what can
be read of a pipeline, or of a traced training step, without running it.

What a pass of a pipeline yields depends on three things, measured with TensorFlow 2.21:
- `shuffle` draws the seeds of a pass when its iterator is *made*, which for one above another shuffle is when the
  first element is read. All iterators of a shuffle draw from one source: making one of the shuffle alone, and not
  reading it, is enough to have the next pass in its own order.
- random ops in a `map` (`tf.random.uniform`) start over with every iterator.
- RNGs kept in variables (`tf.random.Generator`, the seed of a Keras layer) continue from pass to pass: their
  values at the beginning of the pass are kept in the checkpoint.
In a parallel `map` the last two are drawn in the order of the threads: nobody can repeat that.

In a training step `tf.random.normal` and its like keep their RNG inside the operation, where nobody can reach it;
a Keras layer keeps its own in a variable. A step that runs eagerly draws its seeds in Python, and those are saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from buoy._compat.tensorflow import (
    functions_of,
    graphs_of,
    inputs_of,
    is_reshuffling,
    is_unordered,
    reads_pipelines,
    repeats_of,
    watch_iterators,
)
from buoy._compat.tensorflow import seeds_of as node_seeds
from buoy.keras.data.loader import APPROXIMATE, SAME_DATA, Exactness, Feed, Say
from buoy.keras.data.replay import Replay, skip

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
    if not reads_pipelines():
        return Exactness(
            APPROXIMATE,
            f"TensorFlow {tf.__version__} hides how pipelines are built: buoy cannot tell whether this one shuffles",
            "another version of TensorFlow, or a keras.utils.PyDataset",
        )
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
    if any(is_cache(node) and any(map(node_seeds, nodes_of(node))) for node in nodes):
        return Exactness(
            APPROXIMATE,
            "the pipeline caches what it has shuffled: a new process shuffles the cache again",
            "put .cache() before .shuffle()",
        )
    if dataset.options().deterministic is False or any(map(is_unordered, nodes)):
        return Exactness(
            APPROXIMATE,
            "the pipeline may give its elements in any order (deterministic=False)",
            "leave out deterministic=False",
        )
    for node in nodes:
        for function in functions_of(node):
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
    if node_seeds(node) is not None:
        known = found.setdefault(id(node), Shuffle(node, 0, late))
        known.late = known.late and late
        known.times = None if times is None or known.times is None else known.times + times
    kind = type(node).__name__
    if "Repeat" in kind:
        count = repeats_of(node)
        if cut:
            times = None
        elif count >= 0 and times is not None:
            times *= count  # an endless repetition is one pass for good
    elif "Concatenate" in kind and cut:
        times = None
    late = late or not kind.strip("_").startswith(_MAKE_INPUTS_AT_ONCE)
    for above in inputs_of(node):
        _visit(above, times, late, cut or "Take" in kind, found)


def seeds_of(dataset: Any) -> list[list[int]]:
    """The seeds of every shuffle and random source, in the order of the pipeline."""
    return [seeds for node in nodes_of(dataset) if (seeds := node_seeds(node)) is not None]


def variables_of(dataset: Any) -> list[Any]:
    """Variables that the pipeline's functions draw from, each once."""
    found: dict[int, Any] = {}
    for node in nodes_of(dataset):
        for function in functions_of(node):
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
            "in the same order, with different augmentation",
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
            "order, with different augmentation",
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
        waiting += inputs_of(node)


def is_cache(node: Any) -> bool:
    """Whether it keeps what its first pass gave."""
    return type(node).__name__ == "CacheDataset"


def _shuffles_inside_unseeded(node: Any) -> bool:
    """A shuffle inside `interleave` or `flat_map`."""
    for function in functions_of(node):
        operations = _operations(function)
        constants = {op.name: op for op in operations if op.op == "Const"}
        for op in operations:
            if op.op.startswith(_RANDOM_DATASETS):
                seeds = [constants.get(name.partition(":")[0]) for name in op.input[-3:]]
                values = [tf.make_ndarray(seed.attr["value"].tensor) for seed in seeds if seed is not None]
                if values and not any(value.any() for value in values):
                    return True
    return False


def _operations(function: Any) -> list[Any]:
    """Every operation in a function and in all it calls."""
    graph = function.graph.as_graph_def()
    return [*graph.node, *(op for body in graph.library.function for op in body.node_def)]


_own = threading.local()


@contextmanager
def ours() -> Iterator[None]:
    """Iterators made within it are counted elsewhere."""
    _own.depth = getattr(_own, "depth", 0) + 1
    try:
        yield
    finally:
        _own.depth -= 1


@contextmanager
def watch(shuffles: Sequence[Any], warn: Callable[[], bool]) -> Iterator[None]:
    """Within it, call `warn` when anybody else makes an iterator through one of these shuffles, until it says True."""
    waiting, ids = bool(shuffles), {id(node) for node in shuffles}

    def made(dataset: Any) -> None:
        nonlocal waiting
        if waiting and not getattr(_own, "depth", 0) and any(id(node) in ids for node in nodes_of(dataset)):
            waiting = not warn()

    end = watch_iterators(made)
    try:
        yield
    finally:
        waiting = False
        end()


_walked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Passes that guarded trainings of this process made: a further one over the same pipeline finds their seeds drawn."""


class PipelineFeed(Feed):
    """A tf.data.Dataset, walked pass by pass."""

    def __init__(self, dataset: Any, batches: int | None, say: Say) -> None:
        self.dataset = dataset
        self.batches = batches
        self.exactness = examine(dataset)
        self._say = say
        self._shuffles = shuffles_of(dataset)
        # The shuffle draws, whatever Keras or a cell makes of it anew (`class_weight`, `.batch(32)`).
        self._drawn_by = self._shuffles[0].node if self._shuffles else dataset
        self._before = _walked.get(self._drawn_by, 0)
        """Passes that other trainings had made of it when this one began; a new process may find them not made."""
        self._seeds = seeds_of(dataset)
        self._variables = variables_of(dataset)
        self._begun: list[Any] = []
        self._stored: list[Any] = []
        self._was_opened = False

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """The iterator of this pass, after reading `offset` batches of it."""
        # A strategy over several devices opens it twice.
        if not self._was_opened and _walked.get(self._drawn_by, 0) > self._before + number:
            self._warn_of_another_order(offset)
        self._was_opened = True
        self._pass_by(number)
        _walked[self._drawn_by] = self._before + number + 1
        self._begun = [variable.numpy() for variable in self._variables]
        with ours():
            iterator = iter(dataset)
        if offset:
            with Replay(offset, "the input pipeline", self._say):
                skip(iterator, offset)
        return iterator

    def warn_of_others(self) -> AbstractContextManager[None]:
        """By every iterator that anybody makes of it."""
        moving = [each.node for each in self._shuffles if is_reshuffling(each.node)]
        return watch(moving, self._read_by_another)

    def _read_by_another(self) -> bool:
        if not self._was_opened:
            return False  # before the first batch: every start comes by there
        self.exactness = Exactness(
            APPROXIMATE,
            "something other than the training, such as a callback, reads the shuffled training data too, which "
            "changes the order of later epochs; a resume does not repeat that",
            "give the callback a dataset of its own, not made from the one that is trained on",
        )
        self._say(f"not bit for bit after a resume: {self.exactness.reason}; hint: {self.exactness.hint}")
        return True

    def _warn_of_another_order(self, offset: int) -> None:
        """A notebook's cell that was stopped is run again: what a shuffle has drawn, it does not draw once more."""
        if any(is_reshuffling(shuffle.node) for shuffle in self._shuffles):
            what = ": some samples of this epoch come twice and some not at all" if offset else ""
            self._say(
                "not bit for bit: the pipeline was shuffled for this epoch already, in an earlier fit, and continues "
                f"in another order{what}; hint: make the dataset in the cell that trains, before `fit`"
            )

    def close(self, epoch: int, number: int, offset: int) -> None:
        """What comes after this training finds the pipeline as it left it."""
        self._pass_by(number + bool(offset))

    def _pass_by(self, number: int) -> None:
        """To where pass `number` begins: the seeds of those before are drawn, variables are as they were."""
        passed = self._before + number - _walked.get(self._drawn_by, 0)
        with ours():
            for shuffle in self._shuffles:
                shuffle.advance(made=max(0, passed), read=max(0, passed))
        _walked[self._drawn_by] = self._before + number
        for variable, value in zip(self._variables, self._stored, strict=False):
            variable.assign(value)
        self._stored = []

    def state(self, offset: int) -> dict[str, Any]:
        """The seeds, to compare; and what RNGs in variables were worth when this pass began."""
        values = self._begun if offset else [variable.numpy() for variable in self._variables]
        return {"seeds": self._seeds, "variables": values, "before": self._before}

    def load(self, state: dict[str, Any]) -> None:
        """Take over the values at the beginning of the pass; other seeds mean another order."""
        self._stored = list(state["variables"])
        self._before = state.get("before", 0)
        if state["seeds"] != self._seeds and self.exactness.grade != APPROXIMATE:
            self.exactness = Exactness(
                APPROXIMATE,
                "the pipeline shuffles with different seeds than in the last attempt",
                "call keras.utils.set_random_seed(...) before the pipeline is made, and change nothing above it",
            )


_HIDDEN = ("RandomUniform", "RandomStandardNormal", "RandomGamma", "RandomPoisson", "RandomShuffle",
           "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")  # fmt: skip


def hidden_draws(functions: Iterable[Any]) -> list[str]:
    """The names of such operations in what these `tf.function`s were traced to; sorted, each once."""
    graphs = (graph for function in functions for graph in graphs_of(function))
    return sorted({name for graph in graphs for name in hidden_operations(graph)})


def hidden_operations(concrete: Any, more: tuple[str, ...] = ()) -> set[str]:
    """Operations of one graph, and of those inside it, that keep an RNG; and others that are asked for."""
    return {op.op for op in _operations(concrete) if op.op.startswith((*_HIDDEN, *more))}
