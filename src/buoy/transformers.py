"""`buoy.transformers.Guard`: the callback that keeps a Hugging Face `Trainer` going, from wherever it was killed."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import transformers

import buoy.training  # noqa: F401 - the first of ours: it says in one sentence that it needs Linux
from buoy._compat.transformers import FIND_PLACE, LOAD_CALLBACKS, LOADERS, missing
from buoy.errors import UsageError
from buoy.flight.last_words import leave_out_ours
from buoy.integrations.guarding import (
    Guarding,
    TrainerGuard,
    refuse_many_processes,
    samples_of,
    split_of,
)
from buoy.integrations.transformers_trainer import StepLoss, StepTransaction, TrainerState, plain
from buoy.machine.process import is_rehearsal
from buoy.torch.data.loader import ResumableLoader
from buoy.torch.state.state_dict import tracked
from buoy.training.messages import say

_trainer: Any = import_module("transformers.trainer")


class Guard(TrainerGuard, transformers.TrainerCallback):
    """Checkpoints and out-of-memory recovery for `Trainer.train`, and the way back to the same bits after any death.

    A run that was killed resumes at the step after its newest checkpoint when the same script is started again.
    A batch that does not fit is done in micro-batches, with the same gradient.

        Trainer(model, args, train_dataset=data, callbacks=[buoy.transformers.Guard("runs/cats")]).train()
    """

    library = "transformers"
    _training: _Training | None = None

    @functools.wraps(TrainerGuard.__init__)  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _teach_trainer()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model, optimizer and scheduler are built."""
        if is_rehearsal():
            return
        if self._training is None:
            raise UsageError(
                "`Trainer.train` did not use buoy.transformers.Guard",
                received="a `train` that was replaced",
                expected="`Trainer(..., callbacks=[guard]).train()`",
                hint="make the guard before `train` is called; in a loop of your own use `buoy.Run`",
            )
        self._training.begins()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """For the flight log."""
        if self._training is not None:
            epoch = float(state.epoch or 0.0)
            self._training.guarding.keeper.epoch_begins(
                int(epoch), state.num_train_epochs, state.global_step, is_whole=epoch.is_integer()
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Figures by which the best checkpoint is kept."""
        if self._training is not None and metrics:
            self._training.guarding.measured(metrics)

    def run_train(self, trainer: Any, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What `Trainer.train` does when this guard is among its callbacks."""
        if is_rehearsal():
            return original(trainer, **arguments)
        _refuse(trainer)
        self._training = training = _Training(self, trainer)
        self.guarding = training.guarding
        try:
            return training.run(original, arguments)
        finally:
            self._training = self.guarding = None
            training.guarding.stack.close()


class _Training:
    """One call of `train` under a guard."""

    def __init__(self, guard: Guard, trainer: Any) -> None:
        self._trainer = trainer
        self._loader: ResumableLoader | None = None
        self._loss = StepLoss(trainer, trainer.training_step)
        self.guarding = Guarding(guard, partial(StepTransaction, self._loss))
        self._is_over = False
        """Nothing is left to train."""

    def run(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The trainer's own `train`, with our data, steps and safe points."""
        guarding, trainer = self.guarding, self._trainer
        guarding.replace(trainer, "get_train_dataloader", self._get_loader)
        guarding.replace(trainer, "training_step", self._training_step)
        guarding.replace(trainer, "get_batch_samples", self._between_steps)
        if guarding.resumed:
            arguments = {**arguments, "resume_from_checkpoint": self._pretended_checkpoint()}
            for name in LOADERS:
                guarding.replace(trainer, name, _nothing)
            guarding.replace(trainer, LOAD_CALLBACKS, self._name_callbacks)
            if hasattr(trainer, FIND_PLACE):
                guarding.replace(trainer, FIND_PLACE, self._place)
            skips = trainer.args.ignore_data_skip
            guarding.stack.callback(setattr, trainer.args, "ignore_data_skip", skips)
            trainer.args.ignore_data_skip = False
        with guarding.keeper.loop():
            made = original(trainer, **arguments)
        if self._is_over:
            return self._output_of_then(made)
        stopped = trainer.state.global_step < trainer.state.max_steps
        guarding.finished(
            trainer.state.global_step, int(trainer.state.epoch or 0), state=self._brief(), stopped=stopped
        )
        return made

    def begins(self) -> None:
        """Everything is built; `train` has not begun its loop."""
        trainer, guarding = self._trainer, self.guarding
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        scaler = getattr(trainer.accelerator, "scaler", None)
        named = {"model": trainer.model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        things = {name: tracked(name, value) for name, value in named.items() if value is not None}
        whole = {name: thing for name, thing in things.items() if thing is not None}
        guarding.begin({**whole, "transformers": TrainerState(trainer)}, trainer.model, optimizer, scaler)

    def _between_steps(self, original: Callable[..., Any], *arguments: Any) -> Any:
        """The step before is done whole: logged, evaluated, and saved by the trainer if it wanted that."""
        guarding, trainer, loader = self.guarding, self._trainer, self._loader
        if loader is not None and not guarding.arrive(loader):
            guarding.safe_point(trainer.state.global_step, loader.epoch, partial(self._here, loader))
        guarding.stepped()
        return original(*arguments)

    def _here(self, loader: ResumableLoader) -> dict[str, Any]:
        return {
            "data": loader.place(loader.batches),
            "epoch": loader.epoch,
            "batches": loader.batches,
            "state": self._brief(),
        }

    def _brief(self) -> dict[str, Any]:
        """What `train` needs to find the place; the rest is loaded later."""
        return {**plain(self._trainer.state), "log_history": [], "stateful_callbacks": {}}

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *rest: Any) -> Any:
        self._loss.prepare(model, rest, samples_of(inputs))
        return self.guarding.micro.backward(
            inputs, self._loss, reduction="sum", split=split_of(inputs), scaler=self._loss
        )

    def _get_loader(self, original: Callable[..., Any]) -> Any:
        """The plain loader: accelerate's own has an order that cannot be resumed inside an epoch without reading it."""
        accelerator = self._trainer.accelerator
        accelerator.prepare = lambda loader, *_, **__: loader
        try:
            made = original()
        finally:
            vars(accelerator).pop("prepare", None)
        _make_generators(made.collate_fn)
        self._loader = self.guarding.loader(made)
        return self._loader

    def _place(self, original: Callable[..., Any], *arguments: Any) -> Any:
        """Epochs done, and batches of the one that was under way."""
        place = self.guarding.place
        found = original(*arguments)
        state = self._trainer.state
        if not place["finished"] and state.global_step >= state.max_steps:
            say(
                f"nothing is left to train: the checkpoint is of step {state.global_step}, and {state.max_steps} steps "
                "are asked for. It stays as it is; more epochs continue from it"
            )
            return sys.maxsize, 0
        if not place["finished"]:
            say(f"resumed from step {state.global_step} (epoch {place['epoch'] + 1})")
            return place["epoch"], place["batches"]
        self._is_over = place["stopped"] or state.global_step >= state.max_steps
        if not self._is_over:
            say(f"resumed from step {state.global_step}, where this run had finished")
            return found
        say(
            f"{self.guarding.keeper.folder} is finished: {state.global_step} steps; the model has its final "
            "weights. Ask for more epochs to train further; another training needs a folder of its own"
        )
        self.guarding.replace(self._trainer, "log", _nothing)  # what `train` would log is of no step
        return sys.maxsize, 0

    def _name_callbacks(self, original: Callable[..., Any]) -> None:
        """The callbacks of this start, whose states the trainer's own saves look up by name; ours come later."""
        trainer = self._trainer
        everybody = [*trainer.callback_handler.callbacks, trainer.control]
        exportable = [each for each in everybody if isinstance(each, _trainer.ExportableState)]
        trainer.state.stateful_callbacks = _trainer.TrainerState(
            stateful_callbacks=exportable
        ).stateful_callbacks

    def _output_of_then(self, made: Any) -> Any:
        """What `train` returned when the run was finished."""
        last: dict[str, Any] = next(
            (entry for entry in reversed(self._trainer.state.log_history) if "train_loss" in entry), {}
        )
        return made._replace(
            training_loss=last.get("train_loss", made.training_loss), metrics=last or made.metrics
        )

    def _pretended_checkpoint(self) -> str:
        """A folder with the trainer's state alone: by it `train` finds the place, and loads nothing else."""
        folder = self.guarding.stack.enter_context(tempfile.TemporaryDirectory(prefix="buoy-"))
        with open(os.path.join(folder, _trainer.TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
            json.dump(self.guarding.place["state"], file)
        return folder


def _make_generators(collator: Any) -> None:
    """`DataCollatorForLanguageModeling(seed=...)` makes its generator in its first batch: too late to seed it."""
    collator = getattr(collator, "data_collator", collator)  # inside one that removes columns
    if getattr(collator, "seed", None) and getattr(collator, "generator", ...) is None:
        collator.create_rng()


def _nothing(original: Callable[..., Any] | None, *arguments: Any, **options: Any) -> None:
    """Loaded by the guard."""


def _teach_trainer() -> None:
    """Have `Trainer.train` ask a guard among its callbacks; once per process, and nothing changes without a guard."""
    if getattr(transformers.Trainer.train, "asks_a_guard", False):
        return
    original, skip = transformers.Trainer.train, _trainer.skip_first_batches

    @functools.wraps(original)
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        guards = [each for each in self.callback_handler.callbacks if isinstance(each, Guard)]
        if not guards:
            try:
                return original(self, resume_from_checkpoint, trial, *args, **kwargs)
            except BaseException as error:
                leave_out_ours(error)
                raise
        if len(guards) > 1:
            raise UsageError(
                "one guard per training",
                received=f"{len(guards)} of them: {', '.join(guard.folder for guard in guards)}",
                expected="one",
                hint="a second place for checkpoints is `mirror=`",
            )
        arguments = {"resume_from_checkpoint": resume_from_checkpoint, "trial": trial, **kwargs}
        try:
            return guards[0].run_train(self, original, arguments)
        except BaseException as error:
            leave_out_ours(error)
            raise

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        # Ours begins at the saved place by itself.
        return dataloader if isinstance(dataloader, ResumableLoader) else skip(dataloader, *args, **kwargs)

    train.asks_a_guard = True  # type: ignore[attr-defined]
    _trainer.Trainer.train = train
    _trainer.skip_first_batches = skip_first_batches


def _refuse(trainer: Any) -> None:
    args = trainer.args
    refuse_many_processes(args.world_size, "transformers")
    flags = {"deepspeed": "is_deepspeed_enabled", "fsdp": "is_fsdp_enabled"}
    sharded = [name for name, flag in flags.items() if getattr(trainer, flag, False)]
    if sharded:
        raise UsageError(
            "buoy.transformers.Guard does not guard sharded models",
            received=f"TrainingArguments({sharded[0]}=...)",
            expected="a model that one process holds whole",
            hint="the Trainer's own save_strategy saves those",
        )
    lacking = missing(trainer)
    if lacking:
        raise UsageError(
            "this version of transformers is not known to buoy.transformers.Guard",
            received=f"transformers {transformers.__version__} without {', '.join(lacking)}",
            expected="a version such as 5.22",
            hint="use the Trainer's own save_strategy and resume_from_checkpoint, or a newer buoy",
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "two ways to answer a batch that does not fit",
            received="TrainingArguments(auto_find_batch_size=True)",
            expected="False: the guard keeps the batch and does it in micro-batches",
            hint="leave auto_find_batch_size out",
        )
