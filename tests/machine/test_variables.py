"""The variables that hold memory: named as their user would, sized from samples, within a fraction of a second."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from buoy.machine import heap
from buoy.machine.variables import Survey, Variable, by_owner, survey

MIB = 1 << 20


class Trainer:
    """Keeps everything it has seen."""

    steps = 0

    def __init__(self, history: Any) -> None:
        self.history = history
        self.name = "cats"

    @property
    def everything(self) -> list[bytes]:
        raise AssertionError("a property was asked")

    def __len__(self) -> int:
        raise AssertionError("a method was called")


class Slots:
    """Has no dict."""

    __slots__ = ("pixels",)

    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels


@functools.lru_cache(None)
def loaded(number: int) -> Any:
    return array(number)


def array(number: int) -> Any:
    """A quarter of a MiB that is nobody else's."""
    return numpy.full(MIB // 4, number % 256, "uint8")


def arrays(count: int = 400) -> list[Any]:
    return [array(number) for number in range(count)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Survey]]:
    """A look at a script that has these variables."""

    def look(**variables: Any) -> Survey:
        for name, value in variables.items():
            monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
        return survey(seconds=5.0)  # machines that run tests are busy

    yield look
    monkeypatch.undo()
    gc.collect()


def named(found: Survey, name: str) -> Variable:
    known = {each.name: each for each in found.variables}
    assert name in known, found
    return known[name]


def is_about(size: float, wanted: float) -> bool:
    return 0.8 * wanted < size < 1.25 * wanted


HOLDERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a list of arrays": (arrays, "kept", "list of 400 NumPy arrays"),
    "a dict of arrays": (lambda: dict(enumerate(arrays())), "kept", "dict of 400 NumPy arrays"),
    "a deque": (lambda: deque(arrays()), "kept", "deque of 400 NumPy arrays"),
    "one array": (lambda: numpy.ones((100, MIB), "uint8"), "kept", "NumPy array, uint8, 100 x 1048576"),
    "a key of a dict": (lambda: {"train": arrays()}, 'kept["train"]', "list of 400 NumPy arrays"),
    "an attribute": (lambda: Trainer(arrays()), "kept.history", "list of 400 NumPy arrays"),
    "a slot": (lambda: Slots(arrays()), "kept.pixels", "list of 400 NumPy arrays"),
    "an attribute of a library's": (lambda: SimpleNamespace(images=arrays()), "kept", "SimpleNamespace"),
    "objects in a list": (lambda: [Trainer(array(n)) for n in range(400)], "kept", "list of 400 Trainers"),
    "texts": (lambda: [f"{n:0262144d}" for n in range(400)], "kept", "list of 400 strings"),
    "rows of text": (lambda: [{"text": f"{n:0262144d}"} for n in range(400)], "kept", "list of 400 dicts"),
    "bytes": (lambda: [bytearray(MIB // 4) for _ in range(400)], "kept", "list of 400 bytearrays"),
    "an array of objects": (
        lambda: numpy.array([f"{n:0262144d}" for n in range(400)], dtype=object), "kept", "NumPy array, object, 400",
    ),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_variable_is_named_with_its_size_and_kind(script: Callable[..., Survey], holder: str) -> None:
    make, name, what = HOLDERS[holder]

    found = named(script(kept=make()), name)

    assert is_about(found.bytes, 100 * MIB), found
    assert (found.what, found.place, found.device) == (what, "", "")


def test_results_that_a_function_keeps_are_its_own(script: Callable[..., Survey]) -> None:
    for number in range(400):
        loaded(number)
    found = named(script(load_image=loaded), "load_image")
    loaded.cache_clear()

    assert is_about(found.bytes, 100 * MIB)


def test_a_variable_of_a_function_under_way_is_named_with_its_line() -> None:
    has, may_go = threading.Event(), threading.Event()

    def load_data() -> None:
        images = arrays()
        has.set()
        may_go.wait(60)
        del images

    thread = threading.Thread(target=load_data)
    thread.start()
    has.wait(60)
    found = named(survey(5.0), "images")
    may_go.set()
    thread.join()

    assert is_about(found.bytes, 100 * MIB)
    line = load_data.__code__.co_firstlineno + 3
    assert found.place == f"load_data, test_variables.py:{line}"


def test_a_list_that_is_being_built_has_no_name_and_is_told_with_the_code_that_runs() -> None:
    """As most data sets are loaded: in a comprehension. Nothing else in the process may be large then."""
    code = (
        "import threading; from buoy.machine.variables import survey; found = []\n"
        "def look(): there.wait(); found.append(survey(seconds=60)); seen.set()\n"
        "there, seen = threading.Event(), threading.Event(); threading.Thread(target=look).start()\n"
        "def load(n): n == 399 and (there.set() or seen.wait()); return bytearray(1 << 18)\n"
        "images = [load(n) for n in range(400)]\n"
        "each = found[0].variables[0]; print(each.name, '|', each.what, '|', each.place, '|', each.bytes >> 20)"
    )
    done = run(code)

    name, what, place, size = done.strip().split(" | ")
    assert (name, what) == ("a list without a name", "list of 399 bytearrays")
    assert place == "the code is in load, <string>:4"
    assert is_about(int(size), 99)


def run(code: str) -> str:
    import subprocess

    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_same_memory_is_counted_once(script: Callable[..., Survey]) -> None:
    """A view, a list of views, a second name and a list of one thing many times over take nothing more."""
    whole = numpy.ones((4000, MIB // 40), "uint8")

    found = script(whole=whole, rows=list(whole), alias=whole, repeated=[whole] * 1000)

    assert is_about(named(found, "whole").bytes, 100 * MIB)
    assert not {"rows", "alias", "repeated"} & {each.name for each in found.variables}


def test_a_large_heap_is_looked_through_in_the_time_that_is_given(script: Callable[..., Survey]) -> None:
    """Millions of things: estimated from samples, and within a tenth."""
    texts = [{"text": f"sample {n}", "label": n} for n in range(300_000)]
    images = [numpy.full(256, n % 256, "uint8") for n in range(200_000)]
    deep = [[[f"{a} {b} {c}" for c in range(20)] for b in range(20)] for a in range(300)]
    exact = sum(sys.getsizeof(each) + sys.getsizeof(each["text"]) for each in texts) + sys.getsizeof(texts)

    before = time.thread_time()
    found = script(texts=texts, images=images, deep=deep)
    spent = time.thread_time() - before

    assert not found.is_partial and spent < 1.0
    assert is_about(named(found, "texts").bytes, exact)
    assert is_about(named(found, "images").bytes, 200_000 * (256 + 128))
    assert is_about(named(found, "deep").bytes, 120_000 * 70)


def test_where_the_time_is_not_enough_that_is_said(script: Callable[..., Survey], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "many", [[[n]] for n in range(100_000)], raising=False)

    found = survey(seconds=0.0)

    assert found.is_partial and found.outside is None


def test_looking_keeps_nothing_alive_and_changes_no_filter_of_warnings(script: Callable[..., Survey]) -> None:
    import warnings
    import weakref

    kept, filters = Trainer(arrays()), list(warnings.filters)
    gone = weakref.ref(kept)
    survey(5.0)
    del kept

    assert gone() is None
    assert warnings.filters == filters


def test_another_thread_may_change_everything_meanwhile(script: Callable[..., Survey]) -> None:
    busy: dict[int, Any] = {}
    over = threading.Event()

    def change() -> None:
        n = 0
        while not over.is_set():
            n += 1
            busy[n] = [n]
            busy.pop(n - 1000, None)

    thread = threading.Thread(target=change)
    thread.start()
    found = [script(busy=busy, kept=arrays(40)) for _ in range(6)]
    over.set()
    thread.join()

    assert all(is_about(named(each, "kept").bytes, 10 * MIB) for each in found)


def test_tensors_are_named_with_their_device_and_graphs_that_are_kept_are_seen(
    script: Callable[..., Survey],
) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(100, requires_grad=True)
    net = torch.nn.Linear(4000, 4000)
    net(torch.ones(4000)).sum().backward()

    found = script(
        net=net,
        losses=[(weight * n).sum() for n in range(500)],
        cache=[torch.ones(MIB, dtype=torch.uint8) for _ in range(30)],
        there=torch.empty(50 * MIB, dtype=torch.uint8, device="meta"),  # stands for a GPU's
    )

    assert is_about(named(found, "net").bytes, 2 * 4 * 4000 * 4000)  # with the gradients
    assert is_about(named(found, "cache").bytes, 30 * MIB)
    assert named(found, "cache").what == "list of 30 tensors"
    assert (named(found, "there").device, named(found, "there").bytes) == ("meta", 50 * MIB)
    assert found.graphs == ["losses"]
    assert found.found < (found.resident or 0)  # what is elsewhere is no RAM


def test_a_class_of_the_users_own_that_is_a_module_goes_by_its_variable(
    script: Callable[..., Survey],
) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4000, 4000)
            self.seen = arrays()

    found = script(net=Net())

    assert named(found, "net").what == "Net" and is_about(named(found, "net").bytes, 4 * 4000 * 4000)
    assert named(found, "net.seen").what == "list of 400 NumPy arrays"


def test_a_look_from_another_thread_disturbs_no_tuple_that_is_being_built() -> None:
    """Python raises SystemError where a tuple that grows has a second owner."""
    code = """
import _thread
from buoy.machine import heap
looks = []
def look():
    while True:
        looks.append(len(heap.tracked(list, dict)))
padding = [[] for _ in range(200_000)]
_thread.start_new_thread(look, ())
while len(looks) < 6:
    assert len(tuple(i for i in range(20_000))) == 20_000
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_what_has_an_owner_is_counted_for_it_alone_and_a_view_for_nobody() -> None:
    pixels = numpy.zeros(8 * MIB, "uint8")
    view = pixels[10:]

    told = by_owner({"mine": [pixels, pixels, view, None]}).sizes

    assert told["mine"] == 8 * MIB
    assert not any(name.startswith(("pixels", "view")) for name in told)


def test_what_has_no_owner_is_named_as_a_warning_names_it() -> None:
    def train() -> dict[str, int]:
        pixels = numpy.zeros(8 * MIB, "uint8")
        return by_owner({}).sizes if pixels.size else {}

    name = next(name for name in train() if name.startswith("pixels"))

    assert name.startswith("pixels (NumPy array, uint8, 8388608) in ")
    assert "train, test_variables.py:" in name


def failed(*also: Any) -> BaseException:
    def fails(*seen: Any) -> None:
        own = numpy.zeros(8 * MIB, "uint8")
        raise ValueError(own.shape, len(seen))

    try:
        fails(*also)
    except ValueError as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError


def test_an_old_traceback_is_told_for_what_it_alone_holds(
    script: Callable[..., Survey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments that the failed call was given are a variable of the script."""
    train_x = numpy.zeros(8 * MIB, "uint8")
    error = failed(train_x)
    monkeypatch.setattr("sys.last_traceback", error.__traceback__, raising=False)

    found = script(train_x=train_x)

    assert is_about(named(found, heap.TRACEBACK).bytes, 8 * MIB)
    assert is_about(named(found, "train_x").bytes, 8 * MIB)


def test_a_failed_cell_does_not_hold_the_variables_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frame has all of them as its own."""
    namespace = vars(sys.modules["__main__"])
    monkeypatch.setitem(namespace, "train_x", numpy.zeros(8 * MIB, "uint8"))
    try:
        exec("prnt(1)", namespace)
    except NameError as error:
        assert error.__traceback__ is not None
        monkeypatch.setattr("sys.last_traceback", error.__traceback__.tb_next, raising=False)

    found = survey(30.0)

    assert is_about(named(found, "train_x").bytes, 8 * MIB)
    assert not any(variable.name == heap.TRACEBACK for variable in found.variables)


def test_a_copy_of_the_variables_that_a_person_made_stays_as_it_is() -> None:
    mine = 5
    variables = locals()
    survey()

    assert variables["mine"] == mine


def test_a_data_set_that_only_buoy_holds_goes_by_its_class(script: Callable[..., Survey]) -> None:
    """As in `run.batches(DataLoader(Slots()))`; what has a name beside that goes by its name."""

    class Run:
        __module__ = "buoy.training.run"

        def __init__(self, *held: Any) -> None:
            self.held = held

    known = numpy.zeros(8 * MIB, "uint8")
    found = script(run=Run(Slots(numpy.zeros(9 * MIB, "uint8")), known), known=known)

    assert is_about(named(found, "Slots.pixels").bytes, 9 * MIB)
    assert is_about(named(found, "known").bytes, 8 * MIB)
    assert not any(variable.name == "run" for variable in found.variables)
