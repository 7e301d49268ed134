"""What holds memory: arrays are found wherever they are, and each is counted once."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from buoy.machine import heap


class Owner:
    """Keeps an array in an attribute."""

    def __init__(self, size: int) -> None:
        self.array = numpy.zeros(size, "uint8")


def found(owners: dict[str, Any] | None = None) -> dict[str, int]:
    return heap.by_owner(owners or {}, heap.array, {"NumPy arrays": heap.array})


@pytest.mark.parametrize(
    "hold",
    [Owner, lambda size: [numpy.zeros(size, "uint8")], lambda size: {"x": (numpy.zeros(size, "uint8"),)}],
    ids=["attribute", "list", "tuple in a dict"],
)
def test_an_array_is_found_by_what_it_is_in(hold: Any) -> None:
    before = found().get("NumPy arrays", 0)
    kept = hold(5_000_000)
    after = found().get("NumPy arrays", 0)

    assert kept
    assert 5_000_000 <= after - before < 5_100_000


def test_what_has_an_owner_is_counted_for_it_alone_and_a_view_for_nobody() -> None:
    mine = Owner(5_000_000)
    view = mine.array[10:]
    without = found()["NumPy arrays"]

    told = found({"mine": [mine.array, mine.array, view]})

    assert told["mine"] == 5_000_000
    assert without - told.get("NumPy arrays", 0) == pytest.approx(5_000_000, abs=100_000)


def test_an_exception_that_was_shown_keeps_its_frames_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        large = numpy.zeros(5_000_000, "uint8")
        raise ValueError(large.shape)

    try:
        fails()
    except ValueError as error:
        monkeypatch.setattr("sys.last_traceback", error.__traceback__, raising=False)

    assert found()["sys.last_traceback"] >= 5_000_000
