"""Values go to JSON and tensors and come back as they were, or are refused by their path."""

from __future__ import annotations

import enum
import json
import math
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy
import pytest

from buoy.checkpoint.encoding import BadTree, CannotSave, decode, encode, encode_all
from tests.checkpoint.ground import Array, as_tensor


class Colour(enum.IntEnum):
    RED = 7


class Transition(NamedTuple):
    state: int
    reward: float


def there_and_back(value: object) -> object:
    encoded = encode("value", value, as_tensor)
    memory = {}
    for name, tensor in encoded.tensors.items():
        memory[name] = memoryview(bytearray(tensor.nbytes))
        tensor.copy_into(memory[name])
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    return decode(tree, lambda name: Array(bytes(memory[name])), memory.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -0.0,
        5e-324,
        10**30,
        -(10**6000),
        float("inf"),
        1 + 2j,
        "a\x00\ud800é",
        b"\x00\xff",
        b"x" * 9000,
        bytearray(b"ab"),
        (),
        [1, (2, [3, ()])],
        {1: "a", "1": "b", (2, 3): None, None: 0, 1.5: True},
        {"$": "tuple", "v": [1]},
        {3, "a", (1, 2)},
        frozenset([1, frozenset()]),
        deque([1, (2, 3)]),
        random.getstate(),
        {"": {"..": {"/": 1}}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_plain_value_comes_back_as_it_was(value: object) -> None:
    back = there_and_back(value)

    assert back == value
    assert type(back) is type(value)


def test_negative_zero_and_nan_keep_their_bits() -> None:
    assert math.copysign(1, there_and_back(-0.0)) == -1  # type: ignore[arg-type]
    assert math.isnan(there_and_back(float("nan")))  # type: ignore[arg-type]


def test_a_deque_keeps_how_long_it_may_get_and_a_wrong_length_is_no_tree() -> None:
    assert there_and_back(deque([1, 2], maxlen=3)).maxlen == 3  # type: ignore[attr-defined]
    for wrong in (-1, "3", 1 << 70, True):
        with pytest.raises(BadTree):
            decode({"$": "deque", "v": [], "most": wrong}, str)


def test_a_dict_keeps_its_order_and_the_types_of_its_keys() -> None:
    back = there_and_back({2: "b", 1: "a"})

    assert list(back) == [2, 1]  # type: ignore[call-overload]


def test_relatives_of_plain_values_come_back_as_the_plain_value() -> None:
    seven = type("Seven", (int,), {})(7)
    back = there_and_back([OrderedDict(a=1), seven, numpy.str_("a")])

    assert back == [{"a": 1}, 7, "a"]
    assert [type(item) for item in back] == [dict, int, str]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "number",
    [
        numpy.float32(0.1),
        numpy.float64("inf"),
        numpy.float16(-0.0),
        numpy.int64(-3),
        numpy.uint64((1 << 64) - 1),
        numpy.bool_(True),
        numpy.complex64(1 - 2j),
    ],
    ids=lambda number: type(number).__name__,
)
def test_a_number_of_numpys_keeps_its_type_and_so_its_rounding(number: Any) -> None:
    back = there_and_back([number])[0]  # type: ignore[index]

    assert type(back) is type(number) and back.tobytes() == number.tobytes()


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "scalar", "v": 1},
        {"$": "scalar", "v": 1, "dtype": ["int8"]},
        {"$": "scalar", "v": "1", "dtype": "int8"},
        {"$": "scalar", "v": 1, "dtype": "object"},
    ],
)
def test_a_number_of_numpys_that_is_none_is_no_tree(tree: object) -> None:
    with pytest.raises(BadTree):
        decode(tree, str)


def test_a_named_tuple_is_one_again_where_its_class_is_known() -> None:
    back = there_and_back(deque([Transition(1, 0.5)]))[0]  # type: ignore[index]

    assert type(back) is Transition and back.reward == 0.5


class Phase(enum.IntEnum):
    WARM_UP = 1
    MAIN = 2


class Word(enum.StrEnum):
    YES = "yes"


def test_members_of_an_enum_are_the_very_same_again() -> None:
    back: Any = there_and_back({"phase": Phase.MAIN, "words": [Word.YES], Phase.WARM_UP: 3})

    assert back["phase"] is Phase.MAIN and back["words"][0] is Word.YES
    assert [key for key in back if key is Phase.WARM_UP]


@pytest.mark.parametrize(
    "named",
    [
        ["no.such.module", "Phase", "MAIN"],
        [__name__, "Phase", "GONE"],
        [__name__, "Transition", "MAIN"],
        [__name__, "Phase"],
        None,
    ],
)
def test_a_member_of_an_unknown_enum_is_its_plain_value(named: object) -> None:
    assert type(decode({"$": "enum", "v": 2, "named": named}, str)) is int


def test_an_enum_that_cannot_be_found_again_is_saved_as_its_value() -> None:
    hidden = enum.IntEnum("hidden", "A B")

    assert encode("x", hidden["B"], lambda value: None).tree == 2


@pytest.mark.parametrize("value", [Counter(a=2), defaultdict(list, {"a": [1]}), defaultdict(int)])
def test_counters_and_dicts_with_a_default_stay_what_they_are(value: Any) -> None:
    back: Any = there_and_back([value])[0]  # type: ignore[index]

    assert back == value and type(back) is type(value)
    assert getattr(back, "default_factory", None) is getattr(value, "default_factory", None)


def test_a_dict_with_a_default_of_ones_own_is_saved_as_a_plain_one() -> None:
    value: Any = defaultdict(lambda: 1, a=2)

    assert encode("x", value, lambda each: None).tree == {"a": 2}


@pytest.mark.parametrize(
    "named",
    [
        ["no.such.module", "Transition", "state", "reward"],
        [__name__, "Transition", "reward", "state"],
        [__name__, "Transition.state", "state", "reward"],
        [__name__, "Colour"],
        ["builtins", "tuple.__new__"],
        [__name__],
        "Transition",
        [1, 2],
    ],
)
def test_a_named_tuple_of_an_unknown_class_is_a_plain_tuple(named: object) -> None:
    assert type(decode({"$": "tuple", "v": [1, 0.5], "named": named}, str)) is tuple


def test_a_named_tuple_whose_class_cannot_be_found_again_is_saved_as_a_plain_one() -> None:
    hidden = namedtuple("hidden", "a b")

    assert encode("x", hidden(1, 2), lambda value: None).tree == {"$": "tuple", "v": [1, 2]}


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype="complex64").reshape(2, 3).T,
        numpy.zeros((0, 2)),
        numpy.array(1.5),
        numpy.array([True]),
    ],
    ids=["transposed", "empty", "scalar", "bool"],
)
def test_a_numpy_array_comes_back_writable_with_type_and_shape(array: numpy.ndarray) -> None:  # type: ignore[type-arg]
    back = there_and_back({"a": array})["a"]  # type: ignore[index]

    assert back.dtype == array.dtype and back.shape == array.shape and (back == array).all()
    assert back.flags.writeable


def test_tied_memory_is_stored_once_also_between_values() -> None:
    shared = Array(b"abcd")

    encoded = encode_all({"model": {"a": shared, "b": shared}, "ema": shared}, as_tensor)

    assert list(encoded.tensors) == ["model/a"]


def test_names_that_would_collide_stay_apart() -> None:
    value = {"a.b": Array(b"1"), "a": {"b": Array(b"2")}}

    assert there_and_back(value) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lr_lambdas": [lambda epoch: 1]}, "scheduler.lr_lambdas[0] is a function"),
        ({"a": {"b": object()}}, "scheduler.a.b is an object"),
        ({"rng": numpy.random.default_rng(0)}, "scheduler.rng is a numpy.random._generator.Generator"),
        ({"x": numpy.array(["a"])}, "scheduler.x is a numpy array of dtype <U1"),
        ({"x": numpy.datetime64("2020-01-01")}, "scheduler.x is a numpy"),
        ([1, (range,)], "scheduler[1][0] is a class"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(value: object, words: str) -> None:
    with pytest.raises(CannotSave) as refused:
        encode("scheduler", value, as_tensor)

    assert str(refused.value).startswith(words)
    assert refused.value.hint


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append({"again": loop})

    with pytest.raises(CannotSave, match="contains itself"):
        encode("loop", loop, as_tensor)


def test_a_type_without_a_word_in_safetensors_is_refused() -> None:
    with pytest.raises(CannotSave, match=r"model\.w is a tensor of dtype C128"):
        encode("model", {"w": Array(b"", "C128", (0,))}, as_tensor)


def test_tuples_that_are_no_named_ones_come_back_as_plain_tuples() -> None:
    """`torch.Size` may not be made by `tuple.__new__`: a checkpoint with one could not be loaded."""
    torch = pytest.importorskip("torch")

    for value in (torch.Size([2, 3]), time.gmtime(0)):
        assert there_and_back(value) == tuple(value)
