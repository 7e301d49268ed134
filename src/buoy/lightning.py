"""`buoy.lightning.Guard`: the callback that keeps a Lightning `Trainer.fit` going, from wherever it was killed."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import buoy.training  # noqa: F401 - the first of ours: it says in one sentence that it needs Linux
from buoy._compat.lightning import (
    epoch_of_loader,
    forget_loaded,
    missing,
    replace_train_loaders,
    results_of,
    set_epoch_of_loader,
    show_again,
    train_loaders,
)
from buoy.errors import UsageError
from buoy.flight.last_words import leave_out_ours
from buoy.integrations.guarding import Guarding, TrainerGuard, refuse_many_processes
from buoy.integrations.lightning_trainer import (
    Held,
    StepTransaction,
    TrainerState,
    find_library,
    to_epoch_start,
    transactional,
)
from buoy.machine.process import is_rehearsal
from buoy.torch.data.loader import ResumableLoader
from buoy.torch.state.state_dict import tracked
from buoy.training.messages import say

_LIBRARY = find_library()
_pl: Any = import_module(_LIBRARY)
_SHARDED = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")


class Guard(TrainerGuard, _pl.Callback):  # type: ignore[misc]
    """Checkpoints and out-of-memory recovery for `Trainer.fit`, and the way back to the same bits after any death.

    A run that was killed resumes at the batch after its newest checkpoint when the same script is started again.
    A batch that does not fit is done in micro-batches, with the same gradient.

        Trainer(max_epochs=10, callbacks=[buoy.lightning.Guard("runs/cats")]).fit(model, loader)
    """

    library = "lightning"
    _fit: _Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The guard comes last: at its turn every other callback has done what it does."""
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizer are built."""
        if is_rehearsal():
            return
        _refuse(trainer, pl_module)
        self._fit = _Fit(self, trainer, pl_module)
        self.guarding = self._fit.guarding

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loop begins."""
        if self._fit is not None:
            self._fit.training_begins()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The order of an epoch's data depends on its number."""
        if self._fit is not None and self._fit.loader is not None:
            self._fit.loader.epoch = trainer.current_epoch
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._fit.guarding.keeper.epoch_begins(
                trainer.current_epoch,
                trainer.max_epochs if (trainer.max_epochs or 0) > 0 and trainer.max_steps < 0 else None,
                trainer.global_step,
                is_whole=not batches,
            )

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Figures by which the best checkpoint is kept."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.guarding.measured(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Those of an epoch."""
        if self._fit is not None:
            self._fit.guarding.measured(trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last checkpoint: the finished run."""
        if self._fit is not None:
            self._fit.guarding.finished(trainer.global_step, trainer.current_epoch)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Also after a signal."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit is over."""
        self._close()

    def _close(self) -> None:
        if self.guarding is not None:
            guarding, self.guarding, self._fit = self.guarding, None, None
            guarding.stack.close()


class _Fit:
    """One call of `fit` under a guard."""

    def __init__(self, guard: Guard, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self.loader: ResumableLoader | None = None
        held = Held(results_of(trainer), trainer.lightning_module)
        self._state = TrainerState(trainer, held)
        try:
            self.guarding = guarding = Guarding(guard, partial(StepTransaction, module, held))
        except BaseException:
            held.remove()
            raise
        guarding.stack.callback(held.remove)
        try:
            self._begin(module)
            guarding.stack.callback(transactional(trainer, _LIBRARY, held, guarding.micro.backward))
            guarding.replace(trainer.strategy, "process_dataloader", self._process_loader)
            guarding.replace(trainer.fit_loop.epoch_loop, "advance", self._advance)
            self._take_over_data()
        except BaseException:
            guarding.stack.close()
            raise

    def _begin(self, module: Any) -> None:
        trainer = self._trainer
        optimizers = {f"optimizer{number or ''}": each for number, each in enumerate(trainer.optimizers)}
        named = {name: tracked(name, value) for name, value in {"model": module, **optimizers}.items()}
        things = {name: thing for name, thing in named.items() if thing is not None}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.guarding.begin({**things, "lightning": self._state}, module, *optimizers.values(), scaler)
        if self.guarding.resumed:
            self._go_back()

    def training_begins(self) -> None:
        """From here on signals wait for a safe point."""
        loaders = train_loaders(self._trainer) or []
        if len(loaders) != 1:
            raise UsageError(
                "buoy.lightning.Guard keeps the place in one train loader",
                received=f"{len(loaders)} of them",
                expected="one DataLoader",
                hint="join the datasets in one, with torch.utils.data.StackDataset for example",
            )
        self.guarding.stack.enter_context(self.guarding.keeper.loop())

    def _go_back(self) -> None:
        """The counters stand at the saved place; let the loop begin that epoch."""
        trainer, guarding = self._trainer, self.guarding
        forget_loaded(trainer)  # what `ckpt_path=` named is older, or another's
        finished = guarding.place["finished"]
        if not finished:
            to_epoch_start(trainer.fit_loop)
        self._state.loads_loops = not finished
        if finished and trainer.fit_loop.done:
            # Lightning empties it before it finds nothing to do.
            guarding.stack.callback(show_again, trainer, dict(trainer.callback_metrics))
            say(
                f"{guarding.keeper.folder} is finished: {trainer.current_epoch} epochs, {guarding.saved_step} steps; "
                "the model has its final weights. Ask for more epochs to train further; another "
                "training needs a folder of its own"
            )
        else:
            say(f"resumed from step {guarding.saved_step} (epoch {trainer.current_epoch + 1})")

    def _take_over_data(self) -> None:
        """`trainer.estimated_stepping_batches`, read in `configure_optimizers`, has had the data set up before us."""
        loaders = train_loaders(self._trainer)
        if loaders is not None and len(loaders) == 1:
            replace_train_loaders(self._trainer, [self._resumable(loaders[0])])

    def _process_loader(self, original: Any, loader: Any) -> Any:
        made = original(loader)
        return self._resumable(made) if self._trainer.training else made  # the others are for validation

    def _resumable(self, loader: Any) -> ResumableLoader:
        self.loader = self.guarding.loader(loader)
        self.loader.epoch = self._trainer.current_epoch
        return self.loader

    def _advance(self, original: Any, fetcher: Any) -> None:
        """Between two batches: the one before is done whole, validation after it included."""
        trainer, guarding, loader = self._trainer, self.guarding, self.loader
        assert loader is not None
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        if guarding.arrive(loader):
            fetcher.fetched = progress.ready + len(getattr(fetcher, "batches", ()))
            if "loader_of_epoch" in guarding.place:
                set_epoch_of_loader(trainer, guarding.place["loader_of_epoch"])
        elif progress.ready % trainer.accumulate_grad_batches == 0:
            stopping = guarding.safe_point(
                trainer.global_step,
                trainer.current_epoch,
                lambda: {
                    "data": loader.place(progress.ready),
                    "loader_of_epoch": epoch_of_loader(trainer),
                },
            )
            if stopping and trainer.received_sigterm:
                raise import_module(f"{_LIBRARY}.utilities.exceptions").SIGTERMException
        guarding.stepped()
        try:
            original(fetcher)
        except BaseException as error:
            leave_out_ours(error)
            raise


def _refuse(trainer: Any, module: Any) -> None:
    strategy = type(trainer.strategy).__name__
    refuse_many_processes(trainer.world_size, "lightning")
    if any(word in strategy for word in _SHARDED):
        raise UsageError(
            "buoy.lightning.Guard does not guard sharded models",
            received=strategy,
            expected="a model that one process holds whole",
            hint="Lightning's own ModelCheckpoint saves those",
        )
    lacking = missing(trainer, _LIBRARY)
    if lacking:
        raise UsageError(
            "this version of Lightning is not known to buoy.lightning.Guard",
            received=f"lightning {_pl.__version__} without {', '.join(lacking)}",
            expected="a version such as 2.6",
            hint="use Lightning's own ModelCheckpoint, or a newer buoy",
        )
    if not module.automatic_optimization:
        raise UsageError(
            "a step that the module does by itself cannot be made safe",
            received="automatic_optimization = False",
            expected="automatic optimization: `training_step` returns the loss",
            hint="in a loop of your own, `buoy.Run` guards several optimizers",
        )
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise UsageError(
            "the place in the data is not known",
            received="training_step(self, dataloader_iter)",
            expected="training_step(self, batch, batch_idx)",
            hint="let Lightning fetch the batches",
        )
