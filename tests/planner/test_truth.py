"""A plan given to a run: the run starts with its micro-batch, and the real peak is kept beside the foreseen one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import buoy
from buoy.errors import BuoyError, UsageError
from buoy.estimate import devices
from buoy.machine import limits
from buoy.planner import calibration, truth
from buoy.planner.model import Plan
from buoy.planner.targets import target

torch = pytest.importorskip("torch")

T4 = {"name": "Tesla T4", "total": 15_640_000_000}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = torch.nn.Linear(512, 512)
    return buoy.plan(model, (torch.zeros(64, 512), torch.zeros(64, 512)), on="colab-t4")


def test_the_real_peak_is_kept_with_the_error(plan: Plan, tmp_path: Path) -> None:
    foreseen = plan.answers[0].estimate.reserved
    said: list[str] = []

    kept = truth.keep(plan, {**T4, "reserved": foreseen.likely}, str(tmp_path / "run"), said.append)
    truth.keep(plan, {**T4, "reserved": 2 * foreseen.high}, None, said.append)

    assert kept is not None and kept["error"] == 0 and kept["inside"]
    assert [record["inside"] for record in truth.known()] == [True, False]
    assert truth.known(str(tmp_path / "run")) == [kept]
    assert "outside" not in said[0] and "outside" in said[1]


def test_nothing_is_compared_on_another_device(plan: Plan) -> None:
    reading = {"name": "NVIDIA A100-SXM4-40GB", "total": 42_000_000_000, "reserved": 1}

    assert truth.keep(plan, reading, None, print) is None
    assert truth.known() == []


def test_a_run_starts_with_the_plans_micro_batch(plan: Plan) -> None:
    smaller = replace(plan, answers=(replace(plan.answers[0], micro_batch=16),))
    assert smaller.micro_batch == 16 and plan.micro_batch is None

    seen: list[int] = []
    model = torch.nn.Linear(512, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with buoy.Run(plan=smaller) as run:
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches([torch.zeros(64, 512)]):

            def loss_of(part):  # type: ignore[no-untyped-def]
                seen.append(len(part))
                return model(part).mean()

            run.backward(batch, loss_of)
            optimizer.step()

    assert max(seen) == 16 and sum(seen) >= 64


def test_calibration_says_that_there_is_nothing_to_measure_without_a_gpu() -> None:
    with pytest.raises(BuoyError) as error:
        calibration.measure(None, None)

    assert "no NVIDIA GPU" in str(error.value)


def test_measured_constants_are_used_from_then_on(tmp_path: Path) -> None:
    folder = Path(calibration.folder())
    folder.mkdir(parents=True)
    (folder / "devices.json").write_text('{"t4": {"total": 15000000000, "beside": 150000000}}')

    assert calibration.applied(devices.by_id("t4")).memory == 15_000_000_000
    assert calibration.applied(devices.by_id("t4")).context[0] == 150_000_000
    assert calibration.applied(devices.by_id("l4")) == devices.by_id("l4")


def test_a_card_that_no_table_knows_is_planned_for_once_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = {"name": "NVIDIA GeForce GTX 1080 Ti", "total": 11_700_000_000}
    here = replace(limits.read(), gpus=(card,))
    monkeypatch.setattr(limits, "read", lambda *args: here)
    with pytest.raises(UsageError) as error:
        target("this")
    assert "buoy plan --calibrate" in str(error.value)

    calibration.keep(
        card["name"], {**card, "beside": 200 << 20, "capability": 61, "multiprocessors": 28, "threads": 2048}
    )

    found = target("this").device
    assert found.name == card["name"] and found.memory == card["total"] and found.context[0] == 200 << 20
    plan = buoy.plan(
        torch.nn.Linear(64, 10), (torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)), on="this"
    )
    assert plan.answers[0].memory_verdict == "fits"
    kept = truth.keep(plan, {**card, "reserved": plan.answers[0].estimate.reserved.likely}, None, print)
    assert kept is not None and kept["inside"]


def test_tensorflows_peak_is_compared_with_what_was_to_be_allocated(plan: Plan) -> None:
    foreseen = plan.answers[0].estimate.allocated

    kept = truth.keep(plan, {**T4, "allocated": foreseen.likely}, None, print)

    assert kept is not None and kept["allocated"] == foreseen.likely and kept["inside"]


def test_a_lightning_guard_keeps_what_its_training_took(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning")
    from buoy.flight import recorder
    from buoy.lightning import Guard
    from buoy.torch import real_peak

    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))

    class Line(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):  # type: ignore[no-untyped-def]
            return self.layer(batch).square().mean()

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.setattr(
        real_peak, "read", lambda: {**T4, "reserved": 2 * plan.answers[0].estimate.reserved.high}
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    trainer = lightning.Trainer(max_steps=2, callbacks=[Guard(tmp_path / "run", plan=plan)], **quiet)
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))

    assert [record["inside"] for record in truth.known(str(tmp_path / "run"))] == [False]
