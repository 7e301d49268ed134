"""What people keep beside their models is put back in place: whoever else holds it sees it."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from typing import Any

import pytest

from buoy.checkpoint.values import CannotTrack, Container, refuse, value_of


def read(thing: object) -> Any:
    return thing.getstate() if isinstance(thing, random.Random) else None


def write(generator: random.Random, state: Any) -> None:
    generator.setstate(state)


def loaded(container: Any, stored: Any) -> Any:
    Container(container, read, write).load(copy.deepcopy(stored))
    return container


def test_containers_inside_are_filled_where_they_are() -> None:
    history: list[float] = []
    seen: defaultdict[str, list[int]] = defaultdict(list)
    last: deque[int] = deque(maxlen=2)
    counts: Counter[str] = Counter()
    held = {"history": history, "seen": seen, "last": last, "counts": counts, "best": None}
    stored = {
        "history": [1.0, 2.0],
        "seen": {"a": [1]},
        "last": deque([4, 5], 2),
        "counts": {"x": 3},
        "best": [7],
    }

    assert loaded(held, stored) == stored

    assert (
        held["history"] is history
        and held["seen"] is seen
        and held["last"] is last
        and held["counts"] is counts
    )
    seen["new"].append(1)  # still a defaultdict


def test_names_and_their_order_are_those_of_the_checkpoint() -> None:
    held = {"gone": 1, "kept": 2}

    assert list(loaded(held, {"new": 3, "kept": 4}).items()) == [("new", 3), ("kept", 4)]


def test_one_list_in_two_places_does_not_mix_what_was_saved_apart() -> None:
    empty: list[int] = []

    assert loaded({"train": empty, "val": empty}, {"train": [1], "val": [2]}) == {"train": [1], "val": [2]}


def test_a_deque_of_another_length_is_that_of_the_checkpoint() -> None:
    held = loaded({"last": deque([1], 9)}, {"last": deque([1, 2], 3)})

    assert held["last"].maxlen == 3


def test_what_is_in_itself_is_no_endless_work() -> None:
    held: list[Any] = []
    held.append(held)

    assert loaded(held, [[1]]) == [[1]]


def test_generators_inside_go_on_where_they_were() -> None:
    """As in `vars(environment)`."""

    def environment(seed: int) -> dict[str, Any]:
        return {"draws": random.Random(seed), "pair": ([random.Random(seed)], 1), "steps": [seed]}

    held, anew = environment(5), environment(9)
    held["draws"].random()
    state = Container(held, read, write).state()
    expected = [held["draws"].random(), held["pair"][0][0].random()]
    inner = anew["draws"], anew["pair"][0][0]

    assert loaded(anew, state)["steps"] == [5]

    assert [draws.random() for draws in inner] == expected
    with pytest.raises(ValueError, match="an RNG was saved here"):
        loaded({"draws": 3}, state)


class Own:
    def __init__(self) -> None:
        self.attribute = 1


@pytest.mark.parametrize(
    ("thing", "word"), [(1.5, "keep it in a dict"), (Own(), "vars(x)"), (object(), "both methods")]
)
def test_what_cannot_be_saved_is_refused_with_what_to_do(thing: object, word: str) -> None:
    assert value_of(thing, read, write) is None

    with pytest.raises(CannotTrack) as caught:
        refuse("x", thing, expected="a model", owner="run")

    assert word in str(caught.value)


def test_a_counter_beside_a_generator_is_saved_as_one() -> None:
    held = {"rng": random.Random(1), "counts": Counter(a=1), "seen": defaultdict(list, {"a": [1]})}
    state: Any = Container(held, read, write).state()

    assert type(state["counts"]) is Counter and state["counts"] == {"a": 1}
    assert state["seen"].default_factory is list
