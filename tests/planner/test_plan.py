"""`buoy.plan` on real traces: verdicts, micro-batches, remedies that depend on what owns the peak, and bad input."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

import buoy
from buoy.estimate.child import EstimateError
from buoy.planner.plan import parse_source
from buoy.planner.remedies import NOT_APPLICABLE, changes_for, find_remedies
from buoy.planner.result import FITS, NOT, UNKNOWN, Plan
from buoy.planner.traces import Workshop

torch = pytest.importorskip("torch")

BUILDS = str(Path(__file__).parent / "builds.py")
T4 = 14909 << 20


@pytest.fixture(scope="module")
def by_activations() -> Plan:
    return buoy.plan(f"{BUILDS}:activations", on="colab-t4")


@pytest.fixture(scope="module")
def by_parameters() -> Plan:
    return buoy.plan(f"{BUILDS}:parameters", on="rtx-4060")


def saving(plan: Plan, name: str) -> float:
    now = plan.answers[0].peak
    return next(remedy.saving(now) or 0.0 for remedy in plan.remedies if remedy.id == name)


def test_a_step_that_does_not_fit_gets_a_micro_batch_that_does(by_activations: Plan) -> None:
    answer = by_activations.answers[0]

    assert answer.memory_verdict == NOT and not by_activations.fits
    assert answer.micro_batch is not None and 0 < answer.micro_batch < 200_000
    remedy = next(remedy for remedy in by_activations.remedies if remedy.id == "micro-batch")
    assert remedy.verdict == FITS and remedy.exact and remedy.basis == "traced"
    assert remedy.peak is not None and remedy.peak.high <= T4
    assert f"micro_batch={by_activations.micro_batch}" in remedy.code


def test_the_cheapest_way_to_fit_is_exact_where_one_is(by_activations: Plan) -> None:
    assert by_activations.cheapest is not None
    assert by_activations.cheapest.verdict == FITS and by_activations.cheapest.exact


def test_what_helps_depends_on_what_owns_the_peak(by_activations: Plan, by_parameters: Plan) -> None:
    assert saving(by_activations, "checkpointing") > 0.2
    assert abs(saving(by_parameters, "checkpointing")) < 0.02
    assert saving(by_parameters, "optimizer-sgd") > 0.1
    assert abs(saving(by_activations, "optimizer-sgd")) < 0.02
    assert saving(by_parameters, "lora") > 0.4
    assert saving(by_parameters, "in-backward") > 0.1


def test_what_moves_to_the_host_is_judged_by_its_ram_there(by_activations: Plan, by_parameters: Plan) -> None:
    moved = next(remedy for remedy in by_activations.remedies if remedy.id == "offload")
    unknown = next(remedy for remedy in by_parameters.remedies if remedy.id == "offload")
    # Of each block the input and what `relu` returned are kept, and the weights' views.
    kept = 4 * 200_000 * (1024 + 4096) * 4

    assert moved.host is not None and moved.host.low > kept and moved.host.limit < kept
    assert moved.verdict == NOT and "host RAM" in moved.note and "offload" not in by_activations.cheapest.id
    assert unknown.verdict == UNKNOWN and "not known" in unknown.note


def test_advice_that_does_nothing_is_named_with_its_reason(by_activations: Plan) -> None:
    pruning = next(remedy for remedy in by_activations.remedies if remedy.id == "pruning")

    assert pruning.saving(by_activations.answers[0].peak) < 0 and pruning.basis == "traced"
    assert "mask" in pruning.note
    assert "these take nothing from this peak" in str(by_activations)


def test_parts_and_owners_are_shown(by_activations: Plan) -> None:
    text = str(by_activations)

    assert "does not fit" in text and "activations" in text and "owners" in text
    html = by_activations._repr_html_()
    assert "<table" in html and "the cheapest that fits" in html and "<details>" in html
    assert "`" not in html.rpartition("<p>")[2]
    assert json.loads(json.dumps(by_activations.to_json()))["schema"] == "buoy.plan/1"


def test_no_micro_batch_helps_where_weights_own_the_peak(by_parameters: Plan) -> None:
    assert by_parameters.answers[0].largest == 0
    assert by_parameters.answers[0].micro_batch == 0


def test_smaller_pieces_are_not_called_exact_with_batch_norm() -> None:
    source = f"{BUILDS}:normalised"
    answer = buoy.plan(source, on="colab-t4", remedies=False).answers[0]
    change = next(c for c in changes_for(parse_source(source), answer) if c.id == "micro-batch")

    assert change.exact is False
    assert "BatchNorm" in change.note


def test_the_objects_of_this_process_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others make files in the machine's own

    class OnlyHere(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 4)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.layer(x)

    model = OnlyHere()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(8, 32), torch.zeros(8, dtype=torch.long))
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    before = model.layer.weight.detach().clone()
    plan = buoy.plan(model, batch, optimizer, on=["colab-t4", "this"])

    assert plan.fits and plan.batch == 8 and plan.facts["optimizer"] == "AdamW"
    assert torch.equal(before, model.layer.weight) and model.layer.weight.grad is not None
    assert len(optimizer.state) == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith("buoy-plan")]


def test_objects_of_this_process_that_read_values_are_stepped_for_real() -> None:
    class ReadsValues(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if x.sum().item() > 1 else 1)

    model = ReadsValues(50, 10)
    optimizer = torch.optim.AdamW(model.parameters())

    plan = buoy.plan(model, (torch.zeros(8, 50), torch.zeros(8, dtype=torch.long)), optimizer, on="colab-t4")

    assert plan.facts["engine"] == "real" and plan.fits
    assert any("depends on values" in note for note in plan.notes)


def test_a_batch_that_does_not_match_shows_its_shapes() -> None:
    with pytest.raises(buoy.BuoyError) as error:
        buoy.plan(torch.nn.Linear(50, 10), (torch.zeros(8, 99), torch.zeros(8, dtype=torch.long)))

    assert "8x99 float32" in str(error.value)


def test_a_model_without_a_batch_is_refused_in_words() -> None:
    with pytest.raises(buoy.BuoyError) as error:
        buoy.plan(torch.nn.Linear(2, 2))

    assert "next(iter(loader))" in str(error.value)


def test_nonsense_is_refused_and_what_never_ends_is_ended() -> None:
    with pytest.raises(buoy.BuoyError) as error:
        buoy.plan(f"{BUILDS}:nonsense")
    assert "a model and a batch" in str(error.value)
    begun = time.monotonic()
    with Workshop(timeout=3) as workshop, pytest.raises(buoy.BuoyError) as error:
        workshop.trace(parse_source(f"{BUILDS}:endless"))
    assert "did not finish" in str(error.value)
    assert time.monotonic() - begun < 60


def test_bad_builds_are_named_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = {
        "raising": "KeyError: 'no such flag'", "prompting": "asks for input", "forking": "returned nonsense",
        "custom_operation": "planner_tests.doubled",
    }  # fmt: skip
    with Workshop(timeout=60) as workshop:
        for name, expected in words.items():
            with pytest.raises(buoy.BuoyError) as error:
                workshop.trace(parse_source(f"{BUILDS}:{name}"))
            assert expected in str(error.value), name
        assert workshop.trace(parse_source(f"{BUILDS}:on_cuda")).facts["parameters"] == 650
    assert not [name for name in os.listdir(tmp_path) if name.startswith("buoy-plan")]


def test_the_next_smaller_sibling_is_named_and_traced() -> None:
    pytest.importorskip("transformers")
    with Workshop() as workshop:
        request = parse_source(f"{BUILDS}:bert_medium")
        whole, smaller = workshop.trace(request), workshop.trace(replace(request, changes=("smaller_model",)))
        with pytest.raises(EstimateError) as error:
            workshop.trace(replace(parse_source(f"{BUILDS}:parameters"), changes=("smaller_model",)))

    assert 0 < smaller.facts["parameters"] < whole.facts["parameters"] - 4 * 3 * 1024**2
    assert "bert-small instead" in smaller.notes
    assert error.value.message in NOT_APPLICABLE


def test_what_the_next_tier_would_buy_is_shown(by_activations: Plan) -> None:
    better = by_activations.next_tier

    assert better is not None and better.target.id == "colab-l4"
    assert (better.largest or 0) > (by_activations.answers[0].largest or 0)
    assert "1.71 compute units an hour (of 2026-03-10)" in str(by_activations)
    assert "1.71 compute units an hour (of 2026-03-10)" in by_activations._repr_html_()


def test_a_tier_whose_disk_is_too_small_is_not_said_to_fit(by_activations: Plan) -> None:
    better = by_activations.next_tier
    assert better is not None
    needs = tuple(replace(need, limit=0.0) if need.name == "disk" else need for need in better.needs)

    text = str(replace(by_activations, next_tier=replace(better, memory_verdict=FITS, needs=needs)))

    assert f"{better.target.words}: does not fit (disk)" in text


def test_remedies_that_nobody_asked_for_end_with_their_time_and_are_named(by_activations: Plan) -> None:
    with Workshop() as workshop:
        request, answer = parse_source(f"{BUILDS}:activations"), by_activations.answers[0]
        found, cheapest = find_remedies(workshop, request, answer, None, lambda text: None, seconds=0.0)

        assert workshop.traces == 0 and cheapest is None
    late = {remedy.id for remedy in found if remedy.basis == "not tried"}
    assert {"mixed-precision", "checkpointing"} <= late
    assert all("`--remedies` tries all" in remedy.note for remedy in found if remedy.id in late)


def test_a_cpu_without_a_machine_is_not_offered_as_a_place() -> None:
    from buoy.errors import UsageError
    from buoy.planner.targets import target

    with pytest.raises(UsageError) as error:
        target("cpu")

    assert "did you mean `this`?" in str(error.value) and ", cpu," not in str(error.value)
