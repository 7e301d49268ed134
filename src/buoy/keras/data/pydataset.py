"""A PyDataset from a position on: each batch is a function of the seed and its number, whoever makes it, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy

from buoy._compat.keras import layers_in, pydataset_adapter
from buoy.keras.data import rng
from buoy.keras.data.epochs import teach_epochs
from buoy.keras.data.loader import SAME_DATA, Exactness, Feed, Say
from buoy.keras.data.replay import fingerprint


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
        """Whose hooks were called; stays with the run."""
        self.at(0, 0)
        draws, hidden = self._look()
        self.exactness = _hidden(inner) if hidden else Exactness()
        threads = inner.workers > 1 and not inner.use_multiprocessing
        # Seeding what nobody draws from would only keep the threads waiting for each other.
        self._seeds = not threads or draws
        if threads and self._seeds:
            say(
                f"{type(inner).__name__} draws from an RNG that its {inner.workers} threads share: "
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
            return self._inner[index]
        with self._seeded("batch", number, index):
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
        with self._seeded(name, epoch):
            getattr(self._inner, name, _nothing)()

    @contextmanager
    def _seeded(self, *what: object) -> Iterator[None]:
        """The global RNGs and those that the dataset draws from begin at the seed of this, inside only."""
        seed = rng.number(self._seed, *what)
        with rng.seeded(seed), ExitStack() as after:
            for place, generator in enumerate(self._generators()):
                after.callback(rng.set_generator_state, generator, rng.generator_state(generator))
                rng.seed_generator(generator, rng.number(seed, place))
            yield

    def _look(self) -> tuple[bool, bool]:
        """Makes one batch two or three times: (does its seed matter, is there more that matters)."""
        one, other = self._made(1), self._made(2)
        return one != other, one != other and self._made(2) != other

    def _made(self, seed: int) -> int:
        with self._seeded("look", seed):
            return fingerprint(self._inner[0], 0)

    def _generators(self) -> list[Any]:
        """Looked for each time: a dataset may make one with its first batch, or anew with every epoch."""
        return list({id(each): each for each in _generators_in(self._inner)}.values())


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
        # A layer with weights may be the model that is trained: its RNGs are not the data's.
        is_layer = isinstance(value, keras.layers.Layer) and not value.weights
        inside = [each for layer in layers_in(value) for each in vars(layer).values()] if is_layer else []
        found += [each for each in [value, *inside] if rng.generator_state(each) is not None]
    return found


def _hidden(dataset: Any) -> Exactness:
    return Exactness(
        SAME_DATA,
        f"{type(dataset).__name__} gives a different batch for the same number and seed: it draws with "
        "tf.random, or from an RNG that it does not keep as an attribute",
        "draw with numpy.random, or with tf.random.stateless_* and a seed from numpy.random; keep RNGs and layers that "
        "augment as attributes of the dataset",
    )


def _nothing() -> None:
    """The hook of a dataset that has none."""


class PyDatasetFeed(Feed):
    """A PyDataset in an order of our own, each batch made under its own seed, with the workers it asks for."""

    def __init__(self, dataset: Any, class_weight: Any, shuffle: bool, seed: int, say: Say) -> None:
        self._numbered = Numbered(dataset, shuffle, seed, say)
        self._adapter = pydataset_adapter(self._numbered, class_weight)
        self._first: int | None = None
        self._next = 0
        self._begun = False
        self.batches: int | None = dataset.num_batches
        self.exactness = self._numbered.exactness
        self.dataset = self._adapter.get_tf_dataset()

    def open(self, dataset: Any, number: int, offset: int) -> Any:
        """Batches are asked for by number: nothing before the offset is made again."""
        if self._numbered.position != (number, offset):
            self._numbered.at(number, offset)
        return iter(dataset)

    def epoch_begins(self, epoch: int, number: int, offset: int) -> None:
        """The hooks of earlier epochs are called again in a new process: they may have moved things around."""
        if self._first is None:
            self._first = self._next = epoch
        self._pass_by(epoch)
        self._numbered.epoch = epoch
        if number != self._numbered.position[0] or not self._begun:
            self._begun = True
            self._numbered.at(number, offset)  # before the workers start: they take their copy of it
        self._adapter.on_epoch_begin()

    def close(self, epoch: int, number: int, offset: int) -> None:
        """What comes after this training finds the dataset as it left it; Keras ends an epoch before the first."""
        self._numbered.epoch_hook("on_epoch_end", -1)
        self._pass_by(epoch)

    def _pass_by(self, epoch: int) -> None:
        while self._next < epoch:
            self._numbered.epoch_hook("on_epoch_begin", self._next)
            self._numbered.epoch_hook("on_epoch_end", self._next)
            self._next += 1

    def epoch_ends(self, epoch: int) -> None:
        """Stops the workers, then the dataset's own hook."""
        self._numbered.epoch = epoch
        self._adapter.on_epoch_end()
        self._next = max(self._next, epoch + 1)

    def state(self, offset: int) -> dict[str, Any]:
        """The epoch this run began with, and what it is known by."""
        return {"first": self._first, "run": self._numbered.run}

    def load(self, state: dict[str, Any]) -> None:
        """Begin calling the hooks where the run began."""
        self._first = self._next = int(state["first"] or 0)
        self._numbered.run = state.get("run", self._numbered.run)
