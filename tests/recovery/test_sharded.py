"""Sharded models (FSDP, DTensor, ZeRO) under torchrun: refused in words on every rank, at the start; nobody waits."""

from __future__ import annotations

import pytest

from tests.recovery.conftest import Ranks

Answers = list[dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def answers(ranks: Ranks) -> Answers:
    """What each rank was told; the ranks trained on afterwards."""
    return ranks("sharded")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "what", "how"),
    [
        ("fsdp", "model", "FullyShardedDataParallel (FSDP)"),
        ("fsdp", "optimizer", "AdamW (FSDP)"),
        ("fsdp inside", "model", "Sequential (FSDP)"),
        ("fsdp inside", "optimizer", "AdamW (FSDP)"),
        ("fsdp2", "model", "FSDPSequential (DTensor: FSDP2, or tensor parallel)"),
        ("fsdp2", "optimizer", "AdamW (DTensor: FSDP2, or tensor parallel)"),
        ("zero", "optimizer", "ZeroRedundancyOptimizer (ZeRO)"),
    ],
)
def test_what_is_sharded_is_not_tracked(rank: int, kind: str, what: str, how: str, answers: Answers) -> None:
    """Rank 0's checkpoint would hold a part of it, and look whole."""
    said = answers[rank][kind][what]

    assert said.startswith("CannotSave:") and "is sharded over several processes" in said
    assert f"received: {how}" in said
    assert "torch.distributed.checkpoint" in said


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp inside", "fsdp2"])
def test_a_step_of_a_sharded_model_is_not_made_safe(rank: int, kind: str, answers: Answers) -> None:
    said = answers[rank][kind]["backward"]

    assert said.startswith("CannotSplit: sharded parameters (FSDP) cannot be recovered")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_model_beside_a_sharded_optimizer_is_tracked(rank: int, answers: Answers) -> None:
    assert answers[rank]["zero"]["model"] == "nothing was said"
