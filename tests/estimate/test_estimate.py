"""From a trace to an answer: parts, owners, verdicts, other batch sizes, and CUDA's choices by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from buoy.estimate import devices
from buoy.estimate.allocators import Replay, native
from buoy.estimate.batch import at_size, largest_batch
from buoy.estimate.result import estimate
from buoy.estimate.trace import Trace
from buoy.machine.platforms import all_platforms

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from buoy.estimate.tracing.steps import Job, trace_steps  # noqa: E402

GIB = 1 << 30
WIDTH = 512


def step(model: nn.Module, batch: Any, device: str = "t4", **options: Any) -> Trace:
    optimizer: Callable[[Any], Any] = options.pop("optimizer", torch.optim.AdamW)
    loss = options.pop("loss", lambda model, batch: model(batch[0]).float().sum())
    return trace_steps(Job(model, batch, loss, optimizer), devices.by_id(device), **options)


class Attention(nn.Module):
    """One attention call, and nothing beside it that could hide its memory."""

    def __init__(self, size: int, dtype: torch.dtype, masked: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype, device="meta"))
        self.shape, self.dtype, self.masked = (2, 4, 128, size), dtype, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = x * self.scale
        mask = torch.ones(128, 128, dtype=torch.bool, device=x.device) if self.masked else None
        return functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def kernels(
    device: str, size: int = 64, dtype: torch.dtype = torch.float16, masked: bool = False
) -> set[str]:
    model = Attention(size, dtype, masked)
    return set(
        step(model, (torch.zeros(model.shape, dtype=dtype, device="meta"),), device, steps=1).facts[
            "attention"
        ]
    )


def mlp(samples: int) -> Trace:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        return step(model, (torch.zeros(samples, WIDTH),))


def test_letting_cudnn_try_algorithms_widens_the_peak_and_not_what_must_fit() -> None:
    """Spectra of 728 x 728 weights over 64 x 33 frequencies, twice: 17.9 GB, whatever the batch."""

    def traced(tries: bool) -> Trace:
        with torch.device("meta"), torch.backends.cudnn.flags(enabled=True, benchmark=tries):
            return step(nn.Conv2d(728, 728, 1), (torch.zeros(1, 728, 38, 38),), "a100-40", steps=1)

    plain, tried = (estimate(traced(tries), devices.by_id("a100-40")) for tries in (False, True))

    assert 17.9e9 < tried.reserved.high - tried.reserved.likely < 18.1e9
    assert plain.reserved.high < 1e9
    assert (tried.reserved.low, tried.reserved.likely, tried.margin) == (
        plain.reserved.low, plain.reserved.likely, plain.margin,
    )  # fmt: skip


def test_the_attention_kernel_follows_capability_dtype_mask_and_head_size() -> None:
    assert kernels("a100-40") == {"flash"}
    assert kernels("a100-40", masked=True) == {"efficient"}
    assert kernels("a100-40", dtype=torch.float32) == {"efficient"}
    assert kernels("t4") == {"efficient"}
    assert kernels("t4", dtype=torch.bfloat16) == {"math"}, (
        "a T4 has no bfloat16 kernel: the scores are materialised"
    )
    assert kernels("a100-40", size=320, dtype=torch.float64) == {"math"}


def test_parts_sum_up_to_the_peak_and_name_their_owners() -> None:
    figure = estimate(mlp(256), devices.by_id("t4"))

    tensors = sum(size for part, size in figure.parts.items() if part not in ("allocator", "context"))
    assert tensors + figure.parts["allocator"] == figure.replay.peak_reserved
    assert figure.parts["workspace"] == 2 * 8_519_680
    assert {name for name, _ in figure.owners} == {"0", "1", "2"} or figure.owners[0][0] in ("0", "2")
    assert figure.replay.peak_reserved in figure.reserved


@pytest.mark.parametrize("given_as", [torch.optim.Adam, lambda model: torch.optim.Adam(model.parameters())])
def test_a_module_that_two_others_share_is_held_once_and_trained(given_as: Any) -> None:
    """An encoder and a decoder over one embedding: its weight, its gradient and both of its moments."""

    class Side(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(x)  # type: ignore[no-any-return]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Embedding(50_000, WIDTH, device="meta")
            self.encoder, self.decoder = Side(shared), Side(shared)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x) + self.decoder(x)  # type: ignore[no-any-return]

    model = Both()
    optimizer = given_as if given_as is torch.optim.Adam else given_as(model)
    trace = step(model, (torch.zeros(2, 8, dtype=torch.long, device="meta"),), optimizer=optimizer)

    parts, weight = estimate(trace, devices.by_id("t4")).parts, 50_000 * WIDTH * 4
    assert weight <= parts["weights"] < 1.1 * weight
    assert 2 * weight <= parts["optimizer"] < 2.1 * weight


def test_mixed_precision_halves_activations_and_scales_without_reading_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(24)])
        batch = (torch.zeros(8192, WIDTH),)
        full = native.replay(step(model, batch, optimizer=torch.optim.SGD).events)
        half = native.replay(
            step(model, batch, optimizer=torch.optim.SGD, autocast="fp16", scaler=True).events
        )

    assert half.peak_allocated < 0.7 * full.peak_allocated


def test_checkpointed_activations_are_recomputed() -> None:
    from torch.utils.checkpoint import checkpoint

    def recomputed(model: Any, batch: Any) -> torch.Tensor:
        x = batch[0]
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                                for _ in range(6)])  # fmt: skip
        batch = (torch.zeros(8192, WIDTH),)
        kept = native.replay(step(model, batch).events)
        saved = native.replay(step(model, batch, loss=recomputed).events)

    assert saved.peak_allocated < 0.5 * kept.peak_allocated


def test_recurrent_layers_keep_cudnns_reserve_and_one_flat_gradient() -> None:
    with torch.device("meta"):
        model = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        found = step(model, (torch.zeros(16, 100, 64),), loss=lambda model, batch: model(batch[0])[0].sum())

    reserve = 6 * 2 * 100 * 16 * 256 * 4
    sizes = [size for kind, _, size in found.events if kind == "a"]
    assert reserve in sizes
    assert 4 * sum(weight.numel() for weight in model.parameters()) in sizes
    assert found.facts["recurrent_doubt"] == reserve // 2


def test_gradient_accumulation_keeps_gradients_through_the_next_forward() -> None:
    def peak(**options: Any) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
            events = step(model, (torch.zeros(4096, 2048),), optimizer=torch.optim.SGD, **options).events
        return native.replay(events).peak_allocated

    assert peak(accumulate=2) > peak(accumulate=1)


def test_another_batch_size_follows_from_two_traces() -> None:
    direct = native.replay(mlp(96).events)

    along = native.replay(at_size(mlp(16), 16, mlp(32), 32, 96).events)

    assert along.peak_allocated == pytest.approx(direct.peak_allocated, rel=0.001)
    assert along.peak_reserved == pytest.approx(direct.peak_reserved, rel=0.03)


def test_the_largest_batch_fits_and_the_next_does_not_surely_fit() -> None:
    row = devices.by_id("t4")
    counted: list[int] = []

    def counting(samples: int) -> Trace:
        counted.append(samples)
        return mlp(samples)

    answer = largest_batch(counting, lambda trace: estimate(trace, row).verdict(GIB) == "fits")

    assert estimate(mlp(answer), row).verdict(GIB) == "fits"
    assert estimate(mlp(answer + max(2, answer // 50)), row).verdict(GIB) != "fits"
    assert len(counted) == 3


def test_no_batch_fits_a_device_smaller_than_the_weights() -> None:
    row = devices.by_id("t4")

    assert largest_batch(mlp, lambda trace: estimate(trace, row).verdict(310 << 20) == "fits") == 0


def test_a_check_that_fails_brings_the_answer_down() -> None:
    """The line through two traces may promise too much; only a traced size is ever returned."""

    def bends(samples: int) -> Trace:
        return Trace([("a", 0, samples * (1 << 20) if samples < 60 else 2 * samples * (1 << 20))])

    def fits(trace: Trace) -> bool:
        return native.replay(trace.events).peak_reserved <= 100 << 20

    answer = largest_batch(bends, fits)

    assert fits(bends(answer))
    assert answer == 59


def test_a_line_drawn_far_from_the_answer_is_drawn_anew_near_it() -> None:
    traced: list[int] = []

    def bends(samples: int) -> Trace:
        traced.append(samples)
        return Trace([("a", 0, (samples if samples < 200 else samples * 8 // 5) << 20)])

    answer = largest_batch(
        bends, lambda trace: native.replay(trace.events).peak_reserved <= 100 << 20, start=(64, 256)
    )

    assert answer == 100 and len(traced) == 4


def test_the_number_that_decided_is_on_the_same_side_as_the_verdict() -> None:
    figure = estimate(mlp(2048), devices.by_id("t4"))
    low, high = figure.total.low, figure.total.high

    assert figure.needed(low - 1) is None and figure.needed(high + 1) is None
    seen = set()
    for memory in range(low, high, (high - low) // 20):
        needed, verdict = figure.needed(memory), figure.verdict(memory)
        assert needed is not None and (needed <= memory) == (verdict == "fits")
        seen.add(verdict)
    assert "fits" in seen and len(seen) > 1


def test_verdicts_follow_the_allocators_own_answer() -> None:
    row = devices.by_id("t4")
    figure = estimate(mlp(2048), row)
    needed = figure.replay.peak_reserved

    assert figure.verdict(needed + row.context[1] + figure.margin) == "fits"
    assert figure.verdict(needed + row.context[0]) == "tight"
    assert figure.verdict(figure.allocated.low) == "does not fit"


def test_the_host_replay_counts_what_was_asked_for() -> None:
    replay: Replay = estimate(Trace([("a", 1, 10_000), ("a", 2, 5_000)]), devices.by_id("cpu")).replay

    assert replay.peak_allocated == 15_000


def test_every_device_has_a_source_a_date_and_platforms_that_exist() -> None:
    known = {platform.id for platform in all_platforms()}
    for device in devices.all_devices():
        assert device.source and device.date, device.id
        assert set(device.platforms) <= known, device.id
        assert device.context[0] <= device.context[1]
    accelerated = {
        platform.id for platform in all_platforms() if platform.id.startswith(("colab-", "kaggle-"))
    }
    unknown = {name for name in accelerated if devices.of_platform(name) is None}
    assert {name for name in unknown if "tpu" not in name} == {"colab-enterprise"}


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(devices.UsageError) as error:
        devices.by_id("rtx-309")

    assert "`rtx-3090`" in str(error.value)


def test_a_driver_names_its_device() -> None:
    assert devices.by_name("Tesla T4", 15_640_000_000) is devices.by_id("t4")
    assert devices.by_name("NVIDIA A100-SXM4-80GB", 85_000_000_000) is devices.by_id("a100-80")
    assert devices.by_name("NVIDIA GeForce GTX 1650", 4_000_000_000) is None
