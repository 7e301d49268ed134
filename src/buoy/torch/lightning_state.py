"""What a Lightning trainer holds beside model and optimizer: loops, schedulers, precision, callbacks, logged values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from buoy.checkpoint.store import StoredTensor
from buoy.torch.lightning_step import Held
from buoy.torch.metrics import counted, put_back
from buoy.torch.tensors import kept

_LAST = 10
"""Loaded after model and optimizer: `on_load_checkpoint` may look at them."""
_NOT_NEEDED = ("optimizer_states", "hparams_name", "hyper_parameters", "hparams_type")
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")


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
        whole = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in [*_NOT_NEEDED, *(() if _is_changed(whole["state_dict"], module) else ("state_dict",))]:
            whole.pop(name, None)
        whole["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        results = trainer.fit_loop.epoch_loop._results
        return {
            "trainer": whole,
            "should_stop": bool(trainer.should_stop),
            "shown": {name: getattr(trainer._logger_connector, name) for name in _SHOWN},
            "logged": {
                **self._held.counted,
                **{key: counted(one)[""] for key, one in results.items() if one.is_tensor},
            },
            "metrics": counted(module),
        }

    def mismatches(self, state: Any) -> list[str]:
        """How many schedulers there were."""
        mine, theirs = len(self._trainer.lr_scheduler_configs), len(state["trainer"]["lr_schedulers"])
        return [] if mine == theirs else [f"has {mine} schedulers, the checkpoint {theirs}"]

    def load(self, state: Any) -> None:
        """Through Lightning's own loading, so that every hook is called."""
        trainer = self._trainer
        module, connector = trainer.lightning_module, trainer._checkpoint_connector
        whole = {"state_dict": module.state_dict(), **state["trainer"]}
        connector._loaded_checkpoint = whole
        try:
            connector.restore_datamodule()
            module.on_load_checkpoint(whole)
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_lr_schedulers()
        finally:
            connector._loaded_checkpoint = {}
        if self.loads_loops:
            load_loops(trainer.fit_loop, whole["loops"]["fit_loop"])
            trainer.should_stop = state["should_stop"]
        for name, value in state["shown"].items():
            setattr(trainer._logger_connector, name, value)
        trainer.fit_loop.epoch_loop._results.clear()
        self._held.counted = dict(state["logged"])
        put_back(module, state["metrics"])


def load_loops(fit_loop: Any, state: dict[str, Any]) -> None:
    """Counters only: Lightning's own way to restart in the middle skips a validation that is due."""
    fit_loop.load_state_dict(state)
    for loop in _loops(fit_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def to_epoch_start(fit_loop: Any) -> None:
    """Where the loop begins the epoch that was under way, as it begins any other."""
    progress = fit_loop.epoch_progress
    for counter in (progress.current, progress.total):
        counter.ready = counter.started = counter.completed = counter.processed


def _loops(loop: Any) -> Iterator[Any]:
    yield loop
    for value in vars(loop).values():
        if hasattr(value, "_loaded_from_state_dict"):
            yield from _loops(value)


def _is_changed(state: dict[str, Any], module: Any) -> bool:
    """Whether a hook has put other weights there (an average, say) than the model's own."""
    own = module.state_dict()
    return state.keys() != own.keys() or any(
        getattr(value, "data_ptr", int)() != getattr(own[name], "data_ptr", int)()
        for name, value in state.items()
    )
