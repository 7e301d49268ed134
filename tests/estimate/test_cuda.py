"""What CUDA does and a CPU does not, each seen in the allocations of a small traced step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from buoy.estimate import devices
from buoy.estimate.allocators import native
from buoy.estimate.result import CONVOLUTION, estimate
from buoy.estimate.trace import Trace

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from buoy.estimate.tracing import fake  # noqa: E402
from buoy.estimate.tracing.steps import Job, trace_steps  # noqa: E402

ROWS, WIDTH = 640, 384
Loss = Callable[[Any, Any], Any]


def traced(
    model: nn.Module,
    *,
    loss: Loss | None = None,
    optimizer: Any = torch.optim.SGD,
    device: str = "t4",
    **options: Any,
) -> Trace:
    batch = (torch.zeros(ROWS, WIDTH, device="meta"),)
    loss = loss or (lambda model, batch: model(batch[0]).float().sum())
    return trace_steps(Job(model, batch, loss, optimizer), devices.by_id(device), **options)


def linear(count: int = 1) -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(count)])


def made_by(trace: Trace, operation: str, step: int = 1) -> Counter[int]:
    """Sizes of what an operation allocated, within one step (counted from 1)."""
    found: Counter[int] = Counter()
    now = 0
    for kind, identity, size in trace.events:
        if kind == "m" and trace.marks[identity].startswith("step"):
            now += 1
        elif kind == "a" and now == step and trace.label(identity)[2] == operation:
            found[size] += 1
    return found


def test_dropout_keeps_one_byte_for_each_value() -> None:
    found = traced(nn.Sequential(linear(), nn.Dropout(0.1)), steps=1)

    assert made_by(found, "native_dropout") == {ROWS * WIDTH * 4: 1, ROWS * WIDTH: 1}


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="not one kernel in this torch")
def test_rms_norm_is_one_kernel_that_keeps_a_value_for_each_row() -> None:
    found = traced(nn.Sequential(linear(), nn.RMSNorm(WIDTH, device="meta")), steps=1)

    assert made_by(found, "_fused_rms_norm") == {ROWS * WIDTH * 4: 1, ROWS * 4: 1}
    assert not made_by(found, "rsqrt")


def test_autocast_casts_a_weight_once_and_drops_the_cast_when_it_ends() -> None:
    def twice(model: Any, batch: Any) -> Any:
        return model(model(batch[0])).float().sum()

    found = traced(linear(), loss=twice, autocast="fp16", steps=2)

    cast = WIDTH * WIDTH * 2
    assert made_by(found, "_to_copy")[cast] == made_by(found, "_to_copy", step=2)[cast] == 1


def test_a_cast_under_autocast_is_repeated_where_its_cache_is_off() -> None:
    def twice(model: Any, batch: Any) -> Any:
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            return model(model(batch[0])).float().sum()

    assert made_by(traced(linear(), loss=twice, steps=1), "_to_copy")[WIDTH * WIDTH * 2] == 2


def test_gradients_of_one_tensor_used_twice_are_summed_in_place() -> None:
    def shared(model: Any, batch: Any) -> Any:
        hidden = model[0](batch[0])
        return (model[1](hidden) + model[2](hidden)).sum()

    found = traced(linear(3), loss=shared, steps=1)

    assert made_by(found, "add")[ROWS * WIDTH * 4] == 1, "only the forward pass makes a sum of its own"


@pytest.mark.parametrize(
    ("options", "temporaries"), [({}, True), ({"foreach": False}, False), ({"fused": True}, False)]
)
def test_foreach_optimizers_make_temporaries_as_large_as_the_model_and_fused_ones_none(
    options: dict[str, bool], temporaries: bool
) -> None:
    count, weight = 6, WIDTH * WIDTH * 4
    found = traced(linear(count), optimizer=lambda weights: torch.optim.AdamW(weights, **options), steps=3)

    most = 0
    held: dict[int, int] = {}
    stepping = False
    for kind, identity, size in found.events:
        if kind == "m":
            stepping, held = found.marks[identity] == "optimizer", {}
        elif kind == "f":
            held.pop(identity, None)
        elif kind == "a" and stepping and found.label(identity)[0] == "temporaries":
            held[identity] = size
            most = max(most, sum(held.values()))
    assert (most >= count * weight) is temporaries


def test_cublas_keeps_a_workspace_for_forward_and_one_for_backward() -> None:
    found = traced(linear(), steps=1, device="h100")

    kept = [
        size
        for kind, identity, size in found.events
        if kind == "a" and found.label(identity)[0] == "workspace"
    ]
    assert kept == [devices.by_id("h100").workspace] * 2


def test_a_scaled_loss_needs_no_values() -> None:
    found = traced(linear(), autocast="fp16", scaler=True, steps=2)

    assert found.marks.count("optimizer") == 2
    assert native.replay(found.events).fits


@pytest.mark.parametrize(("kind", "values"), [(nn.LSTM, 6), (nn.GRU, 5)])
def test_cudnn_keeps_a_reserve_for_recurrent_layers(kind: Any, values: int) -> None:
    model = kind(WIDTH, 64, batch_first=True, device="meta")

    found = traced(model, loss=lambda model, batch: model(batch[0].view(8, -1, WIDTH))[0].sum(), steps=1)

    reserve = values * ROWS * 64 * 4
    assert reserve in [size for kind, _, size in found.events if kind == "a"]
    assert (
        estimate(found, devices.by_id("t4")).reserved.high
        > native.replay(found.events).peak_reserved + reserve // 3
    )


def test_the_workspace_of_convolutions_is_a_range_in_the_answer() -> None:
    model = nn.Conv2d(6, 32, 3, padding=1, device="meta")

    found = traced(model, loss=lambda model, batch: model(batch[0].view(ROWS, 6, 8, 8)).sum(), steps=1)

    moved = 4 * ROWS * (6 + 32) * 64
    figure = estimate(found, devices.by_id("t4"))
    assert found.facts["convolution"] == moved
    assert figure.reserved.high - figure.replay.peak_reserved >= round(CONVOLUTION[2] * moved)
    assert figure.reserved.low <= figure.replay.peak_reserved < figure.reserved.likely


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_updates_of_all_weights_at_once_leave_the_same_events_as_torchs_own_way(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimizer(parameters: Any) -> Any:
        return kind(parameters, lr=1e-3, weight_decay=0.1, foreach=True)

    quick = traced(linear(3), optimizer=optimizer)
    monkeypatch.setattr(fake, "_are_on_device", lambda tensors: False)
    slow = traced(linear(3), optimizer=optimizer)

    assert quick.events == slow.events
