"""Which checkpoints stay, and which make room."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from buoy.checkpoint.retention import Keep, Room, as_keep, plan, surplus, to_make_room
from buoy.errors import UsageError

GIB = 1 << 30
HOUR = 3600.0


@dataclass(frozen=True)
class Saved:
    step: int
    time: float | None = None
    bytes: int = 10
    about: dict[str, Any] = field(default_factory=dict)
    complete: bool = True


def run_of(*steps: int, losses: dict[int, float] | None = None, pinned: tuple[int, ...] = ()) -> list[Saved]:
    """One checkpoint per hour, newest first as the store lists them."""
    made = []
    for hour, step in enumerate(steps):
        about: dict[str, Any] = {"metrics": {"val_loss": (losses or {}).get(step)}}
        if step in pinned:
            about["pin"] = "kept"
        made.append(Saved(step, hour * HOUR, about=about))
    return made[::-1]


def steps(entries: list[Saved]) -> list[int]:
    return [entry.step for entry in entries]


def test_the_last_few_stay_and_the_rest_goes_oldest_first() -> None:
    assert steps(surplus(run_of(1, 2, 3, 4, 5), Keep(last=2))) == [1, 2, 3]


def test_the_best_stays_by_either_direction_and_nan_is_no_best() -> None:
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 2.5}

    assert steps(surplus(run_of(1, 2, 3, 4, 5, losses=losses), Keep(last=1, best="val_loss"))) == [1, 3, 4]
    assert steps(surplus(run_of(1, 2, 3, 4, 5, losses=losses), Keep(last=1, best="max:val_loss"))) == [
        2,
        3,
        4,
    ]
    assert steps(surplus(run_of(1, 2, 3, losses={}), Keep(last=1, best="val_loss"))) == [1, 2]


def test_one_of_each_period_stays_for_ever() -> None:
    """What stays at one time must not be taken for surplus at a later one."""
    everything = run_of(*range(1, 25))
    there: list[Saved] = []
    for entry in reversed(everything):
        there.insert(0, entry)
        for gone in surplus(there, Keep(last=1, every="6h")):
            there.remove(gone)

    assert steps(there) == [24, 19, 13, 7, 1]


def test_pinned_ones_stay() -> None:
    assert steps(surplus(run_of(1, 2, 3, pinned=(1,)), Keep(last=1))) == [2]


def test_a_step_that_was_saved_twice_counts_once() -> None:
    entries = [Saved(3, 4.0), Saved(3, 3.0), Saved(2, 2.0), Saved(1, 1.0)]

    assert surplus(entries, Keep(last=2)) == [entries[3], entries[1]]


def test_what_is_not_complete_is_neither_counted_nor_removed() -> None:
    """Damaged ones are evidence, and must not push good ones out."""
    entries = [Saved(4, complete=False), Saved(3), Saved(2), Saved(1)]

    assert steps(surplus(entries, Keep(last=2))) == [1]


def test_room_is_made_in_the_order_of_sacrifice_and_two_good_ones_stay() -> None:
    entries = run_of(1, 2, 3, 4, 5, losses={1: 9.0, 2: 1.0})
    keep = Keep(last=3, best="val_loss")

    assert steps(to_make_room(entries, keep, 10)) == [1]  # what is surplus anyway
    assert steps(to_make_room(entries, keep, 20)) == [1, 3]  # then the older of the last few
    assert steps(to_make_room(entries, keep, 30)) == [1, 3, 2]  # the best comes last
    assert to_make_room(entries, keep, 40) == []  # it would not do: nothing is lost for nothing


def test_whatever_is_asked_the_two_newest_good_ones_and_the_pinned_survive() -> None:
    for seed in range(300):
        chance = Random(seed)
        entries = [
            Saved(step, float(chance.randrange(100_000)), chance.randrange(1, 50),
                  {"metrics": {"loss": chance.random()}, "pin": chance.choice([None, None, "x"])},
                  complete=chance.random() < 0.8)
            for step in range(chance.randrange(1, 12), 0, -1)
        ]  # fmt: skip
        keep = Keep(chance.randrange(1, 4), chance.choice([None, "loss"]), chance.choice([None, "1h"]))
        good = [entry for entry in entries if entry.complete]
        needed = chance.randrange(1, 200)
        going = to_make_room(entries, keep, needed)

        assert not [entry for entry in going if entry.about["pin"] or entry in good[:2]]
        if any(not entry.complete for entry in going):  # the damaged go first, while two good ones stay
            assert len(good) >= 2 and not going[0].complete
        assert not going or sum(entry.bytes for entry in going) >= needed
        assert not good or good[0] not in surplus(entries, keep)


def test_a_number_is_the_last_so_many() -> None:
    assert (as_keep(5), as_keep(None)) == (Keep(last=5), Keep(last=3))


@pytest.mark.parametrize(
    "wrong", [{"last": 0}, {"last": -1}, {"best": "max:"}, {"every": "0h"}, {"every": "soon"}]
)
def test_a_wish_that_cannot_be_read_is_refused_in_words(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        Keep(**wrong)

    assert refused.value.hint


def test_what_does_not_fit_is_said_before_training() -> None:
    found = plan(int(1.2 * GIB), Room(20 * GIB, "given"), Keep(last=40, best="val_loss"), None)

    assert found.words.startswith(
        "41 checkpoints of 1.2 GiB do not fit in 20.0 GiB: keeping the last 14 and the best"
    )
    assert (found.keep.last, found.keep.best) == (14, "val_loss")


def test_what_is_kept_and_the_next_one_fit_together() -> None:
    """The old one goes only once the new one is proven: there must be room for one more than is kept."""
    for fits in range(2, 30):
        for keep in (Keep(last=3), Keep(last=10, best="loss"), Keep(last=1, best="loss")):
            found = plan(GIB, Room(fits * GIB + 1, "free"), keep, None).keep
            assert found.last + (found.best is not None) + 1 <= max(fits, 2)


def test_one_or_none_that_fits_is_told() -> None:
    assert "only one checkpoint of 1.0 GiB fits" in plan(GIB, Room(GIB, "free"), Keep(), None).words
    assert plan(GIB, Room(GIB - 1, "free"), Keep(), None).fits == 0
    assert plan(GIB, Room(None, "free"), Keep(), None).keep == Keep()


def test_the_history_is_counted_over_the_session() -> None:
    found = plan(GIB, Room(10 * GIB, "given"), Keep(last=2, every="1h"), 12.0)

    assert found.words.startswith(
        "14 checkpoints of 1.0 GiB do not fit in 10.0 GiB: keeping the last 2 and one every 1h"
    )
