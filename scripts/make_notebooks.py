"""Writes examples/*.ipynb from the cells below: a notebook written by hand is hard to review."""

from __future__ import annotations

import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"

TORCH_IMAGES = """
# %% [markdown]
# # Image classification in PyTorch that survives its session
# Interrupt it, restart the kernel, run it again: it goes on with the next batch.
# %%
%load_ext buoy
# %%
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import buoy

DATA = os.environ.get("IMAGES", "images.npz")  # arrays `images` (N, H, W, 3, uint8) and `labels` (N)
EPOCHS = int(os.environ.get("EPOCHS", 10))
torch.manual_seed(0)
# %%
if not os.path.exists(DATA):  # nothing at hand: made-up images of three classes, bright, brighter, brightest
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 600)
    images = (random.random((600, 32, 32, 3)) * 80 + labels[:, None, None, None] * 80).astype(np.uint8)
    np.savez(DATA, images=images, labels=labels)
# %%
class Images(Dataset):
    def __init__(self, path):
        stored = np.load(path)
        self.images, self.labels = stored["images"], stored["labels"]  # uint8: a quarter of float32

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 255
        if torch.rand(()) < 0.5:  # augmentation; buoy makes it a function of (seed, epoch, place)
            image = image.flip(-1)
        return image, int(self.labels[index])


data = Images(DATA)
loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
# %%
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 16, int(data.labels.max()) + 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

run = buoy.Run("runs/torch-images", keep=2)
run.track(model=model, optimizer=optimizer)
# %%
for epoch in run.epochs(EPOCHS):
    for batch in run.batches(loader):
        loss = run.backward(batch, lambda part: criterion(model(part[0]), part[1]))
        optimizer.step()
        optimizer.zero_grad()
    run.metric(loss=float(loss))
    print(f"epoch {epoch}: loss {float(loss):.4f}")
# %%
%buoy top
"""

KERAS_IMAGES = """
# %% [markdown]
# # Image classification in Keras that survives its session
# Run it again after any crash: `fit` goes on in the middle of the epoch.
# %%
%load_ext buoy
# %%
import os

import keras
import numpy as np

import buoy

DATA = os.environ.get("IMAGES", "images.npz")  # arrays `images` (N, H, W, 3, uint8) and `labels` (N)
EPOCHS = int(os.environ.get("EPOCHS", 10))
keras.utils.set_random_seed(0)
# %%
if not os.path.exists(DATA):  # nothing at hand: made-up images of three classes, bright, brighter, brightest
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 600)
    images = (random.random((600, 32, 32, 3)) * 80 + labels[:, None, None, None] * 80).astype(np.uint8)
    np.savez(DATA, images=images, labels=labels)

stored = np.load(DATA)
images, labels = stored["images"], stored["labels"]
# %%
model = keras.Sequential([
    keras.Input(images.shape[1:]),
    keras.layers.Rescaling(1 / 255),
    keras.layers.RandomFlip("horizontal"),
    keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(int(labels.max()) + 1),
])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
# %%
history = model.fit(images, labels, batch_size=64, epochs=EPOCHS, verbose=2,
                    callbacks=[buoy.keras.Guard("runs/keras-images")])
# %%
%buoy top
"""

CHARACTERS = """
# %% [markdown]
# # A character-level transformer that survives its session
# Any text file will do. The batch stays as it is; how much of it is on the device at once is buoy's to choose.
# %%
%load_ext buoy
# %%
import argparse
import inspect
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import buoy

FILE = os.environ.get("TEXT", "input.txt")
if os.path.exists(FILE):
    with open(FILE, encoding="utf-8") as file:
        TEXT = file.read()
else:  # nothing at hand: Python's own code is a text too
    TEXT = inspect.getsource(argparse)[:50_000]
EPOCHS = int(os.environ.get("EPOCHS", 5))
LENGTH, WIDTH = 64, 64
torch.manual_seed(0)
# %%
letters = sorted(set(TEXT))
codes = torch.tensor([letters.index(letter) for letter in TEXT])


class Pieces(Dataset):
    def __len__(self):
        return (len(codes) - 1) // LENGTH

    def __getitem__(self, index):
        start = index * LENGTH
        return codes[start : start + LENGTH], codes[start + 1 : start + LENGTH + 1]


loader = DataLoader(Pieces(), batch_size=32, shuffle=True, drop_last=True)
# %%
class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(letters), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, len(letters))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.letters(x) + self.places(torch.arange(x.shape[1]))
        return self.out(self.blocks(h, mask=mask, is_causal=True))


model = Speaker()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

run = buoy.Run("runs/characters")
run.track(model=model, optimizer=optimizer, schedule=schedule)
# %%
def loss_of(part):
    x, y = part
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


for epoch in run.epochs(EPOCHS):
    for batch in run.batches(loader):
        loss = run.backward(batch, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"epoch {epoch}: loss {float(loss):.4f}")
# %%
%buoy top
"""


def notebook(text: str) -> dict[str, object]:
    cells = []
    for number, piece in enumerate(re.split(r"^# %%", text.strip("\n"), flags=re.MULTILINE)[1:]):
        first, _, body = piece.partition("\n")
        source = body.strip("\n").splitlines(keepends=True)
        shared = {"id": f"cell-{number}", "metadata": {}}
        if "[markdown]" in first:
            cells.append(
                {"cell_type": "markdown", **shared, "source": [line.removeprefix("# ") for line in source]}
            )
        else:
            cells.append(
                {"cell_type": "code", **shared, "execution_count": None, "outputs": [], "source": source}
            )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    for name, text in (
        ("torch_images", TORCH_IMAGES),
        ("keras_images", KERAS_IMAGES),
        ("characters", CHARACTERS),
    ):
        (EXAMPLES / f"{name}.ipynb").write_text(json.dumps(notebook(text), indent=1) + "\n")


if __name__ == "__main__":
    main()
