"""Remedies by one argument: applied for the whole run, told in a line, and kept in the flight log."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import buoy
from buoy.errors import UsageError
from buoy.flight import recorder
from buoy.torch.step.remedies import Switches
from tests.processes import events

PROGRAM = """
import sys, resource, torch, buoy
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = buoy.Run(sys.argv[1], save=2, memory_cap="64GB", remedies=("amp", "checkpointing", "expandable_segments"))
print("capped", resource.getrlimit(resource.RLIMIT_DATA)[0] < 66_000_000_000)
run.track(model=model, optimizer=optimizer)
for x in run.batches([torch.randn(4, 8)] * 4):
    run.backward(x, lambda part: model(part).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def _nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


@pytest.mark.usefixtures("_nothing_is_recorded")
def test_each_is_a_line_and_an_event_and_a_resumed_run_says_when_it_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")], capture_output=True, text=True, timeout=400
    )

    assert done.stdout == "capped True\n", done.stderr
    assert "buoy: remedy applied: expandable segments, through PYTORCH_CUDA_ALLOC_CONF" in done.stderr
    assert "buoy: remedy applied: activation checkpointing, 3 blocks of Sequential" in done.stderr
    assert done.stderr.count("buoy: remedy applied: mixed precision, bfloat16 on cpu") == 1
    told = [event for event in events(tmp_path / "run") if event["kind"] == "remedy"]
    assert [event["name"] for event in told] == ["expandable_segments", "checkpointing", "amp"]
    assert told[1]["blocks"] == 3 and told[2]["dtype"] == "bfloat16"

    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with buoy.Run(tmp_path / "run", remedies="checkpointing") as run:
        run.track(model=model, optimizer=optimizer)

    said = capsys.readouterr().err
    assert "remedies are checkpointing; until here they were amp, checkpointing, expandable_segments" in said


@pytest.mark.usefixtures("_nothing_is_recorded")
def test_what_cannot_be_is_refused_when_the_run_is_made(tmp_path: Path) -> None:
    """And the folder is free for the next try."""
    with pytest.raises(UsageError, match="unknown remedy"):
        buoy.Run(tmp_path, remedies=("magic",))
    with pytest.raises(UsageError, match="cannot read a size"):
        buoy.Run(tmp_path, memory_cap="eight")
    with pytest.raises(UsageError, match="less than this process already holds"):
        buoy.Run(tmp_path, memory_cap="1MiB")

    with buoy.Run(tmp_path) as run:
        run.track(counters={})


def checkpointed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    Switches("checkpointing", print, lambda *args, **values: None).track([model])
    return model


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights(copied: object) -> None:
    """An average of the weights is such a copy."""
    model = checkpointed()
    twin: nn.Module = copied(model)  # type: ignore[operator]
    x = torch.ones(2, 4)
    before = twin(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    assert torch.equal(twin(x), before)
    assert not model(x).any()


def test_mixed_precision_that_cannot_act_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    run = buoy.Run(remedies="amp")
    run.track(model=model, optimizer=optimizer)
    for _ in range(2):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()

    assert capsys.readouterr().err.count("this loop calls `.backward()` itself") == 1
