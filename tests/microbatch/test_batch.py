"""Batches of every make are cut along their samples."""

from __future__ import annotations

import dataclasses
import weakref
from collections import UserDict, namedtuple
from typing import Any

import pytest

from buoy.microbatch.batch import Batch, even
from buoy.microbatch.errors import BadBatch


class Array:
    """The least that counts as an array."""

    def __init__(self, rows: list[Any], *shape: int) -> None:
        self.rows = rows
        self.shape = (len(rows), *shape)

    def __getitem__(self, key: Any) -> Array:
        chosen = [self.rows[index] for index in key] if isinstance(key, list) else self.rows[key]
        return Array(chosen, *self.shape[1:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.rows == other.rows


class Scalar(Array):
    def __init__(self) -> None:
        self.rows, self.shape = [], ()


Pair = namedtuple("Pair", "x y")


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a mapping whose items are attributes too."""

    note = "kept"

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclasses.dataclass(frozen=True)
class Record:
    x: Array
    y: Array
    temperature: float = 0.5


def rows(start: int = 0, stop: int = 6) -> Array:
    return Array(list(range(start, stop)), 3)


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        (rows(), rows(2, 4)),
        ((rows(), rows()), (rows(2, 4), rows(2, 4))),
        ([rows(), rows()], [rows(2, 4), rows(2, 4)]),
        ({"x": rows(), "deep": {"y": [rows()]}}, {"x": rows(2, 4), "deep": {"y": [rows(2, 4)]}}),
        (Pair(rows(), rows()), Pair(rows(2, 4), rows(2, 4))),
        (Record(rows(), rows()), Record(rows(2, 4), rows(2, 4))),
        ((rows(), list("abcdef")), (rows(2, 4), ["c", "d"])),
        ((rows(), "train", None, 3), (rows(2, 4), "train", None, 3)),
        ((rows(), ["two", "names"]), (rows(2, 4), ["two", "names"])),
    ],
    ids=[
        "array",
        "tuple",
        "list",
        "nested dict",
        "namedtuple",
        "dataclass",
        "strings",
        "constants",
        "other list",
    ],
)
def test_a_part_has_the_shape_of_the_whole(batch: Any, part: Any) -> None:
    whole = Batch(batch)

    assert whole.samples == 6
    assert whole.take(2, 4) == part
    assert type(whole.take(2, 4)) is type(batch)


def test_a_mapping_with_attributes_keeps_them() -> None:
    part = Batch(Encoding({"ids": rows(), "labels": rows()})).take(0, 2)

    assert isinstance(part, Encoding)
    assert part.ids == part["labels"] == rows(0, 2)


def test_the_whole_is_passed_on_without_a_copy_of_its_arrays() -> None:
    x = rows()

    assert Batch((x, rows())).take(0, 6)[0] is x  # type: ignore[index]


def test_a_container_changed_by_the_loss_function_is_not_the_persons_own() -> None:
    batch = {"x": rows()}
    part = Batch(batch).take(0, 6)
    part["x"] = None  # type: ignore[index]

    assert batch["x"] == rows()


def test_numbers_without_a_dimension_belong_to_every_part() -> None:
    scalar = Scalar()

    assert Batch((rows(), scalar)).take(0, 1)[1] is scalar  # type: ignore[index]


def test_parts_that_disagree_are_named_where_a_cut_is_needed() -> None:
    batch = {"x": rows(), "edges": rows(0, 2)}
    whole = Batch(batch)

    assert "batch['x']: 6, batch['edges']: 2" in (whole.reason or "")
    assert "split=" in (whole.hint or "")
    assert whole.samples == 1
    assert whole.take(0, 1) == batch


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ((rows(), [{"boxes": rows(0, 2 + n)} for n in range(6)]), [{"boxes": rows(0, 4)}, {"boxes": rows(0, 5)}]),
        ((rows(), [{"boxes": rows(0, 3)}] * 6), [{"boxes": rows(0, 3)}] * 2),
        (([rows(0, 3)] * 6, [{"boxes": rows(0, 3 + n)} for n in range(6)]), [{"boxes": rows(0, n)} for n in (5, 6)]),
        ((rows(), tuple(rows(0, 1 + n) for n in range(6))), (rows(0, 3), rows(0, 4))),
    ],
    ids=["dicts", "dicts of one length", "images and dicts", "arrays"],
)  # fmt: skip
def test_a_list_as_long_as_the_batch_is_one_of_samples(batch: Any, part: Any) -> None:
    whole = Batch(batch)

    assert whole.samples == 6
    assert whole.reason is None
    assert whole.take(2, 4)[1] == part  # type: ignore[index]
    assert len(whole.take(2, 4)[0] if isinstance(batch[0], list) else whole.take(2, 4)[0].rows) == 2  # type: ignore[index]
    assert whole.pick([3, 2])[1] == type(part)([part[1], part[0]])  # type: ignore[index]


def test_two_arrays_that_disagree_are_no_list_of_two_samples() -> None:
    for batch in [(rows(), rows(0, 2)), {"graph": (rows(), rows(0, 2))}]:
        assert "different numbers" in (Batch(batch).reason or "")


def test_mappings_of_whole_batches_are_cut_inside() -> None:
    assert Batch([{"x": rows()}, {"x": rows()}]).take(2, 4) == [{"x": rows(2, 4)}, {"x": rows(2, 4)}]


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(BadBatch, match="empty"):
        Batch((rows(0, 0), rows(0, 0)))


def test_what_has_no_arrays_says_why_it_cannot_be_cut() -> None:
    whole = Batch(object())

    assert whole.samples == 1
    assert whole.reason == "a object in which no array was found"


def test_a_way_to_cut_of_ones_own() -> None:
    images = [object() for _ in range(5)]
    whole = Batch(images, split=(5, lambda start, stop: images[start:stop]))

    assert whole.samples == 5
    assert whole.take(1, 3) == images[1:3]


@pytest.mark.parametrize("split", [3, (3,), ("3", len), (3, "x"), (0, len)])
def test_a_way_to_cut_that_is_none_is_an_error(split: Any) -> None:
    with pytest.raises(BadBatch):
        Batch(rows(), split=split)


def test_packed_sequences_are_not_cut() -> None:
    packed = namedtuple("PackedSequence", "data batch_sizes")(rows(), rows(0, 2))

    assert "packed sequence" in (Batch(packed).reason or "")
    assert Batch(packed, split=(2, lambda start, stop: packed)).samples == 2


def test_a_part_of_a_batch_is_cut_as_the_whole_is() -> None:
    images = [object() for _ in range(5)]
    whole = Batch(images, split=(5, lambda start, stop: images[start:stop]))
    part = whole.part(1, 4)

    assert part.samples == 3
    assert part.take(1, 3) == images[2:4]
    assert Batch(list("abcd")).part(1, 4).take(1, 3) == ["c", "d"]


@pytest.mark.parametrize("samples", range(1, 40))
def test_parts_are_nearly_equal_and_never_larger_than_asked(samples: int) -> None:
    for most in range(1, 45):
        parts = even(samples, most)

        assert sum(parts) == samples
        assert max(parts) <= most
        assert max(parts) - min(parts) <= 1


def test_a_batch_goes_as_soon_as_it_is_let_go() -> None:
    """Without waiting for the garbage collector: it may hold most of a device."""
    whole = Batch(rows())
    gone = weakref.ref(whole.value)  # type: ignore[arg-type]
    del whole

    assert gone() is None
