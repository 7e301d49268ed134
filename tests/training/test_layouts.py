"""Tensors that do not lie in memory in C order (channels last, transposed, expanded), or under two names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import buoy
from buoy.checkpoint import store
from buoy.flight import recorder

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def steps_of(
    run: buoy.Run, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], last: int
) -> None:
    """Train up to this step."""
    try:
        for _ in run.epochs(1):
            for x in run.batches(batches):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step == last:
                    return
    finally:
        run.finish()


def train(folder: Path, steps: int, make: Optimizer) -> list[torch.Tensor]:
    """Weights after so many steps, and how the optimizer's state lies in memory."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 1))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[3].weight = nn.Parameter(torch.randn(16, 1).t())
    optimizer = make([*model.parameters()])
    batches = [torch.randn(3, 1, 6, 6) for _ in range(6)]
    run = buoy.Run(folder, save=1)
    run.track(model=model, optimizer=optimizer)
    steps_of(run, model, optimizer, batches, steps)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    strides = [torch.tensor(value.stride()) for value in moments if isinstance(value, torch.Tensor)]
    return [*(parameter.detach().clone() for parameter in model.parameters()), *strides]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    ],
    ids=["fused AdamW", "fused SGD", "NAdam"],
)
def test_the_moments_lie_as_their_parameters_do_after_a_resume(make: Optimizer, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6, make)
    train(tmp_path / "cut", 3, make)
    resumed = train(tmp_path / "cut", 6, make)
    assert all(torch.equal(mine, other) for mine, other in zip(resumed, whole, strict=True))


@pytest.mark.parametrize("lives", [(True, False), (False, True)], ids=["left", "taken up"])
def test_channels_last_that_is_taken_up_or_left_between_two_lives_changes_no_weights(
    lives: tuple[bool, bool], tmp_path: Path
) -> None:
    weights = []
    for folder, steps, last in (("whole", 6, False), ("cut", 3, lives[0]), ("cut", 6, lives[1])):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 1))
        if last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        batches = [torch.randn(3, 4, 6, 6) for _ in range(6)]
        run = buoy.Run(tmp_path / folder, save=1)
        run.track(model=model, optimizer=optimizer)
        steps_of(run, model, optimizer, batches, steps)
        weights.append(model[0].weight.detach().clone())
    torch.testing.assert_close(weights[2], weights[0])


def test_zeros_without_memory_are_saved(tmp_path: Path) -> None:
    with buoy.Run(tmp_path) as run:
        run.track(kept={"zeros": torch._efficientzerotensor((3,)), "ones": torch.ones(3)})  # type: ignore[attr-defined]
        run.save()
    found: dict[str, torch.Tensor] = {}
    with buoy.Run(tmp_path) as run:
        run.track(kept=found)
    assert torch.equal(found["zeros"], torch.zeros(3))
    assert torch.equal(found["ones"], torch.ones(3))


def test_what_is_tracked_beside_comes_back_as_it_lay(tmp_path: Path) -> None:
    images = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    one = torch.ones(4, 1, 3, 3).to(memory_format=torch.channels_last)
    kept = {
        "images": images,
        "one": one,
        "turned": images.permute(3, 1, 0, 2),
        "wide": torch.ones(1, 2).expand(3, 2),
    }
    kept["sliced"], kept["none"] = images[:, ::2], torch.empty(0, 2).t()
    with buoy.Run(tmp_path) as run:
        run.track(kept=kept)
        run.save()

    found: dict[str, torch.Tensor] = {}
    with buoy.Run(tmp_path) as run:
        run.track(kept=found)
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert all(found[name].stride() == kept[name].stride() for name in ("images", "one", "turned"))


def test_a_tensor_under_two_names_is_one_again(tmp_path: Path) -> None:
    for _ in range(2):
        seen = torch.zeros(3)
        kept = {"seen": seen, "next": seen, "all": [seen], "other": torch.zeros(3)}
        with buoy.Run(tmp_path) as run:
            run.track(kept=kept)
            kept["seen"] += 1.0
            run.save()
    assert kept["next"] is kept["all"][0] is kept["seen"]
    assert torch.equal(kept["seen"], torch.full((3,), 2.0))
    assert torch.equal(kept["other"], torch.zeros(3))


class Normalised(nn.Module):
    """Its buffers show one row several times, as `expand` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.randn(1, 4).expand(3, 4))
        self.register_buffer("shift", torch.randn(1, 4).expand(3, 4), persistent=False)
        self.register_buffer("loose", torch.zeros(1, 4).expand(3, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loose = self.loose + 1.0
        return self.layer(x - self.mean + self.shift + self.loose)


def test_a_model_with_an_expanded_buffer_goes_on(tmp_path: Path) -> None:
    weights, means = [], []
    for lives in ([4], [2, 4]):
        for steps in lives:
            torch.manual_seed(1)
            model = Normalised()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run = buoy.Run(tmp_path / str(len(lives)), save=1)
            run.track(model=model, optimizer=optimizer)
            batches = [torch.full((3, 4), 0.5 * number) for number in range(4)]
            steps_of(run, model, optimizer, batches, steps)
        weights.append(model.layer.weight.detach().clone())
        means.append(model.mean.clone())
    assert torch.equal(*weights)
    assert torch.equal(*means)


class Remembering(nn.Module):
    """Loads in a way of its own and keeps what it is given, as torchmetrics' metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *rest: object) -> None:
        self.seen = state.pop(f"{prefix}seen")


def every_kind() -> nn.Module:
    """Ways in which modules take what `load_state_dict` gives them."""
    tied = nn.Linear(4, 4)
    old = nn.utils.spectral_norm(nn.Linear(4, 4))  # has a hook before it is loaded
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    parts = [tied, nn.LSTM(4, 4, 2), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4), old, new, Remembering(),
             nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Linear(4, 4).half()]  # fmt: skip
    whole = nn.Sequential(*parts, nn.Linear(4, 4))  # type: ignore[arg-type]
    whole[-1].weight = tied.weight
    whole.scale = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    whole.register_buffer("none", torch.zeros(0, 2))
    whole.register_buffer("count", torch.tensor(7))
    whole.register_buffer("turned", torch.randn(2, 3).t())
    return whole


def test_every_kind_of_module_gets_the_numbers_that_were_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = every_kind()
    saved[6].seen += 5  # type: ignore[index, operator]
    with buoy.Run(tmp_path) as run:
        run.track(model=saved)
        run.save()
    loaded = every_kind()
    with buoy.Run(tmp_path) as run:
        run.track(model=loaded)

    expected, found = saved.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) and type(found[name]) is torch.Tensor, name
        assert found[name].is_contiguous() == value.is_contiguous(), name
    loaded[6].seen[0] = 9.0  # type: ignore[index]
    assert loaded[6].seen.tolist() == [9.0, 5.0, 5.0], "what it keeps is its own"  # type: ignore[index]


def test_a_checkpoint_that_changes_while_it_is_loaded_is_named_and_the_next_start_uses_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def track(steps: int) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        run = buoy.Run(tmp_path, save=1)
        try:
            run.track(model=model, optimizer=optimizer)
            before = [run.step, *model.weight.flatten().tolist()]
            for _ in run.epochs(1):
                for x in run.batches([torch.ones(1, 1)] * 9):
                    if run.step >= steps:
                        return before
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return before
        finally:
            run.finish()

    def verified_and_then_changed(folder: str, *rest: Any) -> Any:
        found = opened(folder, *rest)
        with open(f"{folder}/state.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        return found

    track(3)
    opened = store.open_checkpoint
    with monkeypatch.context() as patched:
        patched.setattr(store, "open_checkpoint", verified_and_then_changed)
        with pytest.raises(buoy.BuoyError) as refused:
            track(3)

    assert "it changed while it was being loaded" in str(refused.value) and "nothing" not in str(
        refused.value
    )
    assert track(2) == [2, -2.5]


def test_a_model_is_loaded_with_memory_for_one_of_its_tensors(tmp_path: Path) -> None:
    """A checkpoint may be as large as half the machine's memory."""

    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

    with buoy.Run(tmp_path) as run:
        run.track(model=model())
        run.save()
    again = model()
    with buoy.Run(tmp_path) as run:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        run.track(model=again)
        taken = memory("VmHWM") - before

    assert taken < 16 << 20, "of 64 MiB"
