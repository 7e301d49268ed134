"""An error in a notebook's loop shows the person's own lines, and none of ours between them."""

from __future__ import annotations

import re
import sys

import pytest

import buoy

torch = pytest.importorskip("torch")
ultratb = pytest.importorskip("IPython.core.ultratb")


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
