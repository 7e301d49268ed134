"""A training step of `model.fit` that happens whole, with the batch that was asked for, or has not happened.

A step repeated until it went through: smaller each time it runs out of memory, rolled back where it had begun to write.
"""

from __future__ import annotations

import traceback
from math import prod
from typing import Any

import keras

from buoy._compat.keras import why_not
from buoy.keras.step.compiled import CompiledStep
from buoy.keras.step.gradient import HoldsNotBack
from buoy.keras.step.refusals import refuse_backend, refuse_replicas, too_big
from buoy.keras.step.sizes import Event, Say, Sizes, count
from buoy.keras.step.snapshot import Snapshot
from buoy.keras.step.train_step import FitStep
from buoy.microbatch.errors import BadBatch, CannotSplit, OutOfMemory, StepError, TornStep, is_oom
from buoy.microbatch.sizing import SizeLog

_CAREFUL_STEPS = 64
"""For so many steps after the reserve was refused, copies are made before the optimizer's update."""
_UPDATE_TRIES = 3


class Retry:
    """Decides sizes and repeats; what it learns is kept with the checkpoint."""

    def __init__(self, say: Say, event: Event, micro_batch: int | None) -> None:
        self._say = say
        self._event = event
        self._sizes = Sizes(say, event, micro_batch)
        self._careful = 0
        self._log = SizeLog(None)
        self.steps = 0
        """Steps that went through."""
        self.retries = 0

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Every change of size so far, for `replay`."""
        return self._sizes.entries

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues with."""
        return {**self._sizes.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizes.load_state_dict(state)
        self.steps = int(state["steps"])

    def replay(self, sizes: list[dict[str, Any]], done: int = 0) -> None:
        """Use these micro-batches from these steps on, as an earlier attempt did in so many steps."""
        self._sizes.replay(sizes, self.steps, done)

    def log_to(self, path: str, *, start_over: bool) -> None:
        """Log every step there; `start_over`: what an attempt before this one did is not repeated."""
        self._log = SizeLog(path)
        if start_over:
            self._log.clear()

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; the log knows of steps that were made after it and lost."""
        self.load_state_dict(saved)
        self.replay(*self._log.read())

    def run(self, step: CompiledStep, data: Any) -> Any:
        """Do the step on this batch, as often and in as many micro-batches as it takes."""
        rows, each = _measure(data)
        size = self._sizes.choose(step, self.steps, data, rows, each)
        tries, again = 0, True
        while True:
            failure, logs = self._try(step, data, rows, size)
            if failure is None:
                break
            where, text = failure
            tries += where == "update"
            if where == "gradients" and size == 1 and again:
                again = False  # what the failed try held is free now: once more
            elif where == "gradients":
                smaller = self._smaller(step, data, rows, each, size, text)
                self._report(rows, size, smaller, text)
                size = smaller
            elif tries > _UPDATE_TRIES:
                raise OutOfMemory(
                    "the optimizer's update does not fit into memory, whatever the micro-batch",
                    received=text,
                    expected="room for the update's temporaries besides weights, gradients and optimizer state",
                    hint="`buoy plan` lists optimizers that hold less; nothing of this step was done",
                )
            else:
                self._careful = _CAREFUL_STEPS
                self.retries += 1
                self._event("retry", what="optimizer step", step=self.steps, error=text)
                self._say("out of memory in the optimizer's update; rolled back and retried")
        self._done(rows, each, size)
        return logs

    def _try(self, step: CompiledStep, data: Any, rows: int, size: int) -> tuple[tuple[str, str] | None, Any]:
        undo = None
        try:
            if self._careful:
                undo = step.snapshot()
            reserve = not self._careful
            return None, step.run(data, count(rows, size), reserve)
        except Exception as error:
            failed: BaseException = error
            if not is_oom(error):
                self._check_torn(step.reached(), undo)
                explained = step.explained(error)
                if explained is error:
                    raise
                raise explained from error
            text = _first_line(error)
        # Outside `except`: only now are the frames, and the tensors in them, gone.
        traceback.clear_frames(failed.__traceback__)
        del failed
        reached = step.reached()
        if reached == 2:
            self._check_torn(reached, undo)
        return ("gradients" if reached == 0 else "update", text), None

    def _check_torn(self, reached: int, undo: Snapshot | None) -> None:
        if reached < 2:
            return
        if undo is not None:
            undo.restore()
            return
        raise TornStep(
            "the optimizer's update failed half-way, although there was enough memory before",
            received=f"step {self.steps}",
            expected="an update that happens whole",
            hint="the weights are partly updated: run again, buoy resumes from the last checkpoint",
        )

    def _smaller(self, step: CompiledStep, data: Any, rows: int, each: float, size: int, text: str) -> int:
        if size == 1:
            raise too_big(step.model, text)
        try:
            step.prepare(data)
        except HoldsNotBack:
            raise
        except CannotSplit as refusal:
            raise CannotSplit(
                "out of memory, and this batch cannot be split",
                received=f"{refusal.message}: {refusal.received}; with {size} samples at step {self.steps}: {text}",
                expected="a batch that fits, or a gradient that is a sum over samples",
                hint=refusal.hint,
            ) from refusal
        except Exception as error:
            if not is_oom(error):
                raise
            raise too_big(
                step.model, text, "three samples, the fewest that micro-batches are tried on, do"
            ) from error
        return self._sizes.oom(step, self.steps, data, rows, each, size)

    def _done(self, rows: int, each: float, size: int) -> None:
        before = len(self.sizes)
        self._sizes.done(self.steps, rows, each, size)
        self.steps += 1
        self._log.step(self.steps, self.sizes[before:])
        if self._careful:
            self._careful -= 1

    def _report(self, rows: int, size: int, smaller: int, text: str) -> None:
        self.retries += 1
        self._event("retry", what="oom", step=self.steps, samples=size, smaller=smaller, error=text)
        self._say(
            f"out of memory with {'1 sample' if size == 1 else f'{size} samples'}; retrying the step in micro-batches "
            f"of {smaller}"
        )


def _measure(data: Any) -> tuple[int, float]:
    """Samples, and array elements per sample."""
    shapes = [leaf.shape for leaf in keras.tree.flatten(data) if getattr(leaf, "shape", None) is not None]
    lengths = {shape[0] for shape in shapes if len(shape)}
    if len(lengths) != 1:
        raise BadBatch(
            "the parts of the batch have different numbers of samples",
            received=", ".join(str(tuple(shape)) for shape in shapes) or "no arrays",
            expected="the same first dimension in x, y and sample_weight",
        )
    rows = int(lengths.pop())
    if rows == 0:
        raise BadBatch("the batch is empty", received="0 samples", expected="at least one")
    return rows, max(1.0, sum(prod(shape) for shape in shapes) / rows)


def _first_line(error: BaseException) -> str:
    """The line that says it: TensorFlow puts "Graph execution error:" and a stack before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = [line for line in lines if ("OOM" in line or "memory" in line) and not line.startswith("File ")]
    return (told or lines)[0][:300]


def install(
    model: Any, *, say: Say, event: Event, micro_batch: int | None = None, inexact: tuple[str, ...] = ()
) -> Transaction:
    """Make the steps of this compiled model atomic, and its batch divisible; `CannotSplit` says why that is not done.

    >>> import keras
    >>> from buoy.keras.step.transaction import install
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> transaction = install(model, say=print, event=print)
    >>> transaction.remove()
    """
    _refuse(model)
    return Transaction(model, say=say, event=event, micro_batch=micro_batch, inexact=inexact)


class Transaction(Retry):
    """Runs the model's training steps; repeats one that ran out of memory with smaller micro-batches."""

    def __init__(
        self, model: Any, *, say: Say, event: Event, micro_batch: int | None, inexact: tuple[str, ...]
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise CannotSplit("no such micro-batch", received=str(micro_batch), expected="1 or more samples")
        super().__init__(say, event, micro_batch)
        self._model, self._inexact = model, inexact
        self._is_asked = micro_batch is not None
        self._step: FitStep | None = None
        self._is_fresh = True
        """No step of the present graphs has gone through yet."""
        model.make_train_function = self._make_train_function
        model.train_function = None

    def traced(self) -> list[Any]:
        """The `tf.function`s that the steps so far were traced with."""
        return self._step.traced() if self._step is not None else []

    def remove(self) -> None:
        """Give the model its own training step back."""
        vars(self._model).pop("make_train_function", None)
        self._model.train_function = None

    def _make_train_function(self, force: bool = False) -> None:
        if self._model.train_function is not None and not force:
            return
        self._step, self._is_fresh = FitStep(self._model, self._inexact), True
        self._model.train_function = self._train

    def _train(self, iterator: Any) -> Any:
        # What Keras calls for `steps_per_execution` batches. The batch is fetched outside the graph: a step that
        # fails must still have it.
        step = self._step
        assert step is not None
        if step.stock is not None:
            return step.stock(iterator)
        logs = None
        for number in range(self._model.steps_per_execution):
            try:
                data = step.fetch(iterator)
            except step.exhausted:
                if number:
                    break
                raise
            logs = self._first(step, data) if self._is_fresh else self.run(step, data)
            if step.stock is not None:
                break
        return logs

    def _first(self, step: FitStep, data: Any) -> Any:
        try:
            logs = self.run(step, data)
            self._is_fresh = False
            return logs
        except Exception as error:
            is_last_word = isinstance(error, StepError) and not step.misfit(error)
            if self._is_asked or is_last_word or step.written():
                raise
            why = error.message if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        # Either the model does not fit in here, or the user's code is wrong: Keras's own step tells which.
        step.use_stock()
        logs = step.stock(iter([data]))
        why = why.splitlines()[0][:300]
        self._event("trouble", what=f"micro-batches are off: {why}")
        self._say(f"micro-batches and recovery from out-of-memory are off for this model: {why}")
        return logs


def _refuse(model: Any) -> None:
    refuse_backend("micro-batches inside model.fit")
    if (why := why_not("micro-batches")) is not None:
        raise CannotSplit(
            f"micro-batches are not made with this Keras: {why}",
            received=f"Keras {keras.__version__}",
            expected="a version that buoy knows",
            hint="another version of Keras, or of buoy",
        )
    if not model.compiled:
        raise CannotSplit(
            "the model is not compiled", received="neither loss nor optimizer", expected="model.compile(...)"
        )
    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise CannotSplit(
            "a train_step of your own cannot be made atomic from outside",
            received=f"{type(model).__name__}.train_step",
            expected="Keras's own train_step",
            hint="override `compute_loss` instead, or write the loop with `buoy.keras.gradients(model, loss_fn)`",
        )
    refuse_replicas(model.distribute_strategy)
