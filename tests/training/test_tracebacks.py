"""An error shows the person's own lines and the framework's, and none of ours between them; our own shows all."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import pytest

import buoy
from buoy.flight.last_words import leave_out_ours
from tests.processes import buoy as command

torch = pytest.importorskip("torch")
ultratb = pytest.importorskip("IPython.core.ultratb")

# Each case fails in a line of the person's own, is caught there, and its traceback is printed as a logger would.
BEGINNING = """
import sys, traceback

def mine(*_, **__):
    raise ArithmeticError("mine")

class Broken:
    def __reduce__(self): mine()

def show(case):
    try:
        CASES[case]()
    except Exception:
        print(traceback.format_exc())
"""
TORCH = (
    BEGINNING
    + """
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self, fails=True): self.fails = fails
    def __len__(self): return 8
    def __getitem__(self, index): return mine() if self.fails and index == 5 else torch.ones(4)

class Items(Data):
    def __getitems__(self, indices): return mine()

class Optimizer(torch.optim.SGD):
    def step(self, closure=None): mine()

class Net(torch.nn.Linear):
    def train(self, mode=True): return super().train(mode) if mode else mine()

def run_of(kind=torch.optim.SGD):
    import buoy
    model = torch.nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)
    return run, model, optimizer

def step(kind=torch.optim.SGD, loss=None, scaler=None):
    run, model, optimizer = run_of(kind)
    for batch in run.batches(DataLoader(Data(fails=False), batch_size=2)):
        run.backward(batch, loss or (lambda part: model(part).sum()), scaler=scaler)
        scaler.step(optimizer) if scaler else optimizer.step()

CASES = {
    "loader": lambda: list(DataLoader(Data(), batch_size=2)),
    "worker": lambda: list(DataLoader(Data(), batch_size=2, num_workers=1)),
    "save": lambda: torch.save(Broken(), "x.pt"),
    "save nowhere": lambda: torch.save({}, "nowhere/x.pt"),
    "eval": lambda: Net(4, 1).eval(),
    "run loader": lambda: [batch for batch in run_of()[0].batches(DataLoader(Data(), batch_size=2))],
    "run next": lambda: next(run_of()[0].batches(DataLoader(Items(), batch_size=2))),
    "run worker": lambda: list(run_of()[0].batches(DataLoader(Data(), batch_size=2, num_workers=1, shuffle=True))),
    "run items": lambda: list(run_of()[0].batches(DataLoader(Items(), batch_size=2, num_workers=1))),
    "run worker start": lambda: list(
        run_of()[0].batches(DataLoader(Data(), batch_size=2, num_workers=1, worker_init_fn=mine))),
    "run loss": lambda: step(loss=mine),
    "run step": lambda: step(Optimizer),
    "run scaler": lambda: step(Optimizer, scaler=torch.amp.GradScaler("cpu")),
}
"""
)
KERAS = (
    BEGINNING
    + """
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras, numpy, tempfile

class Layer(keras.layers.Layer):
    def call(self, x, training=False): return mine() if training else x

class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None): mine()

def fit(*layers, width=4, callbacks=(), guarded=False):
    model = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    if guarded:
        import buoy
        callbacks = [buoy.keras.Guard(tempfile.mkdtemp(dir=".")), *callbacks]
    model.fit(numpy.ones((8, width)), numpy.ones((8, 1)), verbose=0, callbacks=list(callbacks))

CASES = {
    "callback": lambda: fit(callbacks=[Callback()]),
    "layer": lambda: fit(Layer()),
    "shape": lambda: fit(width=5),
    "save": lambda: keras.Sequential([keras.layers.Dense(1)]).save("x.wrong"),
    "guarded callback": lambda: fit(callbacks=[Callback()], guarded=True),
    "guarded layer": lambda: fit(Layer(), guarded=True),
    "guarded shape": lambda: fit(width=5, guarded=True),
}
"""
)
SEPARATOR = "=" * 20


def shown(script: str, folder: Path, ending: str = "") -> dict[str, str]:
    """The traceback of each case."""
    (folder / "train.py").write_text(
        f"{script}\nfor case in CASES:\n    print({SEPARATOR!r}, case, flush=True)\n    show(case)\n{ending}"
    )
    done = command("run", "--run", "recorded", "train.py", cwd=folder, timeout=400)
    parts = [part.partition("\n") for part in done.stdout.split(SEPARATOR + " ")[1:]]
    return {name: text for name, _, text in parts} | {"at last": done.stderr}


@pytest.mark.parametrize("script", [TORCH, KERAS], ids=["torch", "keras"])
def test_no_frame_of_ours_is_between_those_of_others(script: str, tmp_path: Path) -> None:
    found = shown(script, tmp_path)
    cases = [name for name in found if name != "at last"]

    assert len(cases) > 6
    for name in cases:
        assert "Traceback (most recent call last)" in found[name] and 'train.py", line' in found[name], name
        assert "/src/buoy/" not in found[name], found[name]
        if not {"nowhere", "shape", "save"} & set(name.split()):
            assert "in mine" in found[name], found[name]


def test_an_uncaught_one_has_none_either_and_the_verdict_names_the_line(tmp_path: Path) -> None:
    script = TORCH.partition("CASES = ")[0]
    (tmp_path / "train.py").write_text(
        script + "\nrun, *_ = run_of()\nfor batch in run.batches(DataLoader(Data())): pass\n"
    )
    said = command("run", "--run", "recorded", "train.py", cwd=tmp_path).stderr

    assert "ArithmeticError: mine" in said and "in mine" in said and "in __getitem__" in said
    assert "/src/buoy/" not in said
    assert "train.py:5 in mine" in command("why", "recorded", cwd=tmp_path).stdout


def test_our_own_error_shows_where_it_comes_from() -> None:
    def fails() -> None:
        buoy.Run().track(model=object())

    try:
        fails()
    except buoy.BuoyError as error:
        before = traceback.format_tb(error.__traceback__)
        leave_out_ours(error)

        assert "/src/buoy/" in before[-1]
        assert traceback.format_tb(error.__traceback__) == before


def test_an_error_in_the_loss_is_shown_without_the_frames_between(capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 1)
    run = buoy.Run()
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of_mine(part: object) -> object:
        raise ArithmeticError("in the person's own line")

    try:
        for batch in run.batches([torch.ones(2, 4)]):
            run.backward(batch, loss_of_mine)
    except ArithmeticError:
        shown = re.sub(r"\x1b\[[0-9;]*m", "", ultratb.VerboseTB(include_vars=False).text(*sys.exc_info()))

    assert "loss_of_mine" in shown
    assert "run.backward(batch, loss_of_mine)" in shown
    assert "buoy/training" not in shown
    assert "buoy/torch" not in shown
