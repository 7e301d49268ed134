"""What `buoy.Run` refuses, warns of and survives."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import buoy
from buoy.checkpoint.encoding import CannotSave
from buoy.checkpoint.values import CannotTrack
from buoy.flight import recorder
from tests.checkpoint.ground import forge
from tests.processes import buoy as command
from tests.processes import event


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in the test's own process, which must not become an attempt of a run."""
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def train(folder: Path, model: nn.Module, epochs: int = 1, **tracked: Any) -> buoy.Run:
    """A short training, saved at its end."""
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with buoy.Run(folder) as run:
        run.track(model=model, optimizer=optimizer, **tracked)
        for _ in run.epochs(epochs):
            for (x,) in run.batches(loader):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return run


def test_where_it_goes_on_is_said_only_once_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = buoy.Run(tmp_path)
    first.track(model=nn.Linear(4, 1))
    first.save()
    first.finish()
    with buoy.Run(tmp_path) as run, pytest.raises(buoy.BuoyError, match="nothing was loaded"):
        run.track(model=nn.Linear(5, 1))
    refused = capsys.readouterr().err
    with buoy.Run(tmp_path) as run:
        run.track(model=nn.Linear(4, 1))

    assert "going on from" not in refused
    assert capsys.readouterr().err.count("resumed from step 0") == 1


def test_another_model_is_refused_by_names_and_nothing_is_loaded(tmp_path: Path) -> None:
    train(tmp_path, nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), counters={"seen": 5})
    other = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    before = [parameter.detach().clone() for parameter in other.parameters()]
    counters: dict[str, int] = {}

    with buoy.Run(tmp_path) as run, pytest.raises(buoy.BuoyError) as refused:
        run.track(counters=counters, model=other)

    text = str(refused.value)
    assert "0.weight is (3, 4) in the checkpoint, but (2, 4) here" in text
    assert "2.bias is missing from the checkpoint" in text
    assert "nothing was loaded" in text
    assert counters == {}
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_at_most_ten_differences_are_listed(tmp_path: Path) -> None:
    train(tmp_path, nn.Linear(4, 1))
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))

    with buoy.Run(tmp_path) as run, pytest.raises(buoy.BuoyError, match="and 12 more"):
        run.track(model=deep)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    train(tmp_path, nn.Linear(4, 1))
    model = nn.Linear(4, 1)

    with buoy.Run(tmp_path) as run, pytest.raises(buoy.BuoyError, match="group 0 has 1 parameters"):
        run.track(model=model, optimizer=torch.optim.SGD([model.weight]))


def test_a_state_that_refuses_half_way_undoes_what_was_loaded(tmp_path: Path) -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: object) -> None:
            raise RuntimeError("no")

    train(tmp_path, nn.Linear(4, 1), history=[1, 2, 3], stubborn=Stubborn())
    history = [9]

    with buoy.Run(tmp_path) as run, pytest.raises(buoy.BuoyError, match="stubborn refused its state"):
        run.track(history=history, stubborn=Stubborn())

    assert history == [9]


def test_what_cannot_be_saved_is_refused_at_once_by_its_path(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"callbacks": [print]}

        def load_state_dict(self, state: object) -> None: ...

    buoy.Run().track(odd=Odd())  # keeps nothing
    run = buoy.Run(tmp_path)
    with pytest.raises(CannotSave, match=r"odd.callbacks\[0\] is a function"):
        run.track(odd=Odd())
    with pytest.raises(CannotSave, match="sparse"):
        run.track(table={"rows": torch.eye(3).to_sparse()})
    with pytest.raises(CannotSave, match="has no shape yet"):
        run.track(model=nn.LazyLinear(3))
    with pytest.raises(CannotTrack, match="keep it in a dict"):
        run.track(epoch=3)
    with pytest.raises(CannotTrack, match="no state_dict"):
        run.track(thing=object())
    with pytest.raises(buoy.BuoyError, match="is taken"):
        run.track(buoy=nn.Linear(1, 1))


def test_new_and_vanished_names_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, nn.Linear(4, 1), old={"a": 1})
    capsys.readouterr()

    train(tmp_path, nn.Linear(4, 1), epochs=2, new={"b": 2})

    words = capsys.readouterr().err
    assert "new is missing from the checkpoint of step 2: it starts as the script built it" in words
    assert "not tracked now, so not saved again: old" in words


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, and how to go on; what the script draws after its loop it draws again."""
    train(tmp_path, nn.Linear(4, 1), epochs=2)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    capsys.readouterr()
    again = train(tmp_path, nn.Linear(4, 1), epochs=2)

    assert again.step == 4 and torch.equal(torch.rand(3), drawn)
    words = capsys.readouterr().err
    assert f"{tmp_path} is finished at step 4" in words and "a folder of its own" in words
    assert train(tmp_path, nn.Linear(4, 1), epochs=1).step == 4
    assert train(tmp_path, nn.Linear(4, 1), epochs=3).step == 6


def test_fewer_epochs_than_were_done_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 1)
    run = buoy.Run(tmp_path)
    run.track(model=model)
    for epoch in run.epochs(3):
        for _ in run.batches([torch.ones(4)]):
            pass
        if epoch == 1:
            run.save()
            break
    run.finish()

    with buoy.Run(tmp_path) as again:
        assert list(again.epochs(2)) == []
    assert "training is already complete (2 epochs, step 2)" in capsys.readouterr().err


def test_a_second_run_in_the_process_closes_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = buoy.Run(tmp_path)
    second = buoy.Run(tmp_path)

    assert "was open in this process; it is closed now" in capsys.readouterr().err
    second.finish()
    first.finish()


def test_every_kind_of_state_comes_back(tmp_path: Path) -> None:
    """Tied weights, half types, scalars, numpy, generators, nested containers, DataParallel and compiled names."""
    import numpy as np

    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    odd = {
        1: (2.5, None),
        "set": {1, 2},
        "inf": float("inf"),
        "array": np.arange(3),
        "big": 1 << 80,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor(True),
    }
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    train(tmp_path, nn.DataParallel(tied), odd=odd, generator=generator)
    expected = torch.rand(3, generator=generator)

    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fresh[1].weight = fresh[0].weight
    other: dict[Any, Any] = {"gone": 1}
    anew = torch.Generator()
    with buoy.Run(tmp_path) as run:
        run.track(model=fresh, odd=other, generator=anew)

    assert torch.equal(fresh[0].weight, tied[0].weight) and fresh[1].weight is fresh[0].weight
    assert list(other) == list(odd) and other[1] == (2.5, None) and other["set"] == {1, 2}
    assert other["half"].dtype is torch.bfloat16 and other["empty"].shape == (0, 3) and other["flag"].item()
    assert other["big"] == 1 << 80 and (other["array"] == np.arange(3)).all()
    assert torch.equal(torch.rand(3, generator=anew), expected)


def test_replay_buffers_come_back_in_place(tmp_path: Path) -> None:
    """A deque keeps its length, an array its memory; what another one would need is told."""
    import numpy as np

    def replay(count: int) -> tuple[deque[Any], Any, dict[str, Any]]:
        steps = deque([(np.full(2, place), place) for place in range(count)], maxlen=4)
        return steps, np.full((2, 3), count, dtype=np.float32), {"inner": deque([count], maxlen=2)}

    steps, frames, held = replay(6)
    train(tmp_path, nn.Linear(4, 1), steps=steps, frames=frames, held=held)
    others = anew_steps, anew_frames, anew_held = replay(0)
    with buoy.Run(tmp_path) as run:
        run.track(steps=anew_steps, frames=anew_frames, held=anew_held)

    assert others[0] is anew_steps and [place for _, place in anew_steps] == [2, 3, 4, 5]
    assert anew_steps.maxlen == 4 and (anew_steps[0][0] == 2).all()
    assert (anew_frames == 6).all() and anew_frames.dtype == np.float32
    assert anew_held["inner"] == deque([6]) and anew_held["inner"].maxlen == 2
    with buoy.Run(tmp_path) as run, pytest.raises(buoy.BuoyError, match=r"is \(2, 3\) in the checkpoint"):
        run.track(frames=np.zeros((3, 3), dtype=np.float32))


def test_the_hint_for_an_object_without_a_state_can_be_followed(tmp_path: Path) -> None:
    class Replay:
        def __init__(self, seen: int) -> None:
            self.seen = seen

    replay, anew = Replay(7), Replay(0)
    with pytest.raises(CannotTrack, match=r"`run.track\(replay=vars\(replay\)\)` keeps its attributes"):
        buoy.Run().track(replay=replay)
    train(tmp_path, nn.Linear(4, 1), replay=vars(replay))
    with buoy.Run(tmp_path) as run:
        run.track(replay=vars(anew))

    assert anew.seen == 7


def test_metrics_belong_to_the_step_they_were_measured_at(tmp_path: Path) -> None:
    from buoy.checkpoint.store import Store

    loader = [torch.ones(1)] * 3
    with buoy.Run(tmp_path, keep=buoy.Keep(best="val_loss")) as run:
        for epoch in run.epochs(2):
            for _ in run.batches(loader):
                pass
            if epoch == 0:
                run.metric(val_loss=0.5)

    metrics = {entry.step: entry.about["metrics"] for entry in Store(str(tmp_path)).list()}
    assert metrics == {3: {"val_loss": 0.5}, 6: {}}


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with buoy.Run() as run:
        run.track(model=nn.Linear(1, 1))
        assert [list(run.batches([1, 2])) for _ in run.epochs(2)] == [[1, 2], [1, 2]]
        assert run.save() is None

    assert os.listdir(tmp_path) == []


def test_the_length_of_batches_is_the_loaders() -> None:
    loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=4)

    assert len(buoy.Run().batches(loader)) == len(loader) == 3


DIES_ONCE = """
import os, sys, torch, buoy
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(40, 2), batch_size=4)
run = buoy.Run(sys.argv[1], save=2)
run.track(model=model, optimizer=optimizer)
print("from", run.step)
for epoch in run.epochs(1):
    for x in run.batches(loader):
        model(x).sum().backward()
        optimizer.step()
        if run.step == 7 and not run.resumed:
            os.kill(os.getpid(), 9)
print("to", run.step)
"""


def test_buoy_run_restarts_a_run_from_its_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIES_ONCE)
    folder = tmp_path / "run"

    done = command(
        "run", "--run", str(folder), "--restart", "2", "--", sys.executable, str(script), str(folder)
    )

    assert done.returncode == 0, done.stderr
    assert "restart 1 of" in done.stderr and "after step 7" in done.stderr
    assert "from 6\nto 10" in done.stdout
    saved = event(folder, "save")
    assert saved is not None and saved["step"] == 2


def test_an_interrupted_cell_that_is_run_again_goes_on(tmp_path: Path) -> None:
    """The same Run, the same loop, after a KeyboardInterrupt in the middle of the second epoch."""
    seen: list[tuple[int, int]] = []
    run = buoy.Run(tmp_path)

    def cell(stop_at: int | None) -> None:
        for epoch in run.epochs(2):
            for batch in run.batches([0, 1, 2, 3]):
                seen.append((epoch, batch))
                if len(seen) == stop_at:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell(6)
    cell(None)
    run.finish()

    assert seen == [(epoch, batch) for epoch in range(2) for batch in range(4)]


def test_a_state_that_becomes_unsavable_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: dict[str, object] = {}
    with buoy.Run(tmp_path, save=1) as run:
        run.track(notes=notes)
        for _ in run.batches([1, 2, 3]):
            notes["oops"] = print

    words = capsys.readouterr().err
    assert run.step == 3
    assert words.count("training continues") == 1 and "notes.oops is a function" in words


def test_a_loader_that_iterates_in_its_own_way_is_read_again(tmp_path: Path) -> None:
    """accelerate's loaders override `__iter__`: they are resumed by reading, not by index."""
    from accelerate.data_loader import prepare_data_loader

    def loader() -> Any:
        data = TensorDataset(torch.arange(24.0))
        return prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True), put_on_device=False)

    def walk(folder: Path, stop_at: int | None) -> list[list[float]]:
        torch.manual_seed(3)
        run, seen = buoy.Run(folder, save=1, seed=1), []
        for _ in run.epochs(1):
            for (batch,) in run.batches(loader()):
                seen.append(batch.tolist())
                if len(seen) == stop_at:
                    run.save()
                    break
            else:
                continue
            break
        run.finish()
        return seen

    whole = walk(tmp_path / "whole", None)
    first, rest = walk(tmp_path / "cut", 2), walk(tmp_path / "cut", None)

    assert len(whole) == 6 and first + rest == whole


def test_a_metric_of_torchmetrics_keeps_what_it_has_counted(tmp_path: Path) -> None:
    from torchmetrics import MeanMetric

    mean = MeanMetric()
    mean.update(torch.tensor([1.0, 3.0]))
    train(tmp_path, nn.Linear(4, 1), mean=mean)

    fresh = MeanMetric()
    with buoy.Run(tmp_path) as run:
        run.track(mean=fresh)
    fresh.update(torch.tensor([5.0, 7.0]))

    assert fresh.compute().item() == 4.0


def test_a_loader_built_for_each_epoch_is_let_go() -> None:
    import gc
    import weakref

    run, built = buoy.Run(), []
    for _ in run.epochs(3):
        loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2, shuffle=True)
        built.append(weakref.ref(loader))
        assert len(list(run.batches(loader))) == 2
    del loader
    gc.collect()

    assert [reference() for reference in built] == [None, None, None]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["buoy"], 7),
        (["buoy", "ranks"], None),
        (["buoy", "ranks", 0], "x"),
        (["buoy", "ranks", 0, "position"], {"epoch": []}),
        (["buoy", "ranks", 0, "buffers"], "x"),
        (["buoy", "ranks", 0, "rng"], [1]),
        (["model"], 3),
        (["optimizer"], True),
        (["optimizer", "param_groups"], "x"),
        (["optimizer", "param_groups", 0], {"params": {}}),
        (["optimizer", "param_groups", 0, "lr"], "fast"),
        (["counters"], {"$": "tuple", "v": 3}),
    ],
    ids=str,
)
def test_what_fits_its_checksums_and_is_not_what_a_run_saves_is_refused_in_words(
    path: list[Any], value: object, tmp_path: Path
) -> None:
    train(tmp_path, nn.Linear(4, 1), counters={"seen": 3})
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    values = json.loads((folder / "values.json").read_bytes())
    owner = values
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    forge(folder, values)
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())

    with pytest.raises(buoy.BuoyError) as refused:
        train(tmp_path, nn.Linear(4, 1), epochs=2, counters={"seen": 0})

    assert refused.value.received and refused.value.hint
    assert (
        sorted((path.name, path.read_bytes()) for path in folder.iterdir() if path.name != "damaged")
        == before
    )
