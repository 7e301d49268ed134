"""torch's compiler is not loaded for a trace, comes in when it is asked for, and changes nothing that is traced."""

from __future__ import annotations

from pathlib import Path

from tests.estimate.left_out import told_by

_BUILD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


def build():
    return Model(), (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))


def build_curious():
    model, batch = build()

    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            import torch._dynamo.utils  # in the middle of the first step

            return self.inner(x)

    return Curious(), batch
"""

_TRACE = """
import gc, json, sys
import torch

gc.disable()
from buoy.estimate.request import Request
from buoy.estimate.trace_compiler import has_come_in
from buoy.estimate.trace_torch import trace_request

def traced(name):
    return trace_request(Request("torch", {"build": f"{sys.argv[1]}:{name}"}, device="t4")).events

first = traced("build")
left_out = not has_come_in()
curious = traced("build_curious")
came_in = has_come_in() and callable(torch._dynamo.optimize) and torch._dynamo is sys.modules["torch._dynamo"]
with_it = traced("build")
compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()
print(json.dumps([left_out, came_in, compiled, first == with_it, curious == first]))
"""


def test_compiler_is_left_out_until_it_is_asked_for_and_the_trace_is_the_same(tmp_path: Path) -> None:
    left_out, came_in, compiled, same_with_it, same_when_it_comes_in = told_by(_TRACE, _BUILD, tmp_path)
    assert left_out
    assert came_in
    assert compiled == 2.0
    assert same_with_it
    assert same_when_it_comes_in
