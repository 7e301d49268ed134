"""A small training as users of the first version wrote it.

    $ python training.py FOLDER torch|keras LOSSES [STEP [SIGNAL]]

Its losses go to the file LOSSES, a line each; with STEP the process kills itself there, as the kernel would, or by
the signal whose number follows.
"""

from __future__ import annotations

import os
import signal
import sys


def at_step(step: int) -> None:
    if len(sys.argv) > 4 and step == int(sys.argv[4]):
        os.kill(os.getpid(), int(sys.argv[5]) if len(sys.argv) > 5 else signal.SIGKILL)


def note(loss: float) -> None:
    with open(sys.argv[3], "a", encoding="utf-8") as file:
        file.write(f"{loss:.9f}\n")


def of_torch(folder: str) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import buoy

    torch.manual_seed(1)
    torch.set_num_threads(1)
    inputs = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    history: list[float] = []
    run = buoy.Run(folder, save=2)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, history=history)
    for _ in run.epochs(3):
        for x, y in run.batches(loader):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
            note(loss.item())
            at_step(len(history))
        scheduler.step()


def of_keras(folder: str) -> None:
    import keras
    import numpy as np

    import buoy

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            step = int(self.model.optimizer.iterations.numpy())
            note((logs or {})["loss"])
            at_step(step)

    keras.utils.set_random_seed(1)
    inputs = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential(
        [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    guard = buoy.keras.Guard(folder, save=2)
    model.fit(inputs, inputs.sum(1), batch_size=8, epochs=3, verbose=0, callbacks=[guard, Note()])


if __name__ == "__main__":
    {"torch": of_torch, "keras": of_keras}[sys.argv[2]](sys.argv[1])
