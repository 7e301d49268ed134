"""Counts the steps of Keras's own training loop without a change in the script, and marks evaluation and saving.

A GradientTape loop inside `tf.function` runs no Python per step: there `buoy.watch().step()` counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from buoy.errors import trouble
from buoy.flight.last_words import leave_out_ours
from buoy.flight.recorder import Recorder


def install(recorder: Recorder) -> None:
    """Hook this process's Keras; called once, right after it was imported."""
    import keras

    beacon = recorder.beacon
    steps = _StepCounter(recorder)
    loop = keras.callbacks.CallbackList
    _before(loop, "on_train_begin", lambda logs=None: steps.training_begins())
    _before(loop, "on_epoch_begin", lambda epoch, logs=None: steps.epoch_begins(epoch))
    _before(loop, "on_train_batch_end", lambda batch, logs=None: steps.batch_ends(batch))
    _before(loop, "on_test_begin", lambda logs=None: beacon.phase("eval"))
    _before(loop, "on_predict_begin", lambda logs=None: beacon.phase("eval"))
    for name in ("save", "save_weights"):
        _mark_saving(keras.Model, name, recorder)


class _StepCounter:
    """Keras counts batches per epoch, and several at once with `steps_per_execution`; the beacon counts for good."""

    def __init__(self, recorder: Recorder) -> None:
        self._beacon = recorder.beacon
        self._counted = 0

    def training_begins(self) -> None:
        self._counted = 0

    def epoch_begins(self, epoch: int) -> None:
        self._counted = 0
        self._beacon.epoch(int(epoch))

    def batch_ends(self, batch: int) -> None:
        done = int(batch) + 1
        self._beacon.step(self._beacon.count + done - self._counted)
        self._counted = done


def _before(owner: Any, name: str, action: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - counting must never stop a training
            trouble("counting Keras's steps", error)
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    setattr(owner, name, hooked)


def _mark_saving(owner: Any, name: str, recorder: Recorder) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with recorder.phase("checkpoint"):
                result = original(self, filepath, *args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise
        recorder.event("save", what="keras", path=str(filepath))
        return result

    setattr(owner, name, save)
