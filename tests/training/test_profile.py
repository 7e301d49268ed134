"""`run.profile`: a few steps under torch's own profiler, at safe points, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def test_steps_are_told_by_phase_and_module_and_the_hooks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from buoy.torch.profile import Profile

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randn(96, 4))
    profile = Profile(3, str(tmp_path), [model], [optimizer])
    before = torch.autograd.backward
    for x, y in torch.utils.data.DataLoader(data, batch_size=16):
        if profile.summary is None and not profile.between_steps():
            break
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    summary = profile.summary

    assert summary is not None
    assert summary.steps == 3
    assert all(summary.phases[phase] > 0 for phase in ("data wait", "forward", "backward", "optimizer"))
    assert sum(summary.phases.values()) == pytest.approx(summary.seconds, rel=0.01)
    assert summary.saved["2"] >= 16 * 512 * 4  # the last layer keeps its input
    assert json.loads(Path(str(summary.trace)).read_text())["traceEvents"]
    assert torch.autograd.backward is before
    assert not model._forward_hooks and not model[0]._forward_pre_hooks


def test_what_holds_memory_is_told_by_owner() -> None:
    from buoy.torch.holders import as_text, holders

    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    stray = torch.zeros(3_000_000)

    held = holders([model], [optimizer])

    assert held["parameters"] == held["gradients"] == 4_004_000
    assert held["optimizer state"] >= 2 * 4_004_000
    assert held["other tensors"] >= stray.numel() * 4
    assert "optimizer state" in as_text(held)


def test_a_run_profiles_its_next_steps_and_trains_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import buoy

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)
    for (x,) in run.batches(torch.utils.data.DataLoader(data, batch_size=8)):
        if run.step == 2:
            run.profile(steps=2)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()

    assert run.step == 8
    assert "2 steps, " in capfd.readouterr().err
