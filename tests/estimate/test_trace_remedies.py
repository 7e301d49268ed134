"""Remedies as they are applied to a step: what they change, and what they leave alone because it makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from buoy.estimate import devices
from buoy.estimate.allocators import host
from buoy.estimate.child import EstimateError, Request
from buoy.estimate.result import estimate
from buoy.estimate.trace import LOSS, Trace

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from buoy.estimate.tracing.remedies import apply  # noqa: E402
from buoy.estimate.tracing.steps import Job, trace_steps  # noqa: E402
from buoy.estimate.tracing.torch import _steps  # noqa: E402

CPU = devices.by_id("cpu")


class Wide(nn.Module):
    """A table of a million numbers for each of its layers' ten thousand."""

    def __init__(self, rows: int, width: int = 128) -> None:
        super().__init__()
        self.table, self.layer, self.out = (
            nn.Embedding(rows, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )

    def forward(self, x: Any) -> Any:
        return self.out(self.layer(self.table(x).mean(1)))


def job(model: nn.Module, *shape: int, whole: bool = True, optimizer: Any = torch.optim.AdamW) -> Job:
    batch = (torch.zeros(*shape, dtype=torch.long if whole else torch.float32),)
    return Job(model, batch, lambda model, batch: model(batch[0]).square().mean(), optimizer)


def changed(given: Job, *names: str) -> Trace:
    apply(given, names)
    return trace_steps(given, CPU)


def test_lora_is_for_layers_that_hold_the_weights() -> None:
    with pytest.raises(EstimateError, match="no linear layers to adapt"):
        apply(job(Wide(10_000), 4, 16), ("lora",))

    trace = changed(job(Wide(10), 4, 16), "lora")

    assert trace.facts["pretrained"] is False
    assert any(note.startswith("trains 2,048 numbers, with 17,") for note in trace.notes)


def test_lora_and_pruning_leave_attention_its_own_weights() -> None:
    for name in ("lora", "pruned"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 256, batch_first=True), 1)

        trace = changed(job(model, 2, 5, 128, whole=False), name)

        assert trace.facts["parameters"] > 128 * 256 * 2


def test_smaller_inputs_are_images_with_their_masks_and_sequences_but_no_columns() -> None:
    pixels = job(nn.Identity(), 1)
    pixels.batch = (torch.zeros(2, 3, 32, 48), torch.zeros(2, 32, 48, dtype=torch.long), torch.zeros(2, 7))
    apply(pixels, ("smaller_input",))

    assert tree_map(lambda leaf: tuple(leaf.shape), pixels.batch) == ((2, 3, 16, 24), (2, 16, 24), (2, 7))
    with pytest.raises(EstimateError, match="no side or length"):
        apply(job(nn.Identity(), 4096, 2), ("smaller_input",))


def test_an_output_layer_over_words_is_named_where_it_cannot_be_taken_out() -> None:
    model = nn.Sequential(nn.Embedding(9000, 8), nn.Linear(8, 9000))

    with pytest.raises(EstimateError) as caught:
        apply(job(model, 2, 16), ("chunked_loss",))

    assert "`1` makes scores for 9,000 classes" in str(caught.value.received)


def test_what_the_loss_computes_is_its_own() -> None:
    given = job(nn.Linear(64, 64), 1000, 64, whole=False)
    given.loss = lambda model, batch: model(batch[0]).exp().exp().mean()

    owners = dict(estimate(trace_steps(given, CPU), devices.by_id("cpu")).owners)

    assert owners[LOSS] >= 2 * 1000 * 64 * 4


def test_adafactor_is_traced_without_values_as_it_steps_for_real() -> None:
    def given() -> Job:
        return job(nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 10)), 8, 300, whole=False,
                   optimizer=torch.optim.Adafactor)  # fmt: skip

    fake, real = trace_steps(given(), CPU, steps=2), _steps(given(), CPU, Request("torch", {}))

    assert fake.facts["optimizer"] == real.facts["optimizer"] == "Adafactor"
    ours, theirs = host.replay(fake.events).peak_allocated, host.replay(real.events).peak_allocated
    assert abs(ours - theirs) < 0.005 * theirs


def test_lora_beside_half_precision_computes_in_float32_as_peft_does() -> None:
    def peak(dtype: Any, *names: str) -> int:
        given = job(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(dtype), 512, 256, whole=False)
        given.batch = (given.batch[0].to(dtype),)
        return host.replay(changed(given, *names).events).peak_allocated

    plain, adapted = peak(torch.bfloat16), peak(torch.bfloat16, "lora")

    # What goes into each of the four layers is kept once more, in float32.
    assert adapted - plain > 4 * 512 * 256 * 4 - 4 * 256 * 256 * 2 * 3


def test_eight_bit_moments_take_what_torchao_was_measured_to_take() -> None:
    """Three layers of 2048 x 2048 took 38.14 bytes for each number of one with torchao 0.18; those of 1999 stay."""
    for width, measured in ((2048, 38.142), (1999, 48.024)):
        given = job(
            nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(3)]), 4, width, whole=False
        )

        found = host.replay(changed(given, "eight_bit").events).peak_allocated / width**2

        assert abs(found / measured - 1) < 0.005
