"""`buoy.lightning.Guard` in the real Trainer: killed with SIGKILL, out of memory, told to stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.guards.lives import ask_guard, assert_goes_on
from tests.processes import Answers

KILLS = {"everything": [2, 5, 9], "stream": [5, 8], "micro_batches": [3, 7], "unfreezing": [8, 20]}
CHECKS = [
    "recovery",
    "sigterm",
    "finished",
    "left_as_found",
    "odd_batches",
    "refusals",
    "two_processes",
    "remedies",
    "asked_for_a_profile",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    pytest.importorskip("lightning")
    with ask_guard("lightning", tmp_path_factory.mktemp("lightning"), KILLS, CHECKS) as each:
        yield each


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_fit_goes_on_bit_for_bit(name: str, results: Answers) -> None:
    assert_goes_on(results[name], KILLS[name])


def test_a_batch_that_does_not_fit_is_cut_and_the_training_stays_the_same(results: Answers) -> None:
    """Weights, logged means and the metric are those of a training without a guard in which it fits."""
    result = results["recovery"]
    assert result["made"] is not None, result["said"]
    without, guarded = result["made"]

    assert result["said"].count("out of memory with 8 samples; retrying the step in micro-batches of 4") == 1
    assert guarded["steps"] == without["steps"]
    assert guarded["weights"] == pytest.approx(without["weights"], rel=1e-10, abs=1e-14)
    assert without["calls"] == [12, 12]
    assert guarded["calls"] == [17, 17], "five batches in two parts; probes and failed tries leave no trace"
    own = [
        {name: value for name, value in each["metrics"].items() if name != "now"}
        for each in (guarded, without)
    ]
    assert own[0] == pytest.approx(own[1], rel=1e-6)
    assert result["said"].count("a metric's value of a step that is split is the last micro-batch's") == 1


def test_sigterm_saves_and_ends_as_lightning_ends(results: Answers) -> None:
    """The step under way is done and saved; the next start goes on after it."""
    made = results["sigterm"]["made"]
    assert made is not None, results["sigterm"]["said"]

    assert made == {"ended": "SIGTERMException", "first": 5, "last": 5, "handler": True}


def test_a_finished_run_trains_only_what_is_new(results: Answers) -> None:
    made = results["finished"]["made"]
    assert made is not None, results["finished"]["said"]

    assert made["counts"] == [[6, 1, 6], [0, 1, 6], [6, 2, 12]]
    assert made["same"] and made["trained on"] and made["metrics"]
    assert "is finished: 1 epochs, 6 steps" in results["finished"]["said"]


def test_batches_without_samples_and_skipped_steps_go_through_as_they_are(results: Answers) -> None:
    assert results["odd_batches"]["made"] is True, results["odd_batches"]["said"]


def test_the_trainer_is_left_as_it_was_found(results: Answers) -> None:
    made = results["left_as_found"]["made"]
    assert made is not None, results["left_as_found"]["said"]

    assert made[0] == []


def test_what_cannot_be_made_safe_is_refused_in_words(results: Answers) -> None:
    words = results["refusals"]["made"]
    assert words is not None, results["refusals"]["said"]

    assert "automatic_optimization = False" in words[0]
    assert "the checkpoint belongs to another training; nothing was loaded" in words[1]
    assert "model: net.0.weight is (16, 8) in the checkpoint, but (9, 8) here" in words[1]
    assert "keeps the place in one train loader" in words[2]
    assert results["refusals"]["said"].count("optimizer gained 1 parameter group during training") == 1
    assert "optimizer: has 1 parameter groups, the checkpoint 2: make all of them" in words[3]


def test_several_processes_are_refused_on_each_of_them(results: Answers) -> None:
    """DistributedDataParallel over gloo, for real: nobody waits for anybody."""
    said = results["two_processes"]["made"]
    assert said is not None, results["two_processes"]["said"]

    assert [words.splitlines()[:2] for words in said] == [
        ["buoy.lightning.Guard guards one process", "  received: 2 processes"]
    ] * 2


def test_remedies_are_applied_by_one_argument(results: Answers) -> None:
    made, said = results["remedies"]["made"], results["remedies"]["said"]
    assert made is not None, said
    plain, checkpointed, mixed = made

    assert "remedy applied: activation checkpointing, 2 blocks of Model" in said
    assert said.count("remedy applied: mixed precision, bfloat16 on cpu") == 1
    assert checkpointed == plain
    assert "torch.bfloat16" in mixed[1] and "torch.bfloat16" not in plain[1]


def test_a_wish_for_a_profile_is_declined_in_a_line_and_does_not_wait_for_another_training(
    results: Answers,
) -> None:
    made, said = results["asked_for_a_profile"]["made"], results["asked_for_a_profile"]["said"]
    assert made is not None, said

    assert made[0] == 0
    assert said.count("this training is not profiled: `%buoy profile` knows") == 1
    assert "this training is not profiled" not in results["left_as_found"]["said"]


def test_a_guard_shows_the_run_of_its_folder(results: Answers) -> None:
    made = results["asked_for_a_profile"]["made"]
    assert made is not None, results["asked_for_a_profile"]["said"]
    _, name, before, after = made

    assert re.fullmatch(r"<buoy\.lightning\.Guard .*asked_for_a_profile>", name)
    assert "buoy.lightning.Guard" in before and "step" not in before
    assert "step 6" in after and "RAM" in after
