"""A training step of `model.fit` that happens whole, with the batch that was asked for, or has not happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from buoy.keras.refusals import refuse_backend, refuse_replicas
from buoy.keras.retry import Retry
from buoy.keras.sizes import Event, Say
from buoy.microbatch.errors import CannotSplit, StepError
from buoy.microbatch.history import SizeLog

if TYPE_CHECKING:
    from buoy.keras.functions import Functions


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
        self._retry = Retry(say, event, micro_batch)
        self._inexact = inexact
        self._asked = micro_batch is not None
        self._functions: Functions | None = None
        self._fresh = True
        """No step of the present functions has gone through yet."""
        model.make_train_function = self._make_train_function
        model.train_function = None

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Every change of size so far, for `replay`."""
        return self._retry.sizes

    @property
    def steps(self) -> int:
        """Steps that went through."""
        return self._retry.steps

    @property
    def retries(self) -> int:
        """Steps that had to be done again."""
        return self._retry.retries

    def remove(self) -> None:
        """Give the model its own training step back."""
        vars(self._model).pop("make_train_function", None)
        self._model.train_function = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return self._retry.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._retry.load_state_dict(state)

    def replay(self, sizes: list[dict[str, Any]], done: int = 0) -> None:
        """Use these micro-batches from these steps on, as an earlier attempt did in so many steps."""
        self._retry.replay(sizes, done)

    def keep(self, log: SizeLog) -> None:
        """Log every step."""
        self._retry.keep(log)

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint, with the sizes of the steps that were made after it and lost."""
        self._retry.resume(saved)

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
            logs = self._first(functions, data) if self._fresh else self._retry.run(functions, data)
            if functions.stock is not None:
                break
        return logs

    def _first(self, functions: Functions, data: Any) -> Any:
        try:
            logs = self._retry.run(functions, data)
            self._fresh = False
            return logs
        except Exception as error:
            told = isinstance(error, StepError) and not functions.misfit(error)
            if self._asked or told or functions.written():
                raise
            why = error.message if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        # Either the model does not fit in here, or the person's code is wrong: Keras's own step tells which.
        functions.use_stock()
        logs = functions.stock(iter([data]))
        why = why.splitlines()[0][:300]
        self._event("trouble", what=f"micro-batches are off: {why}")
        self._say(f"micro-batches and recovery from out-of-memory are off for this model: {why}")
        return logs


def _refuse(model: Any) -> None:
    refuse_backend("micro-batches inside model.fit")
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
    refuse_replicas(model.distribute_strategy)
