"""Optimizers that a training step of one's own builds itself: their saved state waits until they have variables.

A GAN's `compile(d_optimizer, g_optimizer)` only keeps them; which variables each trains is known when its first step
is traced. The state is then loaded at once, before that step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf


def load_when_built(optimizer: Any, stored: Mapping[str, Any], load: Callable[[], None]) -> None:
    """Call `load`, which loads what is stored, as soon as the optimizer has variables."""
    own = vars(optimizer)  # not an attribute that Keras should track
    own.pop("build", None)  # of an earlier try
    original = optimizer.build

    def build(variables: Any) -> None:
        own.pop("build", None)
        # The step may be traced just now: this is done once, and is no part of the step.
        with tf.init_scope():
            original(variables)
            load()

    build.stored = stored  # type: ignore[attr-defined]
    own["build"] = build


def waiting_state(optimizer: Any) -> dict[str, Any]:
    """What is to be loaded into an optimizer that is not built yet, for the next checkpoint; empty if nothing is."""
    stored = getattr(vars(optimizer).get("build"), "stored", {})
    return {name: tf.convert_to_tensor(value) for name, value in stored.items()}
