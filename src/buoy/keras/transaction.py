"""A training step of `model.fit` that happens whole, with the batch that was asked for, or has not happened."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from math import ceil, inf, prod
from typing import TYPE_CHECKING, Any

import keras

from buoy.keras.snapshot import Snapshot, variables_of
from buoy.microbatch.errors import BadBatch, CannotSplit, OutOfMemory, TornStep
from buoy.microbatch.oom import is_oom
from buoy.microbatch.sizing import Sizer

if TYPE_CHECKING:
    from buoy.keras.functions import Functions

Say = Callable[[str], object]
Event = Callable[..., object]

_CAREFUL_STEPS = 64
"""For so many steps after the reserve was refused, copies are made before the optimizer's update."""
_UPDATE_TRIES = 3


def install(
    model: Any, *, say: Say, event: Event, micro_batch: int | None = None, inexact: tuple[str, ...] = ()
) -> Transaction:
    """Make the steps of this compiled model atomic, and its batch divisible; `CannotSplit` says why that is not done.

    >>> import keras
    >>> from buoy.keras.transaction import install
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> transaction = install(model, say=print, event=print)
    >>> transaction.remove()
    """
    _refuse(model)
    return Transaction(model, say=say, event=event, micro_batch=micro_batch, inexact=inexact)


class Transaction:
    """Runs the model's training steps; repeats one that ran out of memory with smaller micro-batches."""

    def __init__(
        self, model: Any, *, say: Say, event: Event, micro_batch: int | None, inexact: tuple[str, ...]
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise CannotSplit("no such micro-batch", received=str(micro_batch), expected="1 or more samples")
        self._model = model
        self._say = say
        self._event = event
        self._sizer = Sizer(most=micro_batch)
        self._inexact = inexact
        self._functions: Functions | None = None
        self._careful = 0
        self._fresh = True
        """No step of the present functions has gone through yet."""
        self._replayed: dict[int, int] = {}
        self.steps = 0
        """Steps that went through."""
        self.retries = 0
        self.sizes: list[tuple[int, int]] = []
        """(step, micro-batch) wherever the micro-batch changed."""
        model.make_train_function = self._make_train_function
        model.train_function = None

    def remove(self) -> None:
        """Give the model its own training step back."""
        vars(self._model).pop("make_train_function", None)
        self._model.train_function = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {
            "sizer": self._sizer.state_dict(),
            "steps": self.steps,
            "sizes": [list(pair) for pair in self.sizes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizer.load_state_dict(state["sizer"])
        self.steps = int(state["steps"])
        self.sizes = [(int(step), int(size)) for step, size in state["sizes"]]

    def replay(self, sizes: list[tuple[int, int]]) -> None:
        """Use these micro-batches from these steps on, as an earlier life of the run did."""
        self._replayed = {step: size for step, size in sizes if step >= self.steps}

    def _make_train_function(self, force: bool = False) -> None:
        if self._model.train_function is not None and not force:
            return
        from buoy.keras.functions import Functions

        self._functions = Functions(self._model, self._inexact)
        self._fresh = True
        self._model.train_function = self._train

    def _train(self, iterator: Any) -> Any:
        # What Keras calls for `steps_per_execution` batches. The batch is fetched outside the graph: a step that
        # fails must still have it.
        functions = self._functions
        assert functions is not None
        if functions.stock is not None:
            return functions.stock(iterator)
        logs = None
        for number in range(self._model.steps_per_execution):
            try:
                data = functions.fetch(iterator)
            except functions.exhausted:
                if number:
                    break
                raise
            logs = self._step(functions, data)
            if functions.stock is not None:
                break
        return logs

    def _step(self, functions: Functions, data: Any) -> Any:
        rows, each = _measure(data)
        size = self._size(rows, each)
        tries, again = 0, True
        while True:
            failure, logs = self._try(functions, data, rows, size)
            if failure is None:
                break
            where, text = failure
            tries += where == "update"
            if where == "gradients" and size == 1 and again:
                again = False  # what the failed try held is free now: once more
            elif where == "gradients":
                smaller = self._smaller(functions, data, rows, each, size, text)
                self._tell(rows, size, smaller, text)
                size = smaller
            elif tries > _UPDATE_TRIES:
                raise OutOfMemory(
                    "the optimizer's update does not fit into memory, whatever the micro-batch",
                    received=text,
                    expected="room for the update's temporaries beside weights, gradients and optimizer state",
                    hint="`buoy plan` lists optimizers that hold less; nothing of this step was done",
                )
            else:
                self._careful = _CAREFUL_STEPS
                self.retries += 1
                self._event("retry", what="optimizer step", step=self.steps, error=text)
                self._say(
                    f"out of memory in the optimizer's update of step {self.steps}: undone and repeated"
                )
        self._done(rows, each, size)
        return logs

    def _try(
        self, functions: Functions, data: Any, rows: int, size: int
    ) -> tuple[tuple[str, str] | None, Any]:
        undo = None
        try:
            if self._careful:
                undo = Snapshot(variables_of(self._model))
            reserve = not self._careful
            return None, functions.run(data, ceil(rows / size), reserve)
        except Exception as error:
            failed: BaseException = error
            if not is_oom(error):
                reached = functions.reached()
                self._check_torn(reached, undo)
                if self._fresh and size >= rows and reached == 0:
                    return None, self._leave_to_keras(functions, data, error)
                raise functions.explained(error) from error
            text = _first_line(error)
        # Outside `except`: only now are the frames, and the tensors in them, gone.
        traceback.clear_frames(failed.__traceback__)
        del failed
        reached = functions.reached()
        if reached == 2:
            self._check_torn(reached, undo)
        return ("gradients" if reached == 0 else "update", text), None

    def _leave_to_keras(self, functions: Functions, data: Any, error: Exception) -> Any:
        # Either the model does not fit in here, or the person's code is wrong: Keras's own step tells which.
        functions.use_stock()
        logs = functions.stock(iter([data]))
        why = (
            error.message
            if isinstance(error, CannotSplit)
            else f"{type(error).__name__}: {_first_line(error)}"
        )
        self._event("trouble", what=f"micro-batches are off: {why}")
        self._say(f"micro-batches and recovery from out-of-memory are off for this model: {why}")
        return logs

    def _check_torn(self, reached: int, undo: Snapshot | None) -> None:
        if reached < 2:
            return
        if undo is not None:
            undo.restore()
            return
        raise TornStep(
            "the optimizer's update failed half-way, although there had been room for it",
            received=f"step {self.steps}",
            expected="an update that happens whole",
            hint="the weights are partly updated: run again, buoy goes on from the last checkpoint",
        )

    def _smaller(self, functions: Functions, data: Any, rows: int, each: float, size: int, text: str) -> int:
        if size == 1:
            raise OutOfMemory(
                "a single sample does not fit into memory",
                received=text,
                expected="a sample that fits beside weights, gradients and optimizer state",
                hint="`buoy plan` shows what owns the peak; mixed precision, smaller samples or another optimizer help",
            )
        functions.prepare(data)
        return self._sizer.oom(size, each)

    def _size(self, rows: int, each: float) -> int:
        logged = self._replayed.pop(self.steps, None)
        if logged is not None:
            self._sizer.limit = logged * each if logged else inf
        size, _ = self._sizer.samples(rows, each, None)
        return ceil(rows / ceil(rows / size))

    def _done(self, rows: int, each: float, size: int) -> None:
        held_back = size < rows
        now = size if held_back else 0
        if (self.sizes[-1][1] if self.sizes else 0) != now:
            self.sizes.append((self.steps, now))
        self._sizer.done(size, each, held_back=held_back)
        self.steps += 1
        self._fresh = False
        if self._careful:
            self._careful -= 1

    def _tell(self, rows: int, size: int, smaller: int, text: str) -> None:
        self.retries += 1
        self._event("retry", what="oom", step=self.steps, samples=size, smaller=smaller, error=text)
        self._say(
            f"out of memory at step {self.steps} with {size} of {rows} samples at once: "
            f"the step is repeated with {smaller} at once (the batch stays {rows})"
        )


def _refuse(model: Any) -> None:
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise CannotSplit(
            "micro-batches inside model.fit need Keras on TensorFlow",
            received=f"the {backend} backend",
            expected="KERAS_BACKEND=tensorflow",
            hint="on the torch backend write the loop yourself: `buoy.Run().backward(batch, loss_fn)`",
        )
    if not model.compiled:
        raise CannotSplit(
            "the model is not compiled", received="no loss, no optimizer", expected="model.compile(...)"
        )
    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise CannotSplit(
            "a train_step of your own cannot be made atomic from outside",
            received=f"{type(model).__name__}.train_step",
            expected="Keras's own train_step",
            hint="override `compute_loss` instead, or write the loop with `buoy.keras.gradients(model, loss_fn)`",
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise CannotSplit(
            "micro-batches are not made under tf.distribute with more than one replica",
            received=f"{type(model.distribute_strategy).__name__} with {replicas} replicas",
            expected="one replica",
            hint="smaller batches per replica, or one process per device",
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
    return (str(error) or type(error).__name__).splitlines()[0][:300]
