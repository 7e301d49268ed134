"""A further step made from the last one is the step that would have been taken."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from buoy.estimate.trace import Trace  # noqa: E402
from buoy.estimate.tracing.steps import another_step  # noqa: E402
from tests.estimate.test_estimate import step  # noqa: E402


def taken(steps: int) -> Trace:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, 64))
        batch = (torch.zeros(8, 64),)
    return step(model, batch, accumulate=2, autocast="fp16", scaler=True, steps=steps)


def shape(trace: Trace) -> list[tuple[str, int, tuple[str, str, str]]]:
    return [
        (kind, size, trace.label(one) if kind == "a" else ("", "", "")) for kind, one, size in trace.events
    ]


def test_the_further_step_allocates_and_frees_what_a_real_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made = another_step(taken(2))
    monkeypatch.setattr("buoy.estimate.tracing.steps.another_step", lambda trace: None)
    real = taken(3)

    assert made is not None
    assert shape(made) == shape(real)
    assert [made.marks[mark] for kind, mark, _ in made.events if kind == "m"] == real.marks


def test_a_step_that_leaves_more_behind_than_it_found_is_not_repeated() -> None:
    """Here every step keeps one tensor more, as a loop does that gathers its losses."""
    growing = Trace(
        [("m", 0, 0), ("a", 0, 512), ("m", 1, 0), ("a", 1, 512), ("a", 2, 512), ("f", 0, 0), ("a", 3, 512)],
        marks=["step 1", "step 2"],
    )  # fmt: skip

    assert another_step(growing) is None
