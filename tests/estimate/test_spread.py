"""Tensors over several devices are not loaded for a trace, come in when they are asked for, and change nothing."""

from __future__ import annotations

from pathlib import Path

from tests.estimate.left_out import told_by

_BUILD = """
import torch
from torch import nn


def build():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return net, (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))


def build_curious():
    from torch.distributed.tensor import DTensor

    assert issubclass(DTensor, torch.Tensor)
    return build()
"""

_TRACE = """
import gc, json, sys
import torch

gc.disable()
from buoy.estimate.request import Request
from buoy.estimate.trace_torch import trace_request

def traced(name):
    return trace_request(Request("torch", {"build": f"{sys.argv[1]}:{name}"}, device="t4")).events

first = traced("build")
left_out = "torch.distributed.tensor._api" not in sys.modules
import torch.distributed.tensor._api  # a part of it, by its own name
from torch.distributed.tensor import DTensor
came_in = DTensor is torch.distributed.tensor._api.DTensor is sys.modules["torch.distributed.tensor"].DTensor
print(json.dumps([left_out, came_in, traced("build_curious") == first]))
"""


def test_tensors_over_several_devices_are_left_out_until_they_are_asked_for(tmp_path: Path) -> None:
    left_out, came_in, same_with_them = told_by(_TRACE, _BUILD, tmp_path)

    assert left_out
    assert came_in
    assert same_with_them
