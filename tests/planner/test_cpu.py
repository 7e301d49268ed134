"""Plans for a CPU: what the whole process keeps is compared with the RAM, and the largest batch is one that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from buoy.estimate.child import Request
from buoy.estimate.devices import by_id
from buoy.estimate.result import estimate
from buoy.estimate.trace import Trace
from buoy.planner.plan import make_plan
from buoy.planner.result import FITS, Plan
from buoy.planner.session import Session
from buoy.planner.targets import Target
from buoy.view.plan import hint

MIB = 1 << 20
CPU = Target("this", by_id("cpu"), 1, 2500 * MIB, 2500 * MIB, None, None, None, None, None, None)


def step(batch: int) -> Trace:
    """Three steps with 50 MiB of weights and 64 blocks of 128 KiB for each sample."""
    events: list[tuple[str, int, int]] = [("a", 0, 50 * MIB)]
    blocks = range(1, 65)
    for _ in range(3):
        events += [("a", block, batch << 17) for block in blocks] + [("f", block, 0) for block in blocks]
    owner = {0: 0, **dict.fromkeys(blocks, 1)}
    labels = [("weights", "m", ""), ("activations", "m", "")]
    return Trace(events, labels, owner, ["step 1"], [], {"batch": batch, "engine": "fake"})


class Steps:
    """A workshop of such steps."""

    traces = 0

    def trace(self, request: Request) -> Trace:
        return step(request.batch or 16)

    def prepare(self, requests: Any) -> None:
        """Nothing to do beforehand."""

    def flops(self, request: Request) -> None:
        return None


def planned(batch: int, session: Session | None = None) -> Plan:
    request = Request("torch", {"build": "train.py:build"}, batch=batch)
    return make_plan(Steps(), request, "train.py:build", [CPU], session or Session(), remedies=False)  # type: ignore[arg-type]


def test_the_largest_batch_on_a_cpu_is_the_largest_whose_own_answer_fits() -> None:
    for session in (Session(), Session(data=500 * MIB, in_memory=True)):
        most = planned(16, session).answers[0].largest

        assert most is not None and most > 1
        assert planned(most, session).fits
        assert not planned(most + 1, session).fits


def test_a_shortage_on_a_cpu_is_no_reason_for_a_bigger_card() -> None:
    plan = planned(400)
    advice = hint(replace(plan, answers=(replace(plan.answers[0], micro_batch=None),)))

    assert not plan.fits
    assert "card" not in advice and "RAM" in advice


@pytest.mark.parametrize(
    ("blocks", "grown"),
    # How many blocks of which size are held at the peak, and what the process really grew by, in MiB: a vision
    # transformer, a decoder with checkpointing, a large embedding, nanoGPT with two threads.
    [({4: 270}, 1584), ({4: 98}, 769), ({245: 6}, 1566), ({24: 69, 96: 30}, 6200)],
)
def test_what_a_process_grows_by_is_inside(blocks: dict[int, int], grown: int) -> None:
    sizes = [size for size, count in blocks.items() for _ in range(count)]
    events = [("a", number, size * MIB) for number, size in enumerate(sizes)]

    found = estimate(Trace(events, facts={"engine": "fake"}), by_id("cpu"))

    assert grown * MIB in found.total
    assert found.verdict(found.total.high) == FITS
    assert found.verdict(found.total.high - MIB) != FITS


def test_what_the_convolution_library_copies_on_a_cpu_is_inside() -> None:
    """A small 3D U-Net: 420 MiB of tensors at its peak, and the process grew by 749 MiB."""
    sizes = [12] * 5 + [60] * 6
    events = [("a", number, size * MIB) for number, size in enumerate(sizes)]

    found = estimate(Trace(events, facts={"engine": "fake", "convolution": 136 * MIB}), by_id("cpu"))

    assert 749 * MIB in found.total
    assert found.allocated.high < 425 * MIB, "its copies are no tensors"
    assert found.verdict(749 * MIB) != FITS


def test_what_a_product_in_half_precision_takes_as_float32_is_inside() -> None:
    """Two wide layers in bfloat16: the process grew by 814 MiB, where their tensors asked for 513."""
    torch = pytest.importorskip("torch")
    from buoy.estimate.tracing.steps import Job, trace_steps

    layers = [torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(2048, 10)).to(torch.bfloat16).to("meta")
    batch = (torch.zeros(4096, 2048, dtype=torch.bfloat16, device="meta"),)
    job = Job(model, batch, lambda model, batch: model(batch[0]).float().sum(), torch.optim.AdamW)

    trace = trace_steps(job, by_id("cpu"))
    found = estimate(trace, by_id("cpu"))

    assert trace.facts["half_product"] == 4 * (4096 * 2048 + 2048 * 8192 + 4096 * 8192) + 4 * 8192
    assert 814 * MIB in found.total
    assert found.verdict(814 * MIB) != FITS
