"""How often to save: as asked, or from what a checkpoint costs and how long attempts live."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buoy.errors import UsageError
from buoy.training import save_policy
from buoy.training.save_policy import (
    Cost,
    Deadline,
    Rule,
    best_interval,
    in_words,
    lives_of,
    mean_life,
    parse_rule,
)


def loss(interval: float, cost: Cost, life: float) -> float:
    """The share of time lost to saving and to work done twice, as Young counts it."""
    return cost.seconds / interval + interval / (2 * life)


@pytest.mark.parametrize(("stall", "life"), [(0.05, 4 * 3600.0), (0.5, 12 * 3600.0), (2.0, 1800.0)])
def test_no_other_interval_loses_less(stall: float, life: float) -> None:
    cost = Cost(stall, 0.0, 0.0)
    chosen = best_interval(cost, life)

    assert all(
        loss(chosen, cost, life) <= loss(chosen * factor, cost, life) for factor in (0.5, 0.8, 1.25, 2.0)
    ) or (
        chosen == cost.seconds / 0.01  # never more than a hundredth of the time
    )


def test_the_choice_stays_within_bounds() -> None:
    assert best_interval(Cost(0.0, 0.0, 0.0), 3600.0) == 15.0
    assert best_interval(Cost(1000.0, 0.0, 1000.0), 1e9) == 1800.0
    # The writer is busy a tenth of the time at most.
    assert best_interval(Cost(0.001, 0.0, 30.0), 3600.0) == 300.0


def test_the_words_name_cost_interval_share_and_loss() -> None:
    assert in_words(Cost(0.12, 0.0, 0.9), 130.0) == (
        "a checkpoint costs 0.12 s and takes 0.9 s to write; saving every 2 min 10 s: 0.1 % of the time, "
        "at most 2 min 10 s lost"
    )


def test_attempts_that_died_early_shorten_the_interval() -> None:
    calm, rough = mean_life(43200.0, [(40000.0, False)]), mean_life(43200.0, [(600.0, True)] * 5)

    assert rough < calm
    assert mean_life(None, []) > 0


def attempt(folder: Path, number: int, **files: object) -> None:
    place = folder / "attempts" / f"{number:04d}"
    place.mkdir(parents=True)
    for name, value in files.items():
        (place / f"{name}.json").write_text(json.dumps(value))


def test_lives_are_read_from_the_runs_own_attempts(tmp_path: Path) -> None:
    attempt(tmp_path, 1, attempt={"wall": 1000.0}, death={"wall": 1600.0, "status": {"raw": 9}})
    attempt(tmp_path, 2, attempt={"wall": 2000.0}, death={"wall": 2100.0, "status": {"raw": 0}})
    attempt(tmp_path, 3, attempt={"wall": "torn"})
    attempt(tmp_path, 4, attempt={"wall": 3000.0})

    lives = lives_of(str(tmp_path), but=str(tmp_path / "attempts" / "0004"))
    assert lives == [(600.0, True), (100.0, False)]


@pytest.mark.parametrize(
    ("save", "rule"),
    [("10min", Rule(seconds=600)), ("90s", Rule(seconds=90)), (500, Rule(steps=500)), ("500 steps", Rule(steps=500)),
     (None, Rule())],
)  # fmt: skip
def test_when_to_save_is_read_as_people_write_it(save: str | int | None, rule: Rule) -> None:
    assert parse_rule(save) == rule


@pytest.mark.parametrize("save", [0, -5, True, "0s", "often", 2.5])
def test_when_to_save_is_refused_in_words(save: object) -> None:
    with pytest.raises(UsageError) as refused:
        parse_rule(save)  # type: ignore[arg-type]

    assert refused.value.hint


def test_before_the_end_it_saves_once_at_the_margin_and_then_again_and_again() -> None:
    cost = Cost(0.1, 0.1, 1.0)
    end = Deadline(at=1000.0, limit=1000.0)
    saved: float | None = 900.0
    times = []
    for now in range(900, 1010):
        if end.due(float(now), saved, cost, mirror=0.0, step=0.1):
            times.append(now)
            saved = float(now)

    assert times == [970, 980, 990]


def test_the_margin_grows_with_the_save_the_mirror_and_the_step() -> None:
    assert save_policy.margin(None, 0.0, 0.0) == 30.0
    assert save_policy.margin(Cost(1.0, 0.0, 20.0), 60.0, 5.0) == 15.0 + 63.0 + 120.0 + 10.0
