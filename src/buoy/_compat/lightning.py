"""Lightning's private names. Checked on 2.6.

The guard cannot do without most of them: `missing` says so before a fit begins, in one sentence, instead of an error in
the middle of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
_LOOP_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


def missing(trainer: Any, library: str) -> list[str]:
    """What this version of Lightning does not have, of what a guard needs: the names."""
    call = import_module(f"{library}.trainer.call")
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    needed = [
        (trainer, ("_checkpoint_connector", "_logger_connector")),
        (
            getattr(trainer, "_checkpoint_connector", None),
            ("dump_checkpoint", "restore_callbacks", "_loaded_checkpoint"),
        ),
        (getattr(trainer, "_logger_connector", None), _SHOWN),
        (fit, ("_combined_loader", "_data_fetcher", "_last_train_dl_reload_epoch", *_LOOP_FLAGS[1:2])),
        (epoch, ("_results", "advance", "batch_progress")),
        (epoch.automatic_optimization, ("_make_closure",)),
        (call, ("_call_strategy_hook",)),
    ]
    return [name for owner, names in needed for name in names if not hasattr(owner, name)]


# --- what is logged


def results_of(trainer: Any) -> Any:
    """The collection of what `self.log` was given in this epoch: means over an epoch are nowhere else."""
    return trainer.fit_loop.epoch_loop._results


def shown_metrics(trainer: Any) -> dict[str, Any]:
    """`callback_metrics` and its like as they are; `trainer.callback_metrics` is computed anew and cannot be set."""
    return {name: getattr(trainer._logger_connector, name) for name in _SHOWN}


def show_metrics(trainer: Any, shown: dict[str, Any]) -> None:
    """Make them what they were."""
    for name in _SHOWN:
        if name in shown:
            setattr(trainer._logger_connector, name, shown[name])


def show_again(trainer: Any, metrics: dict[str, Any]) -> None:
    """Also these, which a fit with nothing to do has emptied."""
    connector = trainer._logger_connector
    connector._callback_metrics = {**metrics, **connector._callback_metrics}


# --- its own checkpoint


def dump(trainer: Any) -> dict[str, Any]:
    """The checkpoint as `trainer.save_checkpoint` writes it; that writes a file only."""
    whole: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return whole


def forget_loaded(trainer: Any) -> None:
    """What `ckpt_path=` named is not loaded."""
    trainer._checkpoint_connector._loaded_checkpoint = {}


@contextmanager
def loading(trainer: Any, whole: dict[str, Any]) -> Iterator[Any]:
    """Lightning's own loading of a checkpoint that is in memory; gives what has the `restore_...` methods."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = whole
    try:
        yield connector
    finally:
        connector._loaded_checkpoint = {}


# --- loops


def load_loops(fit_loop: Any, state: dict[str, Any]) -> None:
    """Counters only: Lightning's own way to restart in the middle skips a validation that is due."""
    fit_loop.load_state_dict(state)
    for loop in _loops(fit_loop):
        for name in _LOOP_FLAGS:
            setattr(loop, name, False)


def _loops(loop: Any) -> Iterator[Any]:
    yield loop
    for value in vars(loop).values():
        if hasattr(value, "_loaded_from_state_dict"):
            yield from _loops(value)


def train_loaders(trainer: Any) -> list[Any] | None:
    """The train loaders of this fit; None: they are not set up."""
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else list(combined.flattened)


def replace_train_loaders(trainer: Any, loaders: list[Any]) -> None:
    """Others in their place, before the first batch."""
    loop = trainer.fit_loop
    loop._combined_loader.flattened = loaders
    loop._data_fetcher.setup(loop._combined_loader)
    iter(loop._data_fetcher)


def epoch_of_loader(trainer: Any) -> Any:
    """The epoch in which the train loader was made: from it Lightning counts to the next that it makes anew."""
    return trainer.fit_loop._last_train_dl_reload_epoch


def set_epoch_of_loader(trainer: Any, epoch: Any) -> None:
    """Make it that one."""
    trainer.fit_loop._last_train_dl_reload_epoch = epoch


# --- the step


def closures(
    trainer: Any, library: str, make: Callable[[Any, Any, Callable[[Any], Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Put what `make(closure, its arguments, training_step)` gives in the place of every closure; returns the undoing.

    Closures of steps without a backward pass are left alone. Without this a batch cannot be done in micro-batches.
    """
    call: Any = import_module(f"{library}.trainer.call")
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    original = loop._make_closure

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = original(kwargs, optimizer, batch_idx)
        if closure._backward_fn is not None:

            def training_step(batch: Any) -> Any:
                return call._call_strategy_hook(
                    trainer, "training_step", *{**kwargs, "batch": batch}.values()
                )

            closure.closure = make(closure, kwargs["batch"], training_step)
        return closure

    loop._make_closure = make_closure
    return partial(vars(loop).pop, "_make_closure", None)


def zero_gradients(closure: Any) -> None:
    """As Lightning does before a step, if it is due."""
    if closure._zero_grad_fn is not None:
        closure._zero_grad_fn()


def backward_of(closure: Any) -> Callable[[Any], None]:
    """Lightning's own backward pass of a loss: hooks and scaling included."""
    backward: Callable[[Any], None] = closure._backward_fn
    return backward
