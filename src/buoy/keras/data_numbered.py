"""A PyDataset whose batches are functions of the seed and their number, whoever makes them, and when."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy

from buoy.keras import rng
from buoy.keras.data import SAME_DATA, Exactness, Say
from buoy.keras.epochs import teach_epochs
from buoy.keras.foreign_reads import by_data


class Numbered(keras.utils.PyDataset):  # type: ignore[misc]
    """Somebody's PyDataset from a position on; batch `i` is the same whoever makes it, and when."""

    def __init__(self, inner: Any, shuffle: bool, seed: int, say: Say) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.epoch = -1
        self._inner = inner
        self._shuffle = shuffle
        self._seed = seed
        self._place: tuple[int, int, Any] = (0, 0, None)
        self.run = os.urandom(8).hex()
        """Whose hooks were called; goes on with the run."""
        self.at(0, 0)
        self._drawn: list[Any] = []
        """Keras's seed generators that a batch was seen to draw from."""
        draws, hidden = self._look()
        self.exactness = _hidden(inner) if hidden else Exactness()
        threads = inner.workers > 1 and not inner.use_multiprocessing
        # Seeding what nobody draws from would only keep the threads waiting for each other.
        self._seeds = not threads or draws
        if threads and self._seeds:
            say(
                f"{type(inner).__name__} draws from a random state which its {inner.workers} threads share: "
                "its batches are made one at a time; use_multiprocessing=True makes them in parallel"
            )

    @property
    def position(self) -> tuple[int, int]:
        """The pass, and the batches of it that were used when it was opened."""
        return self._place[:2]

    def at(self, number: int, offset: int) -> None:
        """Begin pass `number` after `offset` batches; in one assignment, since workers may be looking."""
        order = None
        total = self._inner.num_batches
        if total is not None and self._shuffle:
            order = numpy.arange(total)
            numpy.random.RandomState(rng.number(self._seed, "order", number)).shuffle(order)
        self._place = number, offset, order

    @property
    def num_batches(self) -> int | None:
        """What is left of this pass."""
        total = self._inner.num_batches
        return None if total is None else max(0, total - self._place[1])

    def __getitem__(self, place: int) -> Any:
        number, offset, order = self._place
        index = place + offset if order is None else int(order[place + offset])
        if not self._seeds:
            with by_data():
                return self._inner[index]
        with self._seeded("batch", number, index), by_data():
            if hasattr(self._inner, "total_batches_seen"):
                # ImageDataGenerator's flows seed themselves anew for each batch, from the batches they have made.
                self._inner.total_batches_seen = number * (self._inner.num_batches or 0) + place + offset
            return self._inner[index]

    def on_epoch_begin(self) -> None:
        """As the dataset has it."""
        self.epoch_hook("on_epoch_begin", self.epoch)

    def on_epoch_end(self) -> None:
        """As the dataset has it."""
        self.epoch_hook("on_epoch_end", self.epoch)

    def epoch_hook(self, name: str, epoch: int) -> None:
        """The dataset's own hook; what it shuffles is a function of the seed and the epoch.

        Once for each epoch of a run: a further `fit` may be given the same object, or one that was made anew.
        """
        called = vars(self._inner).setdefault("_buoy_called", set())
        if (self.run, name, epoch) in called:
            return
        called.add((self.run, name, epoch))
        with self._seeded(name, epoch), by_data():
            getattr(self._inner, name, _nothing)()

    @contextmanager
    def _seeded(self, *what: object) -> Iterator[None]:
        """The global generators and those that the dataset draws from begin at the seed of this, inside only."""
        seed = rng.number(self._seed, *what)
        with rng.seeded(seed), ExitStack() as after:
            for place, generator in enumerate(self._generators()):
                after.callback(rng.set_generator_state, generator, rng.generator_state(generator))
                rng.seed_generator(generator, rng.number(seed, place))
            yield

    def _look(self) -> tuple[bool, bool]:
        """Makes a batch: (does that draw from a generator that can be set, from one of TensorFlow that cannot).

        Keras's seed generators are known by their use: a layer that augments may be kept anywhere.
        """
        used: list[Any] = []
        hidden: list[Any] = []
        with rng.seeded(self._seed & 0xFFFFFFFF), _noting_draws(used, hidden):
            before = self._states()
            self._inner[0]
            moved = before != self._states()
        self._drawn = used
        return moved or bool(used or hidden), bool(hidden)

    def _states(self) -> str:
        torch = sys.modules.get("torch")
        states: list[Any] = [random.getstate(), numpy.random.get_state()]
        states += [torch.get_rng_state().tolist()] if torch is not None else []
        with numpy.printoptions(threshold=sys.maxsize):
            return repr([*states, *map(rng.generator_state, self._generators())])

    def _generators(self) -> list[Any]:
        """Looked for each time: a dataset may make one with its first batch, or anew with every epoch."""
        return list({id(each): each for each in [*_generators_in(self._inner), *self._drawn]}.values())


class NumberedValidation:
    """A PyDataset to validate on: each evaluation is a pass, also after a resume."""

    def __init__(self, dataset: Any, seed: int, say: Say) -> None:
        teach_epochs()
        self.dataset = _Evaluated(dataset, False, rng.number(seed, "validation"), say)

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"run": self.dataset.run, **self.dataset.calls}

    def catch_up(self, state: dict[str, Any], *, is_live: bool = False) -> None:
        """The hooks that the attempts before have called are called again: they may have moved things around."""
        self.dataset.run = state["run"]
        self.dataset.catch_up({name: state[name] for name in self.dataset.calls})

    def forget(self) -> None:
        """Nothing to do."""


class _Evaluated(Numbered):
    """Counts its own passes, since Keras evaluates whenever it wants to."""

    is_buoys = True

    def __init__(self, *arguments: Any) -> None:
        self.calls = {"evaluations": 0, "on_epoch_begin": 0, "on_epoch_end": 0}
        super().__init__(*arguments)

    def begin_evaluation(self) -> None:
        """An evaluation begins; before the workers start, which take their copy of it."""
        self.at(self.calls["evaluations"], 0)
        self.calls["evaluations"] += 1

    def epoch_hook(self, name: str, epoch: int) -> None:
        """Each call has a seed of its own: Keras calls a hook twice between two evaluations."""
        super().epoch_hook(name, self.calls[name])
        self.calls[name] += 1

    def catch_up(self, calls: dict[str, int]) -> None:
        """Up to these numbers of calls."""
        for name in ("on_epoch_begin", "on_epoch_end"):
            while self.calls[name] < calls[name]:
                self.epoch_hook(name, -1)
        self.calls = dict(calls)


def _generators_in(dataset: Any) -> list[Any]:
    """Those that it keeps as attributes (`self.rng = numpy.random.default_rng()`), and its layers' that augment."""
    found: list[Any] = []
    for value in list(vars(dataset).values()):
        # A layer with weights may be the model that is trained: its generators are not the data's.
        is_layer = isinstance(value, keras.layers.Layer) and not value.weights
        layers: Any = getattr(value, "_flatten_layers", list)() if is_layer else ()
        inside = [each for layer in layers for each in vars(layer).values()]
        found += [each for each in [value, *inside] if rng.generator_state(each) is not None]
    return found


def _hidden(dataset: Any) -> Exactness:
    return Exactness(
        SAME_DATA,
        f"{type(dataset).__name__} draws with tf.random or tf.image.random, from generators of TensorFlow that "
        "cannot be set: the same samples in the same order, with other random numbers",
        "draw with numpy.random, or with tf.random.stateless_* and a seed from numpy.random",
    )


@contextmanager
def _noting_draws(used: list[Any], hidden: list[Any]) -> Iterator[None]:
    """Keras's seed generators that are drawn from, and the draws of TensorFlow's operations that keep a state."""
    from tensorflow.python.framework import random_seed

    next_seed, get_seed = keras.random.SeedGenerator.next, random_seed.get_seed

    def noting_next(self: Any, *arguments: Any, **options: Any) -> Any:
        used.append(self)
        return next_seed(self, *arguments, **options)

    def noting_get(op_seed: Any) -> Any:
        hidden.append(op_seed)
        return get_seed(op_seed)

    keras.random.SeedGenerator.next, random_seed.get_seed = noting_next, noting_get
    try:
        yield
    finally:
        keras.random.SeedGenerator.next, random_seed.get_seed = next_seed, get_seed


def _nothing() -> None:
    """The hook of a dataset that has none."""
