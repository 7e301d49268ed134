"""Ranks shrink together, never pair different batches and never wait for one that has failed."""

from __future__ import annotations

import pytest

from tests.recovery.conftest import Ranks


@pytest.mark.parametrize("kind", ["plain", "unused", "accumulation", "inner"])
def test_ranks_shrink_together_and_train_as_one_process_would(kind: str, ranks: Ranks) -> None:
    first, second = ranks(kind)

    assert "error" not in first
    assert "error" not in second
    assert first["weights"] == second["weights"]
    assert first["off"] < 1e-6
    assert first["sizes"] == second["sizes"]
    assert second["said"]


def test_buffers_are_exchanged_outside_of_the_tries(ranks: Ranks) -> None:
    """DDP broadcasts them inside forward, where a rank that fails would leave the others waiting."""
    first, second = ranks("batchnorm")

    assert first["steps"] == second["steps"] == 6
    assert first["weights"] == second["weights"]


def test_a_bug_on_one_rank_ends_both_at_the_same_step(ranks: Ranks) -> None:
    first, second = ranks("bug")

    assert second["error"] == "ValueError: label out of range"
    assert first["error"].startswith("PeerFailed: another process could not run this step")
    assert first["steps"] == second["steps"] == 4
    assert first["weights"] == second["weights"]


def test_an_empty_batch_on_one_rank_leaves_nobody_waiting(ranks: Ranks) -> None:
    first, second = ranks("empty")

    assert second["error"].startswith("BadBatch: the batch is empty")
    assert first["error"].startswith("PeerFailed")
    assert first["steps"] == second["steps"] == 2


def test_a_first_part_in_which_everything_is_ignored_ends_nothing(ranks: Ranks) -> None:
    """A new size is tried alone before gradients are exchanged: such a try has no weight, the batch has."""
    first, second = ranks("ignored")

    assert "error" not in first
    assert "error" not in second
    assert first["off"] < 1e-6
    assert first["sizes"] == second["sizes"]


def test_a_loss_that_exchanges_numbers_with_other_ranks_is_called_once_per_step(ranks: Ranks) -> None:
    """Ranks that compare other numbers of parts would meet in the wrong exchange, or wait for ever."""
    first, second = ranks("exchanging")

    assert "error" not in first
    assert "error" not in second
    assert first["weights"] == second["weights"]


def test_a_loss_that_exchanges_numbers_with_other_ranks_is_not_cut(ranks: Ranks) -> None:
    for answer in ranks("exchanging-cut"):
        assert answer["error"].startswith("CannotSplit: splitting this batch would change the gradient")
        assert "communicates with other processes" in answer["error"]
        assert answer["steps"] == 0


def test_a_static_graph_is_refused(ranks: Ranks) -> None:
    """DDP counts the backward passes of its first step: with others before it, gradients were never exchanged."""
    for answer in ranks("static"):
        assert answer["error"].startswith("CannotSplit: DistributedDataParallel with static_graph=True")
        assert "leave it out" in answer["error"]


def test_ddp_inside_join_is_refused(ranks: Ranks) -> None:
    """A rank that is done answers DDP's exchanges: a vote met one of those, and was read as "give up"."""
    for answer in ranks("join"):
        assert answer["error"].startswith("CannotSplit: DistributedDataParallel cannot be recovered inside")
        assert answer["steps"] == 0
