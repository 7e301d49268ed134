"""`buoy.transformers.Guard` in the real Trainer: killed with SIGKILL, out of memory, interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.guards.lives import ask_guard, assert_goes_on
from tests.processes import Answers

KILLS = {"everything": [2, 5, 8], "stream": [3, 6]}
KILLS_OF_TWO_CALLS = [6, 10]
CHECKS = ["recovery", "interrupt", "finished", "without", "refusals", "two_processes", "remedies"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    pytest.importorskip("transformers")
    kills = {**KILLS, "two_calls": KILLS_OF_TWO_CALLS}
    with ask_guard("transformers", tmp_path_factory.mktemp("transformers"), kills, CHECKS) as each:
        yield each


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_training_goes_on_bit_for_bit(name: str, results: Answers) -> None:
    assert_goes_on(results[name], KILLS[name])


def test_a_script_that_trains_in_two_calls_goes_on_in_the_second(results: Answers) -> None:
    """Killed in the second call, its first has nothing to train, and must not take the place for the end."""
    result = results["two_calls"]

    assert result["killed"] == [False, True, True, False] and result["ended"], result["said"]
    assert result["differ"] == result["unlike"] == [], result["said"]


LOSSES = ["divided by the tokens of the step", "a mean over samples", "a mean over tokens"]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_does_not_fit_is_cut_and_the_training_stays_the_same(
    loss: str, results: Answers
) -> None:
    """Weights and losses are those of a training without a guard in which it fits; accumulation is unchanged."""
    result = results["recovery"]
    assert result["made"] is not None, result["said"]
    without, guarded = result["made"][loss]

    assert result["said"].count(
        "out of memory with 4 samples; retrying the step in micro-batches of 2"
    ) == len(LOSSES)
    assert guarded["steps"] == without["steps"] == 8
    assert guarded["weights"] == pytest.approx(without["weights"], rel=1e-10, abs=1e-14)
    assert guarded["losses"] == pytest.approx(without["losses"], rel=1e-6)


def test_ctrl_c_saves_first_and_the_next_start_goes_on(results: Answers) -> None:
    made = results["interrupt"]["made"]
    assert made is not None, results["interrupt"]["said"]

    assert made == {"ended": "KeyboardInterrupt", "steps": [3], "handler": True}


def test_a_finished_run_trains_only_what_is_new(results: Answers) -> None:
    made = results["finished"]["made"]
    assert made is not None, results["finished"]["said"]

    assert made["counts"] == [[4, 4], [0, 4], [4, 8]]
    assert made["same"] and made["trained on"]
    assert "is finished: 4 steps" in results["finished"]["said"]


def test_a_trainer_without_a_guard_is_as_before(results: Answers) -> None:
    made = results["without"]["made"]
    assert made is not None, results["without"]["said"]

    assert made == {"steps": 4, "loader": "DataLoaderShard"}


def test_what_cannot_be_made_safe_is_refused_in_words(results: Answers) -> None:
    words = results["refusals"]["made"]
    assert words is not None, results["refusals"]["said"]

    assert "auto_find_batch_size=True" in words[0]
    assert "the checkpoint belongs to another training; nothing was loaded" in words[1]
    assert "one guard per training" in words[2]


def test_several_processes_are_refused_on_each_of_them(results: Answers) -> None:
    """DistributedDataParallel over gloo, for real: nobody waits for anybody."""
    said = results["two_processes"]["made"]
    assert said is not None, results["two_processes"]["said"]

    assert [words.splitlines()[:2] for words in said] == [
        ["buoy.transformers.Guard guards one process", "  received: 2 processes"]
    ] * 2


def test_remedies_are_applied_by_one_argument(results: Answers) -> None:
    made, said = results["remedies"]["made"], results["remedies"]["said"]
    assert made is not None, said
    plain, checkpointed, mixed = made

    assert "remedy applied: activation checkpointing, the model's own switch" in said
    assert said.count("remedy applied: mixed precision, bfloat16 on cpu") == 1
    assert checkpointed == plain
    assert "torch.bfloat16" in mixed[1] and "torch.bfloat16" not in plain[1]
