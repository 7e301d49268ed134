"""Steps that read values: what few samples tell of a whole batch."""

from __future__ import annotations

from typing import Any

import pytest

from buoy.estimate.allocators import host
from buoy.estimate.batch import at_size
from buoy.estimate.child import Request
from buoy.estimate.devices import by_id
from buoy.estimate.trace import Trace

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from buoy.estimate.tracing.steps import Job  # noqa: E402
from buoy.estimate.tracing.torch import _depends_on_data, _steps  # noqa: E402

MIB = 1 << 20
CPU = by_id("cpu")


class Experts(nn.Module):
    """Each sample goes to one of four, by the values it has."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64)) for _ in range(4)]
        self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(made)

    def forward(self, x: Any) -> Any:
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                y[mine] = expert(x[mine]).to(y.dtype)
        return y


def traced(count: int, autocast: str | None = None) -> Trace:
    torch.manual_seed(0)
    model = Experts()
    batch = (torch.randn(2048, 64)[:count],)
    given = Job(model, batch, lambda model, batch: model(batch[0]).square().mean(), torch.optim.AdamW)
    return _steps(given, CPU, Request("torch", {}, autocast=autocast))


def peak(trace: Trace) -> int:
    return host.replay(trace.events).peak_allocated


def foreseen(size: int, autocast: str | None = None) -> int:
    return peak(at_size(traced(2, autocast), 2, traced(4, autocast), 4, size))


@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_weights_do_not_grow_with_the_batch_where_few_samples_do_other_things(autocast: str | None) -> None:
    true = peak(traced(2048, autocast))

    assert 0.8 * true < foreseen(2048, autocast) < 2.5 * true


def test_half_precision_halves_what_is_kept_of_a_step_that_reads_values() -> None:
    full, half = traced(2048), traced(2048, "fp16")

    assert peak(full) - peak(half) > 0.3 * 2048 * 4096 * 4


def test_experts_that_no_sample_chose_are_counted_with_their_moments() -> None:
    held = sum(p.nbytes for p in Experts().parameters())

    assert peak(traced(1)) > 4 * held


def test_experts_in_float32_are_planned_though_their_fake_kernel_refuses_them() -> None:
    product = getattr(torch, "_grouped_mm", None)
    if product is None:
        pytest.skip("this torch has no grouped product")
    with torch.device("meta"), pytest.raises(RuntimeError) as caught:
        ends = torch.tensor([2, 4], dtype=torch.int32)
        product(torch.zeros(4, 16), torch.zeros(2, 16, 16), offs=ends)

    assert _depends_on_data(caught.value)
