"""Symbolic sizes are not loaded for a trace, come in when they are asked for, and change nothing that is traced."""

from __future__ import annotations

from pathlib import Path

from tests.estimate.left_out import told_by

_BUILD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, curious):
        super().__init__()
        self.curious = curious
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)

    def forward(self, x):
        if self.curious:
            from torch.fx.experimental.symbolic_shapes import ShapeEnv

            assert ShapeEnv() is not None
        return self.layer(self.net(x)[:, None].expand(-1, 5, -1)).mean(1)


def build():
    return Model(False), (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))


def build_curious():
    return Model(True), (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))
"""

_TRACE = """
import gc, itertools, json, sys
import torch

gc.disable()
from buoy.estimate import trace_symbols
from buoy.estimate.request import Request
from buoy.estimate.trace_torch import trace_request

def traced(name):
    return trace_request(Request("torch", {"build": f"{sys.argv[1]}:{name}"}, device="t4")).events

first = traced("build")
left_out = not trace_symbols.have_come_in() and "sympy.core" not in sys.modules
import sympy as held
truths, numbers = [(True,), (False,)], [(0,), (7,), (-3,), (True,)]
sequences = [((), []), ([1, 2], (1, 2)), ([1, (2, 3)], (1, [2, 4])), (torch.Size([4, 5]), [4, 5]), ((1,), (1, 1))]
anything = [((1, 2),), ([1.5, {"a": 2}],), (torch.zeros(2, 3),), (None,)]
asked = [
    (name, args)
    for names, cases in (
        (("guard_or_true", "guard_or_false", "guard_size_oblivious", "statically_known_true", "expect_true"), truths),
        (("guarding_hint_or_throw",), numbers),
        (("is_symbolic", "is_nested_int", "has_guarding_hint"), [*numbers, (2.5,)]),
        (("sym_and", "sym_or"), [*truths, *itertools.product((True, False), repeat=3)]),
        (("sym_eq",), [*sequences, (3, 3), (3, 4)]),
        (("has_free_unbacked_symbols", "has_free_symbols", "free_symbols", "free_unbacked_symbols"), anything),
        (("_iterate_exprs",), anything),
        (("_iterate_nodes",), anything),
        (("compute_unbacked_bindings",), [(None, torch.zeros(2))]),
    )
    for name in names
    for args in cases
]

def told(function, args):
    value = function(*args)
    return repr(value if isinstance(value, (bool, int, type(None))) else list(value))

before = [told(trace_symbols._ANSWERS[name], args) for name, args in asked]
untold = set(trace_symbols._ANSWERS) - {name for name, _ in asked} - {"GuardOnDataDependentSymNode"}
left_out = left_out and not trace_symbols.have_come_in()
curious = traced("build_curious")
real = sys.modules[trace_symbols.NAME]
wrong = [
    (name, repr(args), here)
    for (name, args), here in zip(asked, before)
    if told(getattr(real, name), args) != here
]
came_in = held.Basic is sys.modules["sympy"].Basic and issubclass(held.Symbol, held.Basic)
print(json.dumps([left_out, came_in, wrong, sorted(untold), first == traced("build"), curious == first]))
"""


def test_symbols_are_left_out_until_they_are_asked_for_and_every_answer_is_torchs_own(tmp_path: Path) -> None:
    left_out, came_in, wrong, untold, same_with_them, same_when_they_come_in = told_by(
        _TRACE, _BUILD, tmp_path
    )
    assert left_out
    assert came_in
    assert wrong == []
    assert untold == []
    assert same_with_them
    assert same_when_they_come_in
