"""Which variables hold this process's memory, estimated from samples within a fraction of a second.

It runs when memory is nearly used up, in a thread beside the training. So no code of the user's is called (no property,
no `__len__` of a class of theirs), nothing large is copied, and a value is held no longer than it takes to look at it.
A profile asks the same, after the parts of a model have been counted (`by_owner`).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from buoy.errors import trouble
from buoy.machine import heap
from buoy.machine.heap import OURS, frame_items, is_function, is_library, is_module_of_person
from buoy.machine.procfs import read_bytes, to_int

_SECONDS, _PROFILE_SECONDS = 0.2, 2.0
_ROOT_SHARE = 0.25
"""Of the time, for one variable: what takes longer is estimated from what was seen of it."""
_SAMPLES = (200, 40, 12, 6, 4, 3)
"""Items of a container that are looked at, by how deep it lies in others."""
_DEPTH = 14
_NAMED_DEPTH = 3
_NAMED_KEYS = 16
"""A dict with more keys than these is one thing to its user, not many."""
_LEAST = 1 << 20
_MOST = 8
_UNNAMED_SHARE = 0.25
"""Of the process's memory: if less than this is not accounted for, nobody looks for containers without a name."""
_FEWEST_GRAPHS = 20
"""Tensors with their graph, in one variable: a loop has a few of them at any time."""
_NUMBERS = (int, float, complex, type(None), type(Ellipsis), range, slice)
_ATOMS = (*_NUMBERS, str, bytes, bytearray)
_SEQUENCES, _COLLECTIONS = (list, tuple), (set, frozenset, deque)
_PIPELINES = "tensorflow.python.data.ops"
_CLOSED = (
    types.ModuleType, types.FrameType, types.TracebackType, types.CodeType, types.BuiltinFunctionType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    weakref.ReferenceType, type,
)  # fmt: skip
"""What is not looked into: too much that is everybody's hangs on it."""
_PLURALS = {
    "ndarray": "NumPy arrays", "Tensor": "tensors", "Parameter": "tensors", "EagerTensor": "tensors",
    "str": "strings", "bytes": "bytes objects", "int": "numbers", "float": "numbers", "DataFrame": "data frames",
}  # fmt: skip


@dataclass
class Variable:
    """One that holds memory."""

    name: str
    """As the user would type it: `images`, `trainer.history`, `data["train"]`."""
    bytes: int
    what: str
    """`list of 41,200 NumPy arrays`."""
    place: str = ""
    """`load_data, train.py:31`; empty for a variable of a notebook or of a script itself."""
    device: str = ""
    """`cuda:0` where its memory is there and not in RAM."""

    def __str__(self) -> str:
        device = f" on {self.device}" if self.device else ""
        return f"{self.name} ({self.what}{device}){f' in {self.place}' if self.place else ''}"


@dataclass
class Survey:
    """What was found, the largest first."""

    variables: list[Variable] = field(default_factory=list)
    resident: int | None = None
    """Bytes of RAM that are this process's own."""
    found: int = 0
    """Bytes of RAM in all objects that were looked at."""
    is_partial: bool = False
    """There was more to look through than there was time."""
    pipelines: list[str] = field(default_factory=list)
    """What of tf.data keeps elements in memory outside of Python: `shuffle(60000) of ds`."""
    graphs: list[str] = field(default_factory=list)
    """Variables with tensors that keep the graph they were computed by."""
    seconds: float = 0.0

    @property
    def outside(self) -> int | None:
        """Bytes that are in no Python object; None where that cannot be said."""
        if self.resident is None or self.is_partial:
            return None
        return max(0, self.resident - self.found)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "outside": self.outside}


@dataclass(frozen=True)
class Held:
    """Bytes by owner, largest first."""

    sizes: dict[str, int]
    is_partial: bool = False
    """There was more to look through than there was time."""


def by_owner(owners: dict[str, Iterable[Any]]) -> Held:
    """Bytes by owner, then by variable; each block of memory is counted once, for the first that has it."""
    sizes: dict[str, int] = {}
    counted: set[int] = set()
    for owner, things in owners.items():
        for thing in things:
            address, size, _ = heap.block(thing, type(thing)) or (0, 0, "")
            if size and address not in counted:
                counted.add(address)
                sizes[owner] = sizes.get(owner, 0) + size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asking a deprecated object for its class is enough to be warned
        found = survey(_PROFILE_SECONDS, counted)
    sizes |= {str(variable): variable.bytes for variable in found.variables}
    return Held(dict(sorted(sizes.items(), key=lambda item: -item[1])), found.is_partial)


def survey(seconds: float = _SECONDS, counted: Iterable[int] = ()) -> Survey:
    """Look at the variables of the script or notebook, of its functions under way and of its modules, at outputs and an
    old traceback, and at large containers that have no name.

    `counted`: addresses of memory that is known already.
    """
    began = time.perf_counter()
    look = _Look(seconds, counted)
    look.script()
    look.frames()
    look.modules()
    look.ours()
    look.leftovers()
    look.unnamed()
    return look.result(time.perf_counter() - began)


class _Look:
    """One look through the process."""

    def __init__(self, seconds: float, counted: Iterable[int]) -> None:
        self._seconds = seconds
        self._until = time.thread_time() + seconds
        self._root, self._root_until = "", self._until
        """The variable that is looked into, and until when."""
        self._is_root_over = self._is_partial = False
        self._seen = set(map(id, heap.of_ipython()))
        """Things that were counted, by id. A notebook's shell leads to everything."""
        self._blocks = set(counted)
        """Blocks of memory that were counted, by address."""
        self._of_ours: list[Any] = []
        self._visits = 0
        self._found = 0.0
        self._variables: dict[tuple[str, str, str], Variable] = {}
        self._on_devices: dict[str, float] = {}
        self._pipelines: dict[str, None] = {}
        self._graphs: dict[str, float] = {}
        self._resident = resident_bytes()

    def result(self, seconds: float) -> Survey:
        large = [each for each in self._variables.values() if each.bytes >= _LEAST]
        return Survey(
            sorted(large, key=lambda each: -each.bytes)[:_MOST], self._resident, int(self._found), self._is_partial,
            list(self._pipelines)[:_MOST],
            [name for name, count in self._graphs.items() if count >= _FEWEST_GRAPHS][:_MOST], round(seconds, 3),
        )  # fmt: skip

    def script(self) -> None:
        """Variables of the script or notebook."""
        for name, value in list(vars(sys.modules["__main__"]).items()):
            if not heap.OF_IPYTHON.fullmatch(name):
                self._variable(value, name)

    def frames(self) -> None:
        """Local variables of all functions under way: the user's own before those of libraries."""
        main = threading.main_thread().ident
        stacks = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
        found = [frame for _, top in stacks for frame in _stack(top) if is_function(frame)]
        for is_of_library in (False, True):
            for frame in found:
                file = frame.f_code.co_filename
                if is_library(file) is is_of_library and not file.startswith(OURS):
                    place = _place(frame)
                    for name, value in frame_items(frame):
                        self._variable(value, name, place)

    def modules(self) -> None:
        """Variables of the user's own modules."""
        for module in list(sys.modules.values()):
            if _is_of_user(module) and module.__name__ != "__main__":
                for name, value in list(vars(module).items()):
                    if not name.startswith("__"):
                        self._variable(value, f"{module.__name__}.{name}")

    def ours(self) -> None:
        """What only objects of buoy's lead to, such as the data set in `run.batches(DataLoader(Images()))`."""
        waiting, met = deque(self._of_ours), set(map(id, self._of_ours))
        while waiting and not self._is_over():
            holder = waiting.popleft()
            for thing in _items(holder, type(holder), _SAMPLES[0])[0]:
                kind = type(thing)
                if id(thing) in met or issubclass(kind, (*_CLOSED, *_ATOMS)):
                    continue
                met.add(id(thing))
                if heap.block(thing, kind) is not None:
                    self._variable(thing, f"a {kind.__name__} without a name")
                elif _is_of_user(_module(kind)):
                    self._variable(thing, kind.__name__)
                else:
                    waiting.append(thing)

    def leftovers(self) -> None:
        """A notebook's outputs, and what only the last traceback still holds."""
        outputs = getattr(sys.modules["__main__"], "Out", None)
        for number, value in list(outputs.items()) if isinstance(outputs, dict) else ():
            self._variable(value, f"Out[{number}]")
        if not self._is_partial:  # else it would be blamed for what others hold too
            self._variable(heap.last_traceback(), heap.TRACEBACK, what="variables of functions that failed")

    def unnamed(self) -> None:
        """Large containers that no variable leads to: a list that is being built has no name yet."""
        missing = (self._resident or 0) - self._found
        if self._is_partial or self._resident is None or missing < _UNNAMED_SHARE * self._resident:
            return
        candidates = [  # most dicts of a process are those of its classes and modules
            thing
            for thing in heap.tracked(list, dict, set, deque)
            if len(thing) >= (4 if type(thing) is list else 1000) and id(thing) not in self._seen
        ]
        guessed = [(guess, thing) for thing in candidates if (guess := _first_guess(thing)) >= _LEAST]
        del candidates
        place = _main_place()
        for _, thing in sorted(guessed, key=lambda each: -each[0])[:_MOST]:
            self._variable(
                thing, f"a {type(thing).__name__} without a name", place and f"the code is in {place}"
            )

    def _variable(self, value: Any, name: str, place: str = "", depth: int = 0, what: str = "") -> None:
        """Add what this variable holds, or its parts where it is a name for several things."""
        kind = type(value)
        if issubclass(kind, _NUMBERS) or self._is_over():
            return
        if heap.package(kind) == "buoy":  # it leads to all that is trained, which may have a name
            self._of_ours.append(value)
            return
        parts = _parts(value, kind, name) if depth < _NAMED_DEPTH and not what else None
        if parts is not None:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for part, part_name in parts:
                    self._variable(
                        part, part_name, place, depth + 1, kind.__name__ if part_name == name else ""
                    )
            return
        self._root, self._on_devices = name, {}
        self._root_until = min(self._until, time.thread_time() + _ROOT_SHARE * self._seconds)
        self._is_root_over = False
        size = self._size(value)
        self._found += size
        for device, bytes_there in (("", size), *self._on_devices.items()):
            if bytes_there:
                key = (name, place, device)
                known = self._variables.get(key) or Variable(
                    name, 0, what or _what(value, kind), place, device
                )
                known.bytes += int(bytes_there)
                self._variables[key] = known

    def _is_over(self) -> bool:
        self._is_partial = self._is_partial or time.thread_time() > self._until
        return time.thread_time() > self._until

    def _size(self, thing: Any, depth: int = 0, weight: float = 1.0) -> float:
        """Bytes of RAM in this and in all that it leads to, without what was counted before.

        `weight`: how many things of the container above this one stands for.
        """
        kind = type(thing)
        if issubclass(kind, _CLOSED) or id(thing) in self._seen:
            return 0.0
        self._seen.add(id(thing))
        self._visits += 1
        if not self._visits % 64 and time.thread_time() > self._root_until:
            self._is_root_over = self._is_partial = True
        if issubclass(kind, _ATOMS):
            return float(_own_size(thing, kind))
        block = heap.block(thing, kind)
        if block is not None:
            return self._block_size(thing, kind, block, depth, weight)
        self._note_pipeline(thing, kind)
        return float(_own_size(thing, kind)) + self._inside(
            _items(thing, kind, _samples(depth)), depth, weight
        )

    def _inside(self, sample: tuple[list[Any], float], depth: int, weight: float) -> float:
        items, times = sample
        if depth >= _DEPTH or self._is_root_over:
            return 0.0
        return times * sum(self._size(item, depth + 1, weight * times) for item in items)

    def _block_size(
        self, thing: Any, kind: type, block: tuple[int, int, str], depth: int, weight: float
    ) -> float:
        address, size, device = block
        total = float(object.__sizeof__(thing))
        if address not in self._blocks:
            self._blocks.add(address)
            if device:
                self._on_devices[device] = self._on_devices.get(device, 0.0) + size * weight
            else:
                total += size
            if heap.is_object_array(thing):
                total += self._inside(_of_object_array(thing, _samples(depth)), depth, weight)
        if heap.measure_of(kind) == "torch":
            total += self._size(_gradient(thing, kind), depth, weight)
            if _keeps_graph(thing):
                self._graphs[self._root] = self._graphs.get(self._root, 0.0) + weight
        return total

    def _note_pipeline(self, thing: Any, kind: type) -> None:
        """What a tf.data pipeline keeps lies outside of Python; that it keeps something can be seen."""
        if heap.package(kind) != "tensorflow" or not kind.__module__.startswith(_PIPELINES):
            return
        try:
            if kind.__name__ == "CacheDataset" and not bytes(thing._filename.numpy()):
                self._pipelines[f"cache() of {self._root}"] = None
            elif kind.__name__.strip("_") == "ShuffleDataset":
                self._pipelines[f"shuffle({int(thing._buffer_size)}) of {self._root}"] = None
        except Exception as error:  # noqa: BLE001 - another version of TensorFlow: then it is only unknown
            trouble("what tf.data pipelines keep", error)


def resident_bytes() -> int | None:
    """RAM that is this process's own: without the pages of files, which the kernel can take back."""
    words = read_bytes("/proc/self/status").split()
    if b"RssAnon:" not in words:
        return None
    sizes = [words[words.index(name) + 1] for name in (b"RssAnon:", b"RssShmem:") if name in words]
    return sum(to_int(size) or 0 for size in sizes) * 1024


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: types.FrameType) -> str:
    """`load_data, train.py:31`; in a notebook's cell `load_data, line 3 of a cell`."""
    code = frame.f_code
    function = code.co_qualname.rpartition("<locals>.")[2]
    if is_library(code.co_filename):
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        return f"{function} of {package}" if package else function
    if code.co_filename.startswith("<ipython") or f"{os.sep}ipykernel_" in code.co_filename:
        return f"{function}, line {frame.f_lineno} of a cell"
    return f"{function}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"


def _main_place() -> str:
    """Where the main thread is in the user's own code; empty where that cannot be said."""
    top = sys._current_frames().get(threading.main_thread().ident or 0)
    theirs = next((frame for frame in _stack(top) if not is_library(frame.f_code.co_filename)), None)
    return _place(theirs) if theirs is not None else ""


def _parts(value: Any, kind: type, name: str) -> list[tuple[Any, str]] | None:
    """What a value consists of, each with its name, where it is a name for several things; else None."""
    if kind is type:
        theirs = _is_of_user(_module(value))
        return [(part, f"{name}.{at}") for at, part in list(vars(value).items()) if at[:2] != "__" and theirs]
    if kind is types.FunctionType:
        return [*_closure(value), *((part, name) for part in (value.__defaults__ or ()))]
    if kind is dict:
        is_small = len(value) <= _NAMED_KEYS and all(type(key) is str for key in value)
        return [(part, f'{name}["{key}"]') for key, part in list(value.items())] if is_small else None
    if issubclass(kind, (*_SEQUENCES, dict, *_COLLECTIONS)) or not _is_of_user(
        sys.modules.get(kind.__module__)
    ):
        return None
    # What a library's base class keeps for itself goes by the name of the whole: `net`, not `net._modules`.
    keeps_own = any("__setattr__" in base.__dict__ and _is_library_class(base) for base in kind.__mro__[:-1])
    attributes = _attributes(value, kind)
    known = {id(part) for _, part in attributes} | {id(kind), id(_dict(value))}
    hidden = [
        (part, name) for part in gc.get_referents(value) if id(part) not in known
    ]  # in a class made in C
    return hidden + [
        (part, name if keeps_own and at.startswith("_") else f"{name}.{at}") for at, part in attributes
    ]


def _is_library_class(kind: type) -> bool:
    return not _is_of_user(_module(kind))


def _module(kind: type) -> types.ModuleType | None:
    return sys.modules.get(kind.__module__) if isinstance(kind.__module__, str) else None


def _is_of_user(module: types.ModuleType | None) -> bool:
    return isinstance(module, types.ModuleType) and is_module_of_person(module)


def _closure(function: Any) -> list[tuple[Any, str]]:
    if is_library(function.__code__.co_filename):
        return []
    found = []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found.append((cell.cell_contents, variable))
        except ValueError:  # not assigned yet
            continue
    return found


def _attributes(thing: Any, kind: type) -> list[tuple[str, Any]]:
    """As they are stored; a property of the class is not asked."""
    found = dict(_dict(thing) or {})
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for at in (slots,) if isinstance(slots, str) else slots:
            slot = base.__dict__.get(at)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found.setdefault(at, slot.__get__(thing))
                except AttributeError:  # not assigned yet
                    continue
    return list(found.items())


def _dict(thing: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _items(thing: Any, kind: type, most: int) -> tuple[list[Any], float]:
    """Some of the things in this one, evenly spread, and how many times more there are.

    Each is one call into C, so that no other thread can change the container meanwhile.
    """
    if issubclass(kind, _SEQUENCES):
        base = list if issubclass(kind, list) else tuple
        count = base.__len__(thing)
        items = list(base.__getitem__(thing, slice(0, None, max(1, count // most))))
    elif issubclass(kind, dict):
        count = dict.__len__(thing)
        pairs = list(islice(dict.items(thing), 0, None, max(1, count // most)))
        items, count = [part for pair in pairs for part in pair], 2 * count
    elif issubclass(kind, _COLLECTIONS):
        own: Any = next(each for each in _COLLECTIONS if issubclass(kind, each))
        count = own.__len__(thing)
        items = list(islice(own.__iter__(thing), 0, None, max(1, count // most)))
    elif kind is types.FunctionType:
        items = [value for value, _ in _closure(thing)]
        count = len(items)
    else:
        inside = [each for each in gc.get_referents(thing) if each is not kind]
        count, items = len(inside), inside[:: max(1, len(inside) // most)]
    return _distinct(items, count)


def _distinct(items: list[Any], count: int) -> tuple[list[Any], float]:
    """The same thing many times over, or many views of one array, take the memory of one."""
    if len(items) == count or not items:
        return items, 1.0
    different = {_identity(item): item for item in items}
    return (
        (items, count / len(items)) if len(different) > 0.9 * len(items) else (list(different.values()), 1.0)
    )


def _identity(thing: Any) -> int:
    block = heap.block(thing, type(thing))
    return block[0] if block is not None else id(thing)


def _of_object_array(thing: Any, most: int) -> tuple[list[Any], float]:
    count = int(thing.size)
    return _distinct(list(thing.flat[:: max(1, count // most)]), count)


def _own_size(thing: Any, kind: type) -> int:
    """Of the thing alone; only Python's own classes are asked, since another's may work it out at length."""
    base: Any = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    try:
        return int(base.__sizeof__(thing))
    except TypeError:
        return int(object.__sizeof__(thing))


def _gradient(thing: Any, kind: type) -> Any:
    """A parameter's; other tensors warn when they are asked."""
    return getattr(thing, "grad", None) if kind.__name__ == "Parameter" else None


def _keeps_graph(thing: Any) -> bool:
    """Whether a tensor still refers to what it was computed by."""
    return getattr(thing, "grad_fn", None) is not None


def _samples(depth: int) -> int:
    return _SAMPLES[min(depth, len(_SAMPLES) - 1)]


def _first_guess(thing: Any) -> float:
    """What a container may hold, by three of its items."""
    items, _ = _items(thing, type(thing), 3)
    sizes = [(heap.block(item, type(item)) or (0, _own_size(item, type(item))))[1] for item in items]
    return len(thing) * sum(sizes) / max(1, len(sizes))


def _what(value: Any, kind: type) -> str:
    """`list of 41,200 NumPy arrays`, `NumPy array, float64, 60000 x 28 x 28`."""
    for base, word in ((list, "list"), (tuple, "tuple"), (dict, "dict"), (set, "set"), (deque, "deque")):
        if issubclass(kind, base):
            items, _ = _items(value, kind, 20)
            kinds = {type(item).__name__ for item in (items[1::2] if base is dict else items)}
            each = kinds.pop() if len(kinds) == 1 else ""
            plural = _PLURALS.get(each) or (f"{each}s" if each else "items")
            return f"{word if kind is base else kind.__name__} of {base.__len__(value):,} {plural}"
    measure = heap.measure_of(kind)
    if measure in ("array", "torch", "tensorflow", "jax"):
        try:
            shape = " x ".join(map(str, value.shape)) or "one number"
            dtype = getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
            return f"{'NumPy array' if measure == 'array' else 'tensor'}, {dtype}, {shape}"
        except Exception:  # noqa: BLE001 - as above
            return kind.__name__
    is_pipeline = heap.package(kind) == "tensorflow" and kind.__module__.startswith(_PIPELINES)
    return "tf.data pipeline" if is_pipeline else kind.__name__
