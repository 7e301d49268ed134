"""The child of `bench resume` that trains with Keras: up to a batch, or as far as its next one."""

from __future__ import annotations

import os
import signal
import sys
import time

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}

import keras
import numpy

import buoy.keras


class Watch(keras.callbacks.Callback):
    """Saves and dies after a batch; or tells how long it took to begin the next one."""

    def __init__(self, guard: buoy.keras.Guard, stop_at: str) -> None:
        super().__init__()
        self._guard, self._stop_at = guard, stop_at

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if self._stop_at == "None":
            print(batch, time.time() - float(os.environ["BENCH_BORN"]), flush=True)
            os._exit(0)
        if str(batch) == self._stop_at:  # what was asked for at the end of the batch before is handed over
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if str(batch + 1) == self._stop_at:
            self._guard.save()


def main() -> None:
    folder, stop_at = sys.argv[1], sys.argv[2]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    x = numpy.zeros((480_000, 4), "float32")
    guard = buoy.keras.Guard(folder, save="24h")
    model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0, callbacks=[guard, Watch(guard, stop_at)])


if __name__ == "__main__":
    main()
