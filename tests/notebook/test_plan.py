"""`%buoy plan` in a real kernel."""

from __future__ import annotations

from pathlib import Path

from tests.notebook.kernels import Kernel, html

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


def test_a_plan_of_what_the_notebook_holds_is_shown_and_leaves_no_trace_in_the_kernel(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))
    kernel.run("%load_ext buoy")
    nothing = html(kernel.run("%buoy plan"))
    kernel.run(BUILD)
    shown = kernel.run("%buoy plan --on rtx-3090")
    untouched = kernel.run(UNTOUCHED)[0]["text"]
    top = html(kernel.run("%buoy top"))
    kernel.end()

    assert "no model in this notebook yet" in nothing
    assert [item["kind"] for item in shown] == ["display_data", "execute_result"]
    assert "model `model`, batch `batch`, optimizer `optimizer`, loss `criterion`" in html(shown[:1])
    assert "RTX 3090: fits" in html(shown[1:])
    assert untouched == "True\n"
    assert "step 0" in top  # a traced step is none of the training's
