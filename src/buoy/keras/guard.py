"""`buoy.keras.Guard`: the callback that keeps `model.fit` going, from wherever the last attempt was killed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from buoy._compat.keras import is_newer, replace_fit, version_words, why_not
from buoy.checkpoint.retention import Keep
from buoy.checkpoint.saver import Receipt
from buoy.errors import UsageError
from buoy.flight.last_words import leave_out_ours
from buoy.flight.profile import Profiling
from buoy.keras.guarded_fit import GuardedFit, flat
from buoy.machine.memory import set_cap
from buoy.training import recording
from buoy.training.manager import CheckpointManager
from buoy.training.messages import say
from buoy.training.options import Options, folder_name

if TYPE_CHECKING:
    from buoy.planner.result import Plan


class Guard(keras.callbacks.Callback):  # type: ignore[misc]
    """Checkpoints for `model.fit`, and the way back to the same bits after any death.

    A run that was killed resumes at the batch after its newest checkpoint when the same script is started again:
    weights, optimizer, seeds, metrics, callbacks and the order of the data are as they would have been.
    A run that is finished returns from `fit` at once.

        model.fit(dataset, epochs=10, callbacks=[buoy.keras.Guard("runs/cats")])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        mirror: str | None = None,
        time_limit: str | float | None = None,
        disk: str | None = None,
        save: str | int | None = None,
        keep: Keep | int | None = None,
        seed: int | None = None,
        micro_batch: int | None = None,
        inexact: tuple[str, ...] = (),
        memory_cap: str | int | None = None,
        plan: Plan | None = None,
    ) -> None:
        super().__init__()
        self.options = Options(
            mirror=mirror, time_limit=time_limit, disk=disk, save=save, keep=keep, seed=seed,
            micro_batch=micro_batch, inexact=inexact, memory_cap=memory_cap, plan=plan,
        )  # fmt: skip
        self.folder = folder_name(folder)
        self._memory_cap = memory_cap
        self.step_options: dict[str, Any] = {
            "micro_batch": self.options.first_micro_batch, "inexact": inexact,
        }  # fmt: skip
        self._fit: GuardedFit | None = None
        self.profiling = Profiling(say)
        self._why_not = _teach_fit()
        if self._why_not is not None:
            say(f"buoy.keras.Guard is off: {self._why_not}. The training runs without checkpoints: it cannot be "
                "resumed, and steps are not split when memory runs out; hint: use another version of "
                "Keras, or of buoy")  # fmt: skip
        elif is_newer():
            say(f"{version_words()}; everything that a Guard needs is there")

    def __repr__(self) -> str:
        return f"<buoy.keras.Guard {self.folder}>"

    def _repr_html_(self) -> str:
        from buoy.view.cards import guard_card

        return guard_card(repr(self), self.folder)

    @property
    def step(self) -> int:
        """Batches trained since the run began."""
        return self._fit.adapter.position.step if self._fit is not None else 0

    @property
    def resumed(self) -> bool:
        """Whether this attempt resumes from a checkpoint."""
        return self._fit is not None and self._fit.resumed

    def save(self, *, pin: str | None = None) -> Receipt | None:
        """A checkpoint, for another callback to ask for; `pin` keeps it for good, under that name.

        While a batch is under way (`on_train_batch_end` belongs to it) it is made right after, and this returns None.
        """
        if self._fit is None:
            return None
        if self._fit.adapter.in_step:
            self._fit.wish = ("user", pin)
            return None
        return self._fit.save("user", pin=pin)

    def profile(self, steps: int = 3) -> None:
        """Hand the next steps to TensorFlow's profiler, then print where their time went and what holds memory.

        The first two steps are not measured: they warm up. Where `fit` ends early, what there is is printed.
        The raw trace for TensorBoard is kept in `<folder>/profiles/`. Call it before `fit`, or from another callback.
        """
        self.profiling.ask(steps)

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls this after every other callback's own."""
        if self._why_not is not None:
            return
        if self._fit is None:
            raise UsageError(
                "`model.fit` did not use buoy.keras.Guard",
                received="a training loop of its own, or a `fit` that was replaced",
                expected="`model.fit(..., callbacks=[guard])`",
                hint="make the guard before `fit` is called; in a loop of your own use `buoy.keras.Loop`",
            )
        self._fit.training_begins()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A first epoch that begins in its middle gets its state here, after everybody has begun it again."""
        if self._fit is not None:
            self._fit.epoch_begins()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """A place between two steps, with the epoch's metrics."""
        if self._fit is not None:
            self._fit.epoch_ends(logs or {})

    def on_test_begin(self, logs: Any = None) -> None:
        """A validation is no part of a profile."""
        self.profiling.leave(None, is_early=False)

    def on_train_end(self, logs: Any = None) -> None:
        """The last checkpoint: the finished run."""
        if self._fit is not None:
            self._fit.training_ends(logs or {})

    def run_fit(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What `model.fit` does when this guard is among its callbacks."""
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                "buoy.keras.Guard resumes Keras on TensorFlow only",
                received=f"the {keras.backend.backend()} backend",
                expected="KERAS_BACKEND=tensorflow",
                hint="on PyTorch, a loop with `buoy.Run` resumes exactly",
            )
        if self._memory_cap is not None:
            import tensorflow as tf

            set_cap(self._memory_cap, say, gpu=bool(tf.config.list_physical_devices("GPU")))
            self._memory_cap = None  # once; a second `fit` is under it already
        keeper = CheckpointManager(self.folder, self.options)
        recording.record_plan(self.options.plan, keeper.recorder.event)
        try:
            self._fit = GuardedFit(self, keeper, arguments)
            with keeper.loop():
                return self._fit.run(original)
        finally:
            if self._fit is not None:
                self._fit.close()
            recording.compare(self.options.plan, keeper.recorder.event, say, "keras")
            keeper.finish()


def _teach_fit() -> str | None:
    """Let `model.fit` hand over to a guard among its callbacks; once per process, nothing else changes.

    Why that cannot be, in words, where this Keras is not one that buoy knows: `fit` then trains without a guard.
    """
    if (why := why_not("resume")) is not None:
        return why

    def made_of(original: Any) -> Any:
        signature = inspect.signature(original)

        def fit(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # Keras says better what is wrong
            bound.apply_defaults()
            guards = [each for each in flat(bound.arguments.get("callbacks")) if isinstance(each, Guard)]
            if len(guards) > 1:
                raise UsageError("one guard per training", received=f"{len(guards)} in `callbacks`")
            try:
                if not guards or not bound.arguments["self"].compiled:
                    return original(*args, **kwargs)
                return guards[0].run_fit(original, dict(bound.arguments))
            except BaseException as error:
                leave_out_ours(error)
                raise

        return fit

    replace_fit(made_of)
    return None
