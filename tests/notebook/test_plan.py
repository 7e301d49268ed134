"""`%buoy plan` in a real kernel."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.notebook.kernels import Kernel, html
from tests.processes import buoy

BUILD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(8, 2)
batch = torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
before = model.weight.clone(), torch.get_rng_state()
"""
UNTOUCHED = """
same = torch.equal(before[0], model.weight) and torch.equal(before[1], torch.get_rng_state())
print(same and model.weight.grad is None and not optimizer.state)
"""

TRAIN = """
import buoy
run = buoy.Run("runs/lines", time_limit="12h", plan=Out[4], micro_batch=2)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(1):
    for part in run.batches([batch] * 3):
        run.backward(part, lambda mb: criterion(model(mb[0]), mb[1]))
        optimizer.step(); optimizer.zero_grad()
run
"""


def test_a_plan_of_what_the_notebook_holds_is_shown_and_leaves_no_trace_in_the_kernel(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))
    kernel.run("%load_ext buoy")
    nothing = html(kernel.run("%buoy plan"))
    kernel.run(BUILD)
    shown = kernel.run("%buoy plan --on this")
    untouched = kernel.run(UNTOUCHED)[0]["text"]
    top = html(kernel.run("%buoy top"))
    card = html(kernel.run(TRAIN))
    report = html(kernel.run("%buoy report"))
    kernel.run(f"!{sys.executable} -m buoy top runs/lines")  # about the kernel that waits for it: it must end
    listed = buoy("runs", cwd=tmp_path)
    kernel.end()
    asked = buoy("why", "runs/lines", cwd=tmp_path)

    assert "no model in this notebook yet" in nothing
    kinds = [item["kind"] for item in shown]
    assert (kinds[0], {*kinds[1:-1]}, kinds[-1]) == (
        "display_data",
        {"update_display_data"},
        "execute_result",
    )
    assert "model `model`, batch `batch`, optimizer `optimizer`, loss `criterion`" in html(shown[:1])
    assert "tracing a step for this (CPU)" in html(shown[1:2])  # told while it is done
    assert "this (CPU): fits; seeking the largest batch" in html(shown[2:3])
    assert "<b>this (CPU): fits</b>" in html(shown[-1:])
    assert untouched == "True\n"
    assert "no step yet" in top  # a traced step is none of the training's
    assert "step 3" in card
    assert "of 12 h" in card
    assert "planned for this: fits" in card
    assert "samples at once: planned the whole batch (4), was 2" in card
    assert "Plan and reality" in report
    assert "the whole batch (4)" in report
    # The kernel's recorder ran before the run was made: its folder knows where it is recorded.
    assert sorted(line.split()[:2] for line in listed.stdout.splitlines()[1:]) == [
        ["runs/lines", "finished"],
        ["runs/notebook", "idle"],
    ]
    assert "finished: lines, attempt 1" in asked.stdout
