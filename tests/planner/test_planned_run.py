"""A plan given to a run: the run starts with its micro-batch, and the real peak stands beside the foreseen one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import buoy
from buoy.errors import UsageError
from buoy.machine import limits
from buoy.planner.result import Plan
from buoy.planner.targets import target
from buoy.training import recording

torch = pytest.importorskip("torch")

T4 = {"name": "Tesla T4", "total": 15_640_000_000}


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = torch.nn.Linear(512, 512)
    return buoy.plan(model, (torch.zeros(64, 512), torch.zeros(64, 512)), on="colab-t4")


def compared(
    plan: Plan, reading: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str]]:
    """The events and lines that the end of a run leaves whose framework tells this."""
    framework = "torch" if "reserved" in reading else "keras"
    if framework == "keras":
        pytest.importorskip("tensorflow")
    monkeypatch.setattr(f"buoy.{framework}.memory.device.read", lambda: reading)
    events: list[Any] = []
    said: list[str] = []
    recording.compare(plan, lambda kind, **values: events.append((kind, values)), said.append, framework)
    return events, said


@pytest.mark.parametrize("measure", ["reserved", "allocated"])
def test_the_real_peak_is_told_beside_the_foreseen_one(
    plan: Plan, measure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow takes the whole card: there what was allocated counts."""
    foreseen = getattr(plan.answers[0].estimate, measure)
    bounds = [foreseen.low, foreseen.high]

    events, said = compared(plan, {**T4, measure: foreseen.likely}, monkeypatch)
    more, outside = compared(plan, {**T4, measure: 2 * foreseen.high}, monkeypatch)

    assert events == [("peak", {"what": measure, "foreseen": bounds, "real": foreseen.likely})]
    assert more == [("peak", {"what": measure, "foreseen": bounds, "real": 2 * foreseen.high})]
    assert "outside" not in said[0] and "outside" in outside[0]


def test_nothing_is_compared_on_another_device(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = {"name": "NVIDIA A100-SXM4-40GB", "total": 42_000_000_000, "reserved": 1}

    assert compared(plan, reading, monkeypatch) == ([], [])


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


@pytest.mark.parametrize(
    ("card", "found"), [(T4, "t4"), ({"name": "NVIDIA GeForce GTX 1080 Ti", "total": 11_700_000_000}, None)]
)
def test_this_machine_is_planned_for_where_its_card_is_known(
    card: dict[str, Any], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(limits.read(), gpus=(card,))
    monkeypatch.setattr(limits, "read", lambda *args: here)

    if found is not None:
        assert target("this").device.id == found
        return
    with pytest.raises(UsageError, match="no data on this machine's GPU") as error:
        target("this")
    assert "GTX 1080 Ti" in str(error.value) and "with `--on`" in str(error.value)


def test_a_lightning_guard_writes_down_what_its_training_took(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning")
    from buoy.flight import recorder
    from buoy.lightning import Guard
    from buoy.torch.memory import device
    from buoy.view import history, report

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
        device, "read", lambda: {**T4, "reserved": 2 * plan.answers[0].estimate.reserved.high}
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    trainer = lightning.Trainer(max_steps=2, callbacks=[Guard(tmp_path / "run", plan=plan)], **quiet)
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))

    rows = {row["what"]: row for row in report.as_json(history.read(str(tmp_path / "run")))["plan"]["rows"]}
    foreseen = plan.answers[0].estimate.reserved
    assert rows["reserved by the framework"]["planned"] == [foreseen.low, foreseen.high]
    assert rows["reserved by the framework"]["real"] == 2 * foreseen.high
