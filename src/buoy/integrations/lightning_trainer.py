"""What a Lightning trainer holds beside model and optimizer: loops, schedulers, precision, callbacks, logged values.

Lightning's automatic optimization as a transaction: what a training step returns and logs, over micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from buoy._compat.lightning import (
    backward_of,
    closures,
    dump,
    load_loops,
    loading,
    results_of,
    show_metrics,
    shown_metrics,
    zero_gradients,
)
from buoy._compat.torchmetrics import read_counts, write_counts
from buoy.checkpoint.store import StoredTensor
from buoy.integrations.guarding import hint_in_a_trainer, samples_of, split_of
from buoy.torch.state.tensors import kept
from buoy.torch.step.snapshot import Snapshot
from buoy.torch.step.transaction import Transaction
from buoy.training.messages import say

Log = tuple[int, tuple[Any, ...], dict[str, Any]]
_PLAIN = (bool, int, float, str, type(None))


class Held:
    """What the parts of one try have logged and returned; goes to Lightning when the step is done, as one batch's."""

    def __init__(self, results: Any, module: torch.nn.Module) -> None:
        self._module: torch.nn.Module | None = module
        """Until it was looked at for metrics."""
        self.counted: dict[str, Any] = {}
        """What was logged in this epoch before a resume, by key, until the key is logged again."""
        self.outputs: list[tuple[int, dict[str, Any]]] = []
        self.size: int | None = None
        """Samples of the part that is computed; None: nothing is, and what is logged is passed on at once."""
        self._logs: list[Log] = []
        self._results = results
        self._log: Callable[..., None] = results.log
        results.log = self._route

    def begin_part(self, size: int, of: int) -> None:
        """So many samples are computed, of those of the batch."""
        self.size = size
        if size < of and self._module is not None:
            module, self._module = self._module, None
            if read_counts(module):
                say(
                    "a metric's value of a step that is split is the last micro-batch's; its value of the epoch is of "
                    "all samples"
                )

    def remove(self) -> None:
        """Leave Lightning's collection as it was found."""
        vars(self._results).pop("log", None)

    def clear(self) -> None:
        """A try begins."""
        self._logs.clear()
        self.outputs.clear()

    def hand_over(self) -> dict[str, Any]:
        """The step is done: log it, and return what `training_step` returned beside the loss."""
        together: dict[tuple[str, str], list[Log]] = {}
        for entry in self._logs:
            together.setdefault((entry[1][0], entry[1][1]), []).append(entry)
        for entries in together.values():
            self._pass_on(*_merged(entries))
        names = self.outputs[-1][1] if self.outputs else {}
        return {name: _joined([(size, made.get(name)) for size, made in self.outputs]) for name in names}

    def _route(self, *args: Any, **kwargs: Any) -> None:
        if self.size is None:
            self._pass_on(args, kwargs)
            return
        fx, name, value, *rest = args
        value = value.detach() if isinstance(value, torch.Tensor) else value
        self._logs.append((self.size, (fx, name, value, *rest), kwargs))

    def _pass_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._log(*args, **kwargs)
        before = self.counted.pop(f"{args[0]}.{args[1]}", None)
        if before is not None:  # the first time has only made its place
            write_counts(self._results[f"{args[0]}.{args[1]}"], {"": before})
            self._log(*args, **kwargs)


def _merged(entries: list[Log]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One value for the whole batch, as Lightning would reduce them over batches."""
    _, args, kwargs = entries[-1]
    if len(entries) == 1 or not isinstance(args[2], torch.Tensor):
        return args, kwargs
    sizes, values = [size for size, _, _ in entries], [args[2] for _, args, _ in entries]
    by = kwargs.get("reduce_fx", "mean")
    name = by if isinstance(by, str) else getattr(by, "__name__", "")
    if name in ("mean", "avg"):
        value = sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
    elif name == "sum":
        value = sum(values)
    elif name in ("max", "min"):
        value = reduce(torch.maximum if name == "max" else torch.minimum, values)
    else:
        value = values[-1]
    given = [kwargs.get("batch_size") for _, _, kwargs in entries]
    if all(given):
        kwargs = {**kwargs, "batch_size": sum(given)}
    return (*args[:2], value, *args[3:]), kwargs


def _joined(values: list[tuple[int, Any]]) -> Any:
    """Tensors with one row per sample are put together; of anything else the last part's stands."""
    tensors = [
        value for size, value in values if isinstance(value, torch.Tensor) and value.shape[:1] == (size,)
    ]
    return torch.cat(tensors) if len(tensors) == len(values) > 1 else values[-1][1]


class StepTransaction(Transaction):
    """A transaction whose failed tries leave no trace in metrics and logs either."""

    def __init__(self, module: torch.nn.Module, held: Held, **settings: Any) -> None:
        super().__init__(**settings)
        self._rollback.snapshot = _StepSnapshot(module, held)

    def usable(self, hint: str) -> str:
        """In words of a Trainer."""
        return hint_in_a_trainer(
            hint,
            "smaller batches from the loader, with Trainer(accumulate_grad_batches=...) for as many per step",
        )


class _StepSnapshot(Snapshot):
    """Also counters that the module keeps in plain attributes, and lists to which `training_step` appends."""

    def __init__(self, module: torch.nn.Module, held: Held) -> None:
        super().__init__()
        self._module, self._held = module, held
        self._has_metrics = False
        self._counted: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        self._lengths: list[tuple[list[Any], int]] = []

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """With the first step: a module may make its metrics in `on_train_start`."""
        super().watch(modules)
        self._has_metrics = bool(read_counts(self._module))

    def take(self) -> None:
        super().take()
        self._held.clear()
        own = vars(self._module)
        self._plain = {name: value for name, value in own.items() if type(value) in _PLAIN}
        self._lengths = [(value, len(value)) for value in own.values() if type(value) is list]
        if self._has_metrics:
            self._counted = read_counts(self._module)

    def restore(self) -> None:
        super().restore()
        if not self.taken:
            return
        vars(self._module).update(self._plain)
        for items, length in self._lengths:
            del items[length:]
        if self._has_metrics:
            write_counts(self._module, self._counted)


class _Skipped(Exception):  # noqa: N818 - never leaves this module
    """`training_step` returned None: no step for this batch."""


class _Backward:
    """What stands for a gradient scaler: the loss goes through Lightning's own backward, hooks and scaling included."""

    def __init__(self, backward: Callable[[torch.Tensor], None]) -> None:
        self._backward = backward
        self._loss: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> _Backward:
        self._loss = loss
        return self

    def backward(self) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None
        self._backward(loss)


def transactional(
    trainer: Any, library: str, held: Held, backward: Callable[..., torch.Tensor]
) -> Callable[[], None]:
    """Have every step of this trainer computed by `backward`; returns how to undo that."""
    result_of: Any = import_module(f"{library}.loops.optimization.automatic").ClosureResult

    def make(closure: Any, batch: Any, training_step: Callable[[Any], Any]) -> Callable[..., Any]:
        def loss_of(part: Any) -> torch.Tensor:
            size = samples_of(part)
            held.begin_part(size, samples_of(batch))
            try:
                made = training_step(part)
            finally:
                held.size = None
            result = result_of.from_training_step_output(made, trainer.accumulate_grad_batches)
            if result.closure_loss is None:
                raise _Skipped
            held.outputs.append((size, result.extra))
            return result.closure_loss  # type: ignore[no-any-return]

        @torch.enable_grad()
        def step(*args: Any, **options: Any) -> Any:
            zero_gradients(closure)
            try:
                loss = backward(batch, loss_of, split=split_of(batch), scaler=_Backward(backward_of(closure)))
            except _Skipped:
                held.hand_over()
                return result_of(None)
            return result_of(loss, extra=held.hand_over())

        return step

    return closures(trainer, library, make)


_LAST = 10
"""Loaded after model and optimizer: `on_load_checkpoint` may look at them."""
_NOT_NEEDED = ("optimizer_states", "hparams_name", "hyper_parameters", "hparams_type")


def find_library() -> str:
    """Lightning has two names; the one that this process already uses, if any."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    there = loaded or [name for name in names if find_spec(name.partition(".")[0]) is not None]
    return there[0] if there else names[0]


class TrainerState:
    """A `Tracked`: the trainer's own checkpoint, but for what is tracked beside it."""

    weight = _LAST

    def __init__(self, trainer: Any, held: Held) -> None:
        self._trainer = trainer
        self._held = held
        self.loads_loops = True
        """Whether the place in the loops is loaded too."""

    @property
    def tensor(self) -> Callable[[StoredTensor], Any]:
        """Callbacks keep what they are given."""
        return kept

    def state(self) -> object:
        """As Lightning would save it, hooks of module and callbacks included."""
        trainer, module = self._trainer, self._trainer.lightning_module
        whole = dump(trainer)
        for name in [*_NOT_NEEDED, *(() if _is_changed(whole["state_dict"], module) else ("state_dict",))]:
            whole.pop(name, None)
        whole["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        results = results_of(trainer)
        return {
            "trainer": whole,
            "should_stop": bool(trainer.should_stop),
            "shown": shown_metrics(trainer),
            "logged": {
                **self._held.counted,
                **{key: read_counts(one)[""] for key, one in results.items() if one.is_tensor},
            },
            "metrics": read_counts(module),
        }

    def mismatches(self, state: Any) -> list[str]:
        """How many schedulers there were."""
        mine, theirs = len(self._trainer.lr_scheduler_configs), len(state["trainer"]["lr_schedulers"])
        return [] if mine == theirs else [f"has {mine} schedulers, the checkpoint {theirs}"]

    def load(self, state: Any) -> None:
        """Through Lightning's own loading, so that every hook is called."""
        trainer = self._trainer
        module = trainer.lightning_module
        whole = {"state_dict": module.state_dict(), **state["trainer"]}
        with loading(trainer, whole) as connector:
            connector.restore_datamodule()
            module.on_load_checkpoint(whole)
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_lr_schedulers()
        if self.loads_loops:
            load_loops(trainer.fit_loop, whole["loops"]["fit_loop"])
            trainer.should_stop = state["should_stop"]
        show_metrics(trainer, state["shown"])
        results_of(trainer).clear()
        self._held.counted = dict(state["logged"])
        write_counts(module, state["metrics"])


def to_epoch_start(fit_loop: Any) -> None:
    """Where the loop begins the epoch that was under way, as it begins any other."""
    progress = fit_loop.epoch_progress
    for counter in (progress.current, progress.total):
        counter.ready = counter.started = counter.completed = counter.processed


def _is_changed(state: dict[str, Any], module: Any) -> bool:
    """Whether a hook has put other weights there (an average, say) than the model's own."""
    own = module.state_dict()
    return state.keys() != own.keys() or any(
        getattr(value, "data_ptr", int)() != getattr(own[name], "data_ptr", int)()
        for name, value in state.items()
    )
