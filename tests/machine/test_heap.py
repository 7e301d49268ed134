"""What holds memory: arrays are found wherever they are, each once, and named as people would."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest

from buoy.machine import heap

SIZE = 5_000_000
KINDS: dict[str, heap.Size] = {"NumPy array": heap.array, "data frame": heap.data_frame}


def large() -> Any:
    return numpy.zeros(SIZE, "uint8")


def found(owners: dict[str, Any] | None = None) -> dict[str, int]:
    return heap.by_owner(owners or {}, heap.array, KINDS).sizes


class Images:
    """Keeps an array in an attribute."""

    def __init__(self) -> None:
        self.images = large()


class Wrapper:
    """Has it in its hands only through another one."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = Images()


@dataclass
class Record:
    """Has it in a field."""

    pixels: Any


def in_a_closure() -> Callable[[], Any]:
    pixels = large()
    return lambda: pixels


def in_a_generator() -> Iterator[int]:
    pixels = large()
    yield len(pixels)
    yield 2


def started(generator: Iterator[int]) -> Iterator[int]:
    next(generator)
    return generator


HOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a variable": (large, "kept"),
    "a list": (lambda: [large()], "kept"),
    "a tuple": (lambda: (large(),), "kept"),
    "a dict": (lambda: {"images": large()}, 'kept["images"]'),
    "a dict with numbers": (lambda: {0: large()}, "kept"),
    "a dict in a dict": (lambda: {"train": {"images": large()}}, 'kept["train"]["images"]'),
    "an attribute": (Images, "Images.images"),
    "an object in another one": (Wrapper, "Images.images"),
    "a field": (lambda: Record(large()), "Record.pixels"),
    "a closure": (in_a_closure, "pixels in in_a_closure()"),
    "a generator": (lambda: started(in_a_generator()), "pixels in in_a_generator()"),
    "a view": (lambda: large().reshape(-1, 1000), "kept"),
}


def test_an_array_is_told_by_what_a_person_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a variable of the script, and as one of a function under way."""
    main = sys.modules["__main__"]
    for number, (make, _) in enumerate(HOLDERS.values()):
        monkeypatch.setattr(main, f"kept{number}", make(), raising=False)
    told = found()
    monkeypatch.undo()

    names = [name.replace("kept", f"kept{number}") for number, (_, name) in enumerate(HOLDERS.values())]
    missing = [name for name in names if not any(line.startswith(f"{name} (") for line in told)]
    assert not missing, told
    assert told["Images.images (2 NumPy arrays)"] == 2 * SIZE
    assert told["kept0 (NumPy array)"] == SIZE

    def train() -> dict[str, int]:
        train_x, train_y = large(), {"labels": large()}
        return found() if train_y else {"": len(train_x)}

    told = train()
    assert told["train_x in train() (NumPy array)"] == SIZE
    assert told['train_y["labels"] in train() (NumPy array)'] == SIZE


def test_a_variable_of_another_threads_function_is_told() -> None:
    has, may_go = threading.Event(), threading.Event()

    def load() -> None:
        batch = large()
        has.set()
        may_go.wait(60)
        del batch

    thread = threading.Thread(target=load)
    thread.start()
    has.wait(60)
    told = found()
    may_go.set()
    thread.join()

    assert told["batch in load() (NumPy array)"] == SIZE


def test_what_nobody_names_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a library's own cache, in a dict and a tuple that the collector does not track."""
    monkeypatch.setattr(numpy, "_cache", [[large()], {"x": (large(),)}], raising=False)

    assert found()["other NumPy arrays"] >= 2 * SIZE


def test_what_has_an_owner_is_counted_for_it_alone_and_a_view_for_nobody() -> None:
    mine = Images()
    view = mine.images[10:]

    told = found({"mine": [mine.images, mine.images, view]})

    assert told["mine"] == SIZE
    assert not any(name.startswith(("Images", "view", "mine ")) for name in told)


def test_many_of_one_name_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "cache", {n: large() for n in range(20)}, raising=False)

    assert found()["cache (20 NumPy arrays)"] == 20 * SIZE


def test_looking_keeps_nothing_alive() -> None:
    """A frame that is asked for its variables keeps them, as they were, until it ends."""
    kept = Images()
    gone = weakref.ref(kept)
    found()
    del kept

    assert gone() is None


def test_a_copy_of_the_variables_that_a_person_made_stays_as_it_is() -> None:
    mine = 5
    variables = locals()
    found()

    assert variables["mine"] == mine


def test_where_there_is_too_much_to_look_through_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failed()
    monkeypatch.setattr("sys.last_traceback", error.__traceback__, raising=False)
    many = [[number] for number in range(5000)]
    monkeypatch.setattr(sys.modules["__main__"], "many", [[each] for each in many], raising=False)

    told = heap.by_owner({}, heap.array, KINDS, most=1000)

    assert told.is_partial
    # Somebody whom nobody came to may have it too.
    assert heap.TRACEBACK not in told.sizes
    assert not heap.by_owner({}, heap.array, KINDS, seconds=60, most=10**8).is_partial


def failed(*also: Any) -> BaseException:
    def fails(*seen: Any) -> None:
        own = large()
        raise ValueError(own.shape, len(seen))

    try:
        fails(*also)
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError


def test_an_old_traceback_is_told_for_what_it_alone_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments that the failed call was given are a variable of the script, and in the notebook's outputs."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "train_x", large(), raising=False)
    monkeypatch.setattr(main, "Out", {3: large()}, raising=False)
    error = failed(main.train_x, main.Out[3])
    monkeypatch.setattr("sys.last_traceback", error.__traceback__, raising=False)

    told = found()

    assert told[heap.TRACEBACK] == SIZE
    assert told[heap.OUTPUTS] == SIZE
    assert told["train_x (NumPy array)"] == SIZE


def test_a_failed_cell_does_not_hold_the_variables_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frame has all of them as its own."""
    namespace = vars(sys.modules["__main__"])
    monkeypatch.setitem(namespace, "train_x", large())
    try:
        exec("prnt(1)", namespace)
    except NameError as error:
        assert error.__traceback__ is not None
        monkeypatch.setattr("sys.last_traceback", error.__traceback__.tb_next, raising=False)

    told = found()

    assert heap.TRACEBACK not in told
    assert told["train_x (NumPy array)"] == SIZE
