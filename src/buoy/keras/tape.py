"""Micro-batches for a loop of one's own: the whole batch's gradient where `tf.GradientTape` runs out of memory.

The counterpart of `run.backward` in PyTorch; the optimizer's step stays in the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import keras
import tensorflow as tf

from buoy.flight import recorder
from buoy.keras import batch_norm, rehearsal
from buoy.keras.deferred import Deferred
from buoy.keras.few import few_of, most_of, trials_of
from buoy.keras.kind import AGAIN, Comparisons, kind_of, learning
from buoy.keras.memory import Memory, memory_of
from buoy.keras.micro_batches import Micro, Shape, loop, rows_of, shape_of
from buoy.keras.peak import too_big
from buoy.keras.probe import (
    Answer,
    Finding,
    Try,
    as_arrays,
    ask_later,
    gradient_arrays,
    probe,
    probe_many,
)
from buoy.keras.refusals import refuse_backend, refuse_replicas, refuse_stateful, refuse_uneven
from buoy.keras.retry import Retry
from buoy.keras.rounding import stretch
from buoy.keras.snapshot import Snapshot
from buoy.keras.states import States
from buoy.keras.train_step import refuse_own_writes
from buoy.microbatch.errors import BadLoss, OutOfMemory

LossFunction = Callable[[Any], Any]
_NO_WEIGHT = "buoy: the weight of the loss is not above 0"


def gradients(
    model: Any,
    loss_fn: LossFunction,
    *,
    reduction: str = "mean",
    micro_batch: int | None = None,
    inexact: tuple[str, ...] = (),
) -> Gradients:
    """A function from a batch to (loss, gradients of `model.trainable_variables`) that survives running out of memory.

    `loss_fn(batch)` gives the loss of the samples it is handed: a mean or a sum over them, or (sum, weight) for a mean
    over tokens. Make it once, outside the loop: it is compiled.

    >>> step = gradients(model, lambda batch: loss(batch[1], model(batch[0], training=True)))  # doctest: +SKIP
    >>> for batch in dataset:  # doctest: +SKIP
    ...     value, found = step(batch)
    ...     optimizer.apply_gradients(zip(found, model.trainable_variables))
    """
    if reduction not in ("mean", "sum"):
        raise BadLoss(
            "unknown reduction", received=repr(reduction), expected='"mean" or "sum"',
            hint="for a mean over tokens return (sum of the losses, number of tokens)",
        )  # fmt: skip
    refuse_backend("buoy.keras.gradients")
    # The model's own strategy is told by where its weights are; before it is built, by where we are.
    refuse_replicas(getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy())
    there = recorder.current()
    retry = Retry(_say, there.event if there is not None else lambda *args, **values: None, micro_batch)
    return Gradients(retry, _Step(model, loss_fn, reduction, inexact))


class Gradients:
    """What `gradients` makes: called with a batch. `buoy.keras.Loop.track(step=...)` keeps the sizes it has found."""

    def __init__(self, retry: Retry, step: _Step) -> None:
        self._retry, self._step = retry, step
        self.state_dict, self.load_state_dict = retry.state_dict, retry.load_state_dict
        self.keep, self.resume = retry.keep, retry.resume

    def __call__(self, batch: Any) -> tuple[Any, list[Any]]:
        """(loss, gradients) of the whole batch."""
        found: tuple[Any, list[Any]] = self._retry.run(self._step, batch)
        return found


class _Step:
    """The step that is repeated (retry.Step): it computes gradients, then writes BatchNorm statistics and seeds."""

    rehearses_whole = True

    def __init__(self, model: Any, loss_fn: LossFunction, reduction: str, inexact: tuple[str, ...]) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._inexact = inexact
        self._stage = tf.Variable(0, dtype=tf.int64, trainable=False, name="buoy_stage")
        self._begun = 0
        self._no_room = tf.constant([0, 4096], tf.int32)
        self._memory: Memory | None = None
        self._comparisons = Comparisons()
        self._many_seen = False
        self._states = States(model)
        self._written: list[Any] = []
        self._learning: Hashable = None
        self._trying = False
        """A comparison is traced."""
        self._forget()

    def _forget(self) -> None:
        """Everything that was traced for the weights that are trained."""
        self._whole = tf.function(self._compute_whole, reduce_retracing=True, autograph=False)
        self._shape: Shape | None = None
        self._rehearsal = rehearsal.Rehearsal()
        self._split: Any = None
        self._attempt: Try | None = None

    def run(self, data: Any, count: int, reserve: bool) -> Any:
        """(loss, gradients)"""
        del reserve  # nothing is allocated once writing begins
        self._build(data)
        if count == 1:
            result = self._whole(data, self._no_room)
        else:
            self.prepare(data)
            self._compare_later(data, count)
            result = self._split(data, self._no_room, tf.constant(count))
        self._begun += 2
        return result

    def memory(self, data: Any) -> Memory | None:
        """Of the model's device."""
        self._build(data)
        return self._memory

    def rehearse(self, data: Any, samples: int, split: bool, begin: rehearsal.Begin) -> None:
        """Compute the first samples and write nothing."""
        try:
            if split:
                self._rehearsal.split(self._compute_split, data, samples, begin)
            else:
                self._rehearsal.whole(self._compute_whole, data, samples, begin)
        except tf.errors.InvalidArgumentError:
            if self.reached() != 0:
                raise
        except BaseException:
            self.reached()
            raise

    def bound(self, data: Any) -> int | None:
        """What the whole batch can need at most, where every shape in its graph is known."""
        spec = rehearsal.exact(data)
        if spec is None:
            return None
        return rehearsal.bytes_at_most(self._whole.get_concrete_function(spec, rehearsal.ROOM))

    def results(self, data: Any, samples: int) -> int:
        """Bytes of all results in the graph of the uncut step on so many samples."""
        return rehearsal.results(self._compute_whole, data, samples)

    def compares(self, data: Any) -> bool:
        """Whether some result has more than one dimension of unknown length: that of the samples, twice."""
        return self._rehearsal.compares(self._compute_whole, data)

    def reached(self) -> int:
        """0 nothing is written, 2 writing had begun."""
        now = int(self._stage.numpy())
        reached, self._begun = now - self._begun, now
        return reached

    def explained(self, error: Exception) -> Exception:
        """The error in words, where it is the check inside the graph."""
        if isinstance(error, tf.errors.InvalidArgumentError) and _NO_WEIGHT in str(error):
            return BadLoss(
                "the loss of this batch has no weight",
                received="(sum, weight) with a weight of 0 or less",
                expected="a number above 0: of tokens, or of samples that are not ignored",
                hint="nothing of the step was done; leave out batches in which everything is ignored",
            )
        return error

    def snapshot(self) -> Snapshot:
        """Copies of what the forward pass writes."""
        return Snapshot(self._written)

    def too_big(self, text: str, what: str = "a single sample does") -> OutOfMemory:
        """The error when nothing is left to split."""
        return too_big(self._model, text, what)

    def prepare(self, data: Any) -> None:
        """Make sure that this model and loss may be split."""
        if self._split is not None:
            return
        refuse_stateful(self._model)
        refuse_uneven(data)
        few, *others = trials_of(data)
        self._look(few)
        assert self._shape is not None
        batch_norm.refuse(self._model, self._inexact, self._shape.carried)
        self._ask(few)
        for other in others:
            ask_later(lambda other=other: self._ask(other, again=True))  # type: ignore[misc]
        self._comparisons.made(kind_of(data, self._model))
        self._split = tf.function(self._compute_split, reduce_retracing=True, autograph=False)

    def _compare_later(self, data: Any, count: int) -> None:
        """Where this batch is of a kind that was not compared before, or not for long."""
        kind = kind_of(data, self._model)
        doubt, due = self._comparisons.doubt(kind), self._comparisons.due(kind)
        if due is None:
            return
        for number, few in enumerate(trials_of(data)):
            again = due == AGAIN or number > 0
            ask_later(lambda few=few, again=again: self._ask(few, again=again), doubt)  # type: ignore[misc]
        attempt = self._attempt
        if due == AGAIN and attempt is not None and not self._many_seen:
            self._many_seen = True
            ask_later(lambda: probe_many(attempt, most_of(data, count), self._model), doubt)

    def _look(self, few: Any) -> None:
        found: list[Shape] = []

        def look(part: Any) -> None:
            rows = rows_of(part)
            micro = self._micro(part, (), rows, rows)
            found.append(shape_of(micro, restarted=self._states.restarted(micro.scope.written.values())))

        tf.function(look, autograph=False).get_concrete_function(few)
        self._shape = found[0]

    def _ask(self, few: Any, *, again: bool = False) -> Finding:
        attempt = self._attempt = self._attempt or self._new_attempt()
        finding = probe(attempt, few, self._model, again=again)
        assert self._shape is not None
        written = self._states.among(self._shape.carried)
        if not self._states.learn([written[n] for n in sorted(finding.states)]):
            return finding
        self._look(few)
        self._attempt = None
        if self._split is not None:
            self._split = tf.function(self._compute_split, reduce_retracing=True, autograph=False)
        return self._ask(few, again=again)

    def _new_attempt(self) -> Try:
        shape = self._shape
        assert shape is not None
        states = self._states.among(shape.carried)

        def computed(data: Any, count: Any) -> Any:
            self._trying = True
            try:
                whole = loop(self._micro, data, count, shape, self._model.trainable_variables)
            finally:
                self._trying = False
            found = self._divided(whole.values, whole.gradients)[1]
            after = {id(variable): value for variable, value in whole.updates}
            dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
            return dense, [after[id(each)] for each in states]

        compiled = tf.function(computed, reduce_retracing=True, autograph=False)

        def attempt(data: Any, count: int, scalar: bool, added: bool) -> Answer:
            found, after = compiled(data, tf.constant(count))
            before = [variable.numpy() for variable in states]
            return Answer(gradient_arrays(found), [], list(zip(before, as_arrays(after), strict=True)))

        return attempt

    def _build(self, data: Any) -> None:
        if self._model.built and self._learning == learning(self._model):
            return
        if not self._model.built:
            self._loss_fn(few_of(data))
        elif self._learning is not None:  # frozen or thawed since: other weights have gradients
            self._forget()
        self._memory = memory_of(self._model)
        self._learning = learning(self._model)

    def _compute_whole(self, data: Any, room: Any) -> Any:
        rows = rows_of(data)
        micro = self._micro(data, (), rows, rows)
        values = _with_weight(micro.values)
        loss, found = self._divided(values, micro.gradients)
        return self._commit(loss, found, micro.scope.updates(), room)

    def _compute_split(self, data: Any, room: Any, count: Any) -> Any:
        assert self._shape is not None
        whole = loop(self._micro, data, count, self._shape, self._model.trainable_variables)
        loss, found = self._divided(_with_weight(whole.values), whole.gradients)
        return self._commit(loss, found, whole.updates, room)

    def _micro(self, part: Any, state: Iterable[Any], rows: Any, all_rows: Any) -> Micro:
        with Deferred(state) as scope:
            with tf.GradientTape() as tape:
                made = self._loss_fn(part)
                loss, weight = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
                loss = _checked(loss)
                if weight is None and self._reduction == "mean":
                    loss *= tf.cast(rows, loss.dtype) / tf.cast(all_rows, loss.dtype)
                if self._trying:
                    loss *= tf.cast(stretch(), loss.dtype)
            refuse_own_writes(self._model.trainable_variables, scope.updates())
            found = tape.gradient(loss, self._model.trainable_variables)
        values = [loss] if weight is None else [loss, tf.cast(weight, loss.dtype)]
        return Micro(found, values, [rows], [], scope)

    def _divided(self, values: list[Any], found: list[Any]) -> tuple[Any, list[Any]]:
        if len(values) == 1:
            return values[0], found
        total, weight = values
        return total / weight, [None if g is None else _over(g, weight) for g in found]

    def _commit(self, loss: Any, found: list[Any], updates: list[tuple[Any, Any]], room: Any) -> Any:
        refuse_own_writes(self._model.trainable_variables, updates)
        self._written = [variable for variable, _ in updates]
        computed = [g.values if isinstance(g, tf.IndexedSlices) else g for g in found if g is not None]
        with tf.control_dependencies([loss, *computed, *(value for _, value in updates)]):
            granted = tf.raw_ops.Empty(shape=room, dtype=tf.uint8)  # of nothing, unless it is a rehearsal
        with tf.control_dependencies([granted]):
            begun = self._stage.assign_add(2, read_value=False)
        with tf.control_dependencies([begun]):
            for variable, value in updates:
                variable.assign(value)
        return loss, found


def _checked(loss: Any) -> Any:
    value = tf.convert_to_tensor(loss) if keras.ops.is_tensor(loss) else None
    if value is None or value.shape.rank != 0 or not value.dtype.is_floating:
        received = (
            f"{type(loss).__name__}: {loss!r}"
            if value is None
            else f"shape {value.shape}, {value.dtype.name}"
        )
        raise BadLoss(
            "the loss function gave no loss", received=received[:200], expected="a scalar tensor, or (sum, weight)",
            hint="keras.ops.mean(...) of the losses of the samples",
        )  # fmt: skip
    return value


def _with_weight(values: list[Any]) -> list[Any]:
    """Checked for the whole batch: a part of it may well have no weight."""
    if len(values) == 1:
        return values
    total, weight = values
    with tf.control_dependencies([tf.debugging.assert_positive(weight, message=_NO_WEIGHT)]):
        return [tf.identity(total), tf.identity(weight)]


def _over(gradient: Any, weight: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(weight, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(weight, gradient.dtype)


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"buoy: {text}\n")
    except (OSError, AttributeError):
        pass  # stderr is closed
