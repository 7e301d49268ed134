"""What TensorFlow's allocator held at most on the GPU in this process, to compare a plan with."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from buoy.machine import limits


def read() -> dict[str, Any] | None:
    """`{"name", "total", "allocated"}` of the device in use; None where no GPU was."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    card = limits.read().gpus[0]
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"name": str(card["name"]), "total": int(card["total"]), "allocated": int(peak)}
