"""`run.profile`: a few steps under torch's own profiler, at safe points, and nothing left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

import buoy
from buoy.flight import recorder

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def train_with(run: Any, epochs: int = 1, batches: int = 8, wish: dict[int, int] | None = None) -> None:
    """A small training that asks for a profile of `wish[step]` steps before that step."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8 * batches, 8))
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(epochs):
        for (x,) in run.batches(torch.utils.data.DataLoader(data, batch_size=8)):
            if wish and run.step in wish:
                run.profile(wish.pop(run.step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def optimizer_steps(trace: str) -> int:
    events = json.loads(Path(trace).read_text())["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#SGD.step" for event in events)


def test_steps_are_told_by_phase_and_the_hooks_are_gone(tmp_path: Path) -> None:
    from buoy.torch.profile import Profile

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randn(96, 4))
    profile = Profile(str(tmp_path), [model], [optimizer])
    profile.prepare()
    profile.begin(lambda: None)
    begin = time.perf_counter()
    for x, y in torch.utils.data.DataLoader(data, batch_size=32):
        hidden = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)
        torch.nn.functional.mse_loss(hidden, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        profile.whole_step()
    spent = time.perf_counter() - begin
    optimizer.step()  # of a step that is not done
    profile.stop()
    summary = profile.summary(3, spent)

    assert summary.steps == 3
    assert all(
        summary.phases[phase] > 0 for phase in ("data wait", "forward, the rest", "backward", "optimizer")
    )
    assert sum(summary.phases.values()) == pytest.approx(summary.seconds, rel=0.01)
    assert json.loads(Path(str(summary.trace)).read_text())["traceEvents"]
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_what_holds_memory_is_told_by_owner() -> None:
    from buoy.torch.memory.holders import holders

    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    stray = torch.zeros(3_000_000)

    held = holders([model], [optimizer]).sizes

    assert held["parameters"] == held["gradients"] == 4_004_000
    assert held["optimizer state"] >= 2 * 4_004_000
    name = next(
        name for name in held if name.startswith("stray (tensor, float32, 3000000) in test_what_holds")
    )
    assert held[name] == pytest.approx(stray.numel() * 4, abs=1024)


def test_what_a_list_leaves_out_is_said() -> None:
    from buoy.flight.profile import Summary

    held = {f"x{number}": 1024 for number in range(12)} | {"crumbs": 1}
    told = str(Summary(1, 1.0, held=held, held_is_partial=True))

    assert "what holds memory now (not all: " in told
    assert "x9\n" in told
    assert "2.0 KiB  3 more" in told
    assert "crumbs" not in told


class Pictures(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    """As people write them: everything in one array."""

    def __init__(self) -> None:
        self.images = numpy.zeros((64, 50_000), "float32")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.images[index, :8])


def test_the_arrays_of_a_dataset_are_told_that_only_its_loader_has(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = torch.nn.Linear(8, 1)
    run = buoy.Run()
    run.track(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.1)))
    run.profile(steps=2)
    for x in run.batches(torch.utils.data.DataLoader(Pictures(), batch_size=8)):
        model(x).square().mean().backward()
        optimizer.step()

    assert "12.2 MiB  Pictures.images (NumPy array, float32, 64 x 50000)" in capfd.readouterr().err


def test_a_run_profiles_its_next_steps_after_a_warm_up_and_trains_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = buoy.Run(tmp_path / "run")
    train_with(run, epochs=2, batches=6, wish={5: 4})  # warm in one epoch, measured in the next
    run.finish()
    told = capfd.readouterr().err

    assert run.step == 12
    assert "4 steps, " in told
    assert "(after 2 steps of warm-up)" in told
    assert [optimizer_steps(str(path)) for path in (tmp_path / "run/profiles").iterdir()] == [4]


def test_a_training_that_ends_first_tells_what_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = buoy.Run(tmp_path / "run")
    run.profile(steps=1000)
    train_with(run, batches=20)  # the last epoch's end tells: in a notebook the run is not finished yet
    told = capfd.readouterr().err

    assert "18 steps, " in told
    assert "(after 2 steps of warm-up; the loop ended before the 1000 asked for)" in told
    assert [optimizer_steps(str(path)) for path in (tmp_path / "run/profiles").iterdir()] == [18]


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (1, "the training ended after 1 step, and 2 are for warming up"),
        (2, "the training ended after 2 steps, and 2 are for warming up"),
    ],
)
def test_where_nothing_was_measured_that_is_said(
    capfd: pytest.CaptureFixture[str], batches: int, why: str
) -> None:
    run = buoy.Run()
    run.profile()
    train_with(run, batches=batches)
    told = capfd.readouterr().err

    assert f"there is no profile: {why}" in told
    assert "each" not in told
    # Another finds its place free.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass


def test_a_training_under_another_profiler_goes_on_and_says_that_there_is_no_profile(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = buoy.Run()
    run.profile()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        train_with(run)
    told = capfd.readouterr().err

    assert run.step == 8
    assert "there is no profile: " in told
    assert any(event.key == "Optimizer.step#SGD.step" for event in theirs.key_averages())


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", True])
def test_a_wish_that_is_no_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(buoy.BuoyError, match="not a number of steps"):
        buoy.Run().profile(steps)


@pytest.mark.slow
def test_a_profile_ends_before_its_record_takes_much_memory(capfd: pytest.CaptureFixture[str]) -> None:
    layers = [torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4)) for _ in range(60)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)
    run.profile(steps=1000)
    for _ in run.batches(range(200)):
        if "asked for" in capfd.readouterr().err:
            break
        model(torch.ones(2, 4, 2, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()

    assert 5 < run.step < 200  # about 2 MiB a step, of which 32 MiB are granted


def test_why_a_profile_was_short_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from buoy.flight import profile
    from buoy.torch.profile import profile_of

    said: list[str] = []
    monkeypatch.setattr(profile, "_MOST_GROWTH", -(1 << 40))
    profiling = profile.Profiling(said.append)
    profiling.ask(5)
    for step in range(8):
        profiling.between_steps(step, lambda: profile_of(None, [torch.nn.Linear(2, 2)]))
    profiling.close()

    assert len(said) == 1
    assert "1 step, " in said[0]
    assert "5 were asked for, but their record would take too much memory" in said[0]


@pytest.mark.parametrize("how", ["return", "break", "exception", "half a step"])
def test_a_loop_that_is_left_early_leaves_no_profiler_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = buoy.Run(tmp_path / "run")
    run.track(model=model, optimizer=optimizer)
    run.profile(steps=3)

    def train() -> None:
        for _ in run.epochs(2):
            for x in run.batches(torch.randn(8, 4, 8)):
                model(x).square().mean().backward()
                if how == "half a step" and run.step == 3:
                    raise ArithmeticError
                optimizer.step()
                optimizer.zero_grad()
                if run.step == 4 and how != "half a step":
                    if how == "exception":
                        raise ArithmeticError
                    if how == "return":
                        return
                    break
            else:
                continue
            break

    try:
        train()
    except ArithmeticError:
        pass
    told = capfd.readouterr().err

    assert not torch.autograd._profiler_enabled()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    measured = 1 if how == "half a step" else 2
    assert f"{measured} step{'s' if measured > 1 else ''}, " in told
    assert "the loop ended before the 3 asked for" in told
    shares = [float(line[21:26]) for line in told.splitlines() if line[26:28] == " %"]
    assert sum(shares) == pytest.approx(100, abs=0.5)  # half a step's time is in none of the phases
    run.finish()
    assert "profile" not in capfd.readouterr().err


def test_another_run_ends_a_profile_that_nobody_comes_back_to(capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = buoy.Run()
    first.track(model=model, optimizer=optimizer)
    first.profile(steps=3)
    held = iter(first.batches(torch.randn(8, 4, 8)))  # what no frame lets go of
    for _ in range(4):
        model(next(held)).square().mean().backward()
        optimizer.step()
    assert torch.autograd._profiler_enabled()
    second = buoy.Run()
    told = capfd.readouterr().err

    assert not torch.autograd._profiler_enabled()
    assert "1 step, " in told
    second.profile(steps=2)
    train_with(second)
    assert "2 steps, " in capfd.readouterr().err
    held.close()


def test_a_record_is_cut_where_modules_run_on_and_no_step_comes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iterator that is held and never asked again, then work that buoy knows nothing of."""
    from buoy.flight import profile

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = buoy.Run()
    run.track(model=model, optimizer=optimizer)
    run.profile(steps=3)
    held = iter(run.batches(torch.randn(8, 4, 8)))
    for _ in range(4):
        model(next(held)).square().mean().backward()
        optimizer.step()
    # Whatever it has grown is too much: in this process the record finds room that earlier tests have freed.
    monkeypatch.setattr(profile, "_MOST_GROWTH", -(1 << 40))
    other, calls = torch.nn.Linear(8, 8), 0
    while torch.autograd._profiler_enabled() and calls < 20_000:
        other(torch.ones(1, 8))
        calls += 1
    ended_by_itself = not torch.autograd._profiler_enabled()
    held.close()
    told = capfd.readouterr().err

    assert ended_by_itself
    assert "1 step, " in told
    assert "their record would take too much memory" in told
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_trace_that_could_not_be_written_is_not_offered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch logs that the disk was full, and says nothing."""
    run = buoy.Run(tmp_path / "run")
    (tmp_path / "run" / "profiles").write_text("in the way")
    run.profile(steps=2)
    train_with(run)
    told = capfd.readouterr().err

    assert "2 steps, " in told
    assert "raw trace: n/a, it could not be written whole" in told


def test_a_trace_that_breaks_off_is_known_as_such(tmp_path: Path) -> None:
    from buoy.torch.profile import _is_whole

    empty, short, whole = (tmp_path / name for name in ("empty", "short", "whole"))
    empty.touch()
    short.write_text('{"traceEvents": [{"name": "aten::ad')
    whole.write_text('{"traceEvents": []}\n')

    assert [_is_whole(str(path)) for path in (empty, short, whole)] == [False, False, True]
