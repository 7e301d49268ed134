"""RAM that stands at its limit: warned of without a step or a growth, and only when it matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buoy.flight.alarms.level import LevelWatch, sentence
from buoy.flight.log import memory_use

GIB = 2**30
LIMIT = 12.7 * GIB


def watched(
    share: Callable[[int], float] | float,
    seconds: int,
    *,
    step: Callable[[int], int] = lambda t: 0,
    phase: str = "train",
    limit: float = LIMIT,
    own: float = 0.9,
) -> list[int]:
    """The seconds at which a session is warned that is fed once a second."""
    watch = LevelWatch()
    shares = share if callable(share) else lambda t: share
    return [
        t
        for t in range(seconds)
        if watch.feed(float(t), shares(t) * limit, limit, own * shares(t) * limit, step(t), phase) is not None
    ]


def test_a_session_that_stands_at_97_percent_before_its_first_step_is_warned_of() -> None:
    told = watched(0.975, 1300)

    assert told[0] == 10
    assert told[1:] == [300, 600, 1200]  # no step came for so long: then ever more rarely


def test_one_that_trains_there_for_hours_is_warned_of_once() -> None:
    assert len(watched(0.97, 4 * 3600, step=lambda t: t // 20)) == 1


@pytest.mark.parametrize("share", [0.85, 0.9, 0.94])
def test_what_many_trainings_use_is_no_news(share: float) -> None:
    assert watched(share, 4 * 3600) == []


def test_a_short_peak_is_no_news() -> None:
    """Loading a checkpoint takes twice the memory for some seconds."""
    assert watched(lambda t: 0.98 if t % 60 < 8 else 0.6, 3600) == []


def test_a_saw_tooth_of_every_epoch_is_one_stay_after_the_other_and_told_once() -> None:
    told = watched(lambda t: 0.97 if t % 600 < 300 else 0.7, 4 * 3600, step=lambda t: t // 2)

    assert len(told) == 1


def test_memory_of_others_is_not_this_trainings() -> None:
    assert watched(0.99, 3600, own=0.1) == []


def test_a_large_machine_with_room_for_more_is_not_full() -> None:
    assert watched(0.97, 3600, limit=1024 * GIB) == []
    assert watched(0.9985, 3600, limit=1024 * GIB) != []


@pytest.mark.parametrize("phase", ["eval", "checkpoint", "done"])
def test_no_step_is_expected_in_an_evaluation_or_between_two_cells(phase: str) -> None:
    assert watched(0.97, 3600, phase=phase) == [10]


def test_time_in_which_nobody_watched_does_not_count() -> None:
    watch = LevelWatch()
    told = [watch.feed(100.0 * n, 0.98 * LIMIT, LIMIT, LIMIT, 0, "train") for n in range(50)]

    assert told == [None] * 50


def test_a_forecast_of_the_same_memory_has_said_enough_for_a_minute() -> None:
    watch = LevelWatch()
    watch.forecast_told()
    told = [t for t in range(200) if watch.feed(float(t), 0.98 * LIMIT, LIMIT, LIMIT, 0, "train")]

    assert told == [60]


def test_the_words_tell_whether_steps_come() -> None:
    watch = LevelWatch()
    found = [watch.feed(float(t), 0.98 * LIMIT, LIMIT, LIMIT, 120, "train") for t in range(400)]
    first, later = [sentence(level) for level in found if level is not None]

    assert first.startswith("RAM has been at 12.4 GiB of 12.7 GiB (98 %) for 10 s: it is killed when full.")
    assert "for 5 min, with no step since step 120" in later and later.endswith("Save now.")


def test_the_machines_memory_counts_where_no_group_has_a_limit_below_it() -> None:
    assert memory_use(5, 10, 100, 1000) == (5, 10)
    assert memory_use(5, 2000, 100, 1000) == (900, 1000)
    assert memory_use(None, None, 100, 1000) == (900, 1000)
    assert memory_use(None, None, None, 1000) == (None, 1000)
