"""Large objects of this Python process, by who holds them, under the names that the user knows them by.

Python's collector does not know an array, nor a dict or a tuple that only holds such things: they are found by going
from one object to the next, starting where programs keep things.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
import sysconfig
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Named = tuple[Any, str | None, bool]
"""A thing, the name of what it is in, and whether that is its own name; None: nothing that users would call it."""

FRAMES, IN_FRAME = ("DataFrame", "Series"), " (data frame)"
_DEPTH = 16
_NAMED_KEYS = 16
"""A dict with more keys than these is one thing to users, not many."""
_BETWEEN_LOOKS = 512
_LEAVES = (
    int, float, complex, bool, str, bytes, bytearray, type(None), type(Ellipsis), types.ModuleType, types.FrameType,
    types.TracebackType, types.CodeType, types.BuiltinFunctionType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_PYTHON = tuple(sysconfig.get_path(which) + os.sep for which in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Walk:
    """Visits everything that can be reached, nearest first and each once, until its time or its number is used up."""

    def __init__(
        self,
        is_wanted: Callable[[type], bool],
        found: Callable[[Any, str | None], None],
        seconds: float,
        most: int,
    ) -> None:
        self._is_wanted, self._found = is_wanted, found
        self._until, self._most = time.thread_time() + seconds, most
        self._visited: set[int] = set()
        self._is_leaf: dict[type, bool] = {}
        self._is_of_person: dict[type, bool] = {}
        self._attribute_names: dict[type, list[str]] = {}
        self.is_partial = False
        self.aside: list[Named] = []
        """What is in objects of ours: it may be anybody's, so it is asked for last."""

    def leave_out(self, things: Iterable[Any]) -> None:
        """Do not go through these: too much hangs on them."""
        self._visited.update(map(id, things))

    def go(self, roots: Iterable[Named], *, keep_name: bool = False) -> None:
        """Tell of everything that is new in these; `keep_name`: by the root's name, whatever it is in."""
        waiting: deque[tuple[Any, str | None, bool, int]] = deque()
        self._put(waiting, roots, 0)
        while waiting and not self.is_partial:
            thing, name, is_exact, depth = waiting.popleft()
            kind = type(thing)
            if self._is_wanted(kind):
                self._found(thing, name)
            if depth < _DEPTH:
                children = self._children(thing, kind, name, is_exact)
                if keep_name:
                    children = ((child, name, False) for child, _, _ in children)
                try:
                    self._put(waiting, children, depth + 1)
                except Exception:  # noqa: BLE001 - half-built, or changed by another thread meanwhile
                    continue

    def _put(
        self, waiting: deque[tuple[Any, str | None, bool, int]], things: Iterable[Named], depth: int
    ) -> None:
        """Those that may have something in them, and were not there yet."""
        for thing, name, is_exact in things:
            if self._leaf(type(thing)) or id(thing) in self._visited:
                continue
            self._visited.add(id(thing))
            waiting.append((thing, name, is_exact, depth))
            if not len(self._visited) % _BETWEEN_LOOKS:
                self.is_partial |= time.thread_time() > self._until or len(self._visited) > self._most

    def is_of_person(self, kind: type) -> bool:
        """Whether a class is the user's own, not a library's."""
        if kind not in self._is_of_person:
            module = sys.modules.get(kind.__module__) if isinstance(kind.__module__, str) else None
            self._is_of_person[kind] = module is not None and is_module_of_person(module)
        return self._is_of_person[kind]

    def _children(self, thing: Any, kind: type, name: str | None, is_exact: bool) -> Iterator[Named]:
        if is_exact and issubclass(kind, dict) and len(thing) <= _NAMED_KEYS:
            for key, value in list(dict.items(thing)):
                yield value, *((_item(name, key), True) if name and type(key) is str else (name, False))
        elif kind is types.FunctionType:
            yield from _of_function(thing, name)
        elif issubclass(kind, _GENERATORS):
            frame = next(
                (getattr(thing, at) for at in ("gi_frame", "cr_frame", "ag_frame") if hasattr(thing, at)),
                None,
            )
            yield from variables(frame) if frame is not None else ()
        elif issubclass(kind, type):
            if self.is_of_person(thing):
                yield from (
                    (value, f"{thing.__name__}.{at}", True) for at, value in list(vars(thing).items())
                )
        elif self.is_of_person(kind):
            yield from self._attributes(thing, kind, name)
            yield from ((value, name or kind.__name__, False) for value in self._inside(thing))
        else:
            inside = name
            if name is not None and kind.__module__.partition(".")[0] == "buoy":
                self.aside += [(value, None, False) for value in self._inside(thing)]
                return
            if kind.__name__ in FRAMES:
                inside = "other data frames" if name is None else f"{name}{IN_FRAME}"
            yield from ((value, inside, False) for value in self._inside(thing))

    def _inside(self, thing: Any) -> list[Any]:
        """What it refers to, unless all of that are leaves: there are lists of millions of numbers."""
        inside = gc.get_referents(thing)
        kinds = set(map(type, inside))
        return [] if all(map(self._leaf, kinds)) else inside

    def _leaf(self, kind: type) -> bool:
        if kind not in self._is_leaf:
            self._is_leaf[kind] = issubclass(kind, _LEAVES)
        return self._is_leaf[kind]

    def _attributes(self, thing: Any, kind: type, name: str | None) -> Iterator[Named]:
        """`Dataset.images`; what a library's base class keeps for itself goes by the name of the whole."""
        names = self._attribute_names.get(kind)
        if names is None:  # only once per class: to ask each instance for its dict would make one for it
            slots = [at for base in kind.__mro__ for at in base.__dict__.get("__slots__", ())]
            names = self._attribute_names[kind] = [*getattr(thing, "__dict__", ()), *slots]
        has_own_storage = any(
            "__setattr__" in base.__dict__ and base is not object and not self.is_of_person(base)
            for base in kind.__mro__
        )
        for at in names:
            try:
                value = object.__getattribute__(thing, at)
            except AttributeError:
                continue
            if has_own_storage and at.startswith("_"):
                yield value, name or kind.__name__, False
            else:
                yield value, f"{kind.__name__}.{at}", True


def variables(frame: types.FrameType) -> list[Named]:
    """A frame's local variables; those of a library's code have no name that users know."""
    code, items = frame.f_code, frame_items(frame)
    if is_library(code.co_filename):
        return [(value, None, False) for _, value in items]
    place = code.co_qualname.rpartition("<locals>.")[2]
    return [(value, f"{name} in {place}()", True) for name, value in items]


def frame_items(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The names and values of a frame's local variables; the frame keeps no copy of them."""
    found = frame.f_locals
    items = list(found.items())
    if sys.version_info < (3, 13) and is_function(frame) and sys.getrefcount(found) == 3:
        # The frame would keep this copy, and with it what the variables are now, until it ends.
        found.clear()
    return items


def is_function(frame: types.FrameType) -> bool:
    """Whether its variables are its own: those of a script or a cell are the module's."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def is_module_of_person(module: types.ModuleType) -> bool:
    """A script, a notebook, or a module beside them."""
    if module.__name__ == "__main__":
        return True
    file = module.__dict__.get("__file__")
    return isinstance(file, str) and not is_library(file)


def is_library(file: str) -> bool:
    """Whether code of this file is an installed package's, Python's or ours."""
    return file.startswith(("<frozen", OURS, *_PYTHON)) or any(folder in file for folder in _PACKAGES)


def _item(name: str, key: str) -> str:
    """`data["images"] in main()`."""
    variable, in_, place = name.partition(" in ")
    return f'{variable}["{key}"]{in_}{place}'


def _of_function(function: Any, name: str | None) -> Iterator[Named]:
    place = function.__qualname__.partition(".<locals>")[0]
    is_known = not is_library(function.__code__.co_filename)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield cell.cell_contents, f"{variable} in {place}()" if is_known else name, is_known
        except ValueError:  # not assigned yet
            continue
    for more in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        if more:
            yield more, name, False


Size = Callable[[Any], tuple[int, int] | None]
"""(address, bytes) of a thing that takes memory of its own; None for any other."""

_NAMES = {"Tensor", "Variable", "ndarray", "DataFrame", "Series", "ArrowExtensionArray"}
"""Classes of interest, or their bases: a process has half a million objects, and each question takes its time."""
_SECONDS, _THINGS = 2.0, 500_000
_AT_ONCE = 1000
OF_IPYTHON = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[iod]h|_exit_code|In|Out|get_ipython|exit|quit|open|__\w+__")
TRACEBACK, OUTPUTS = "sys.last_traceback", "notebook Out[]"
_WITHOUT_KIND = (TRACEBACK, OUTPUTS, IN_FRAME, "other data frames")


@dataclass(frozen=True)
class Held:
    """Bytes by owner, largest first."""

    sizes: dict[str, int]
    is_partial: bool = False
    """There was more to look through than there was time."""


def by_owner(
    owners: dict[str, Iterable[Any]],
    size_of: Size,
    kinds: dict[str, Size],
    *,
    seconds: float = _SECONDS,
    most: int = _THINGS,
) -> Held:
    """Bytes by owner; each block is counted once, for the first owner that has it.

    `owners` are asked first, with `size_of`; then variables of the script, of its functions and its modules, and what
    is in them; then a notebook's outputs; then what only an old traceback holds; then whatever else is in the process.
    `kinds` are called by one thing's name: `tensor`.
    """
    began = time.thread_time()
    tally = _Tally(kinds)
    for owner, things in owners.items():
        tally.add(owner, things, size_of)
    walk = Walk(_is_wanted, tally.named, seconds, most)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asking a deprecated object for its class is enough to be warned
        walk.leave_out(of_ipython())
        frames = list(_frames())
        theirs = [frame for frame in frames if not is_library(frame.f_code.co_filename)]
        libraries = [frame for frame in frames if frame not in theirs]
        walk.go(_of_script())
        walk.go(root for frame in theirs for root in variables(frame))
        walk.go(_of_modules())
        walk.go(((value, OUTPUTS, False) for value in _outputs()), keep_name=True)
        walk.go([*walk.aside, *(root for frame in libraries for root in variables(frame))])
        if not walk.is_partial:  # else it would be blamed for what others hold too
            walk.go(((value, TRACEBACK, False) for value in last_traceback()), keep_name=True)
        found = gc.get_objects()
        walk.go((thing, type(thing).__name__, False) for thing in found if walk.is_of_person(type(thing)))
        rest, is_all = _wanted(found, until=max(began + seconds, time.thread_time() + seconds / 2))
        for thing in rest:
            tally.named(thing, None)
    return Held(tally.sizes(), walk.is_partial or not is_all)


_ALONE, _SERVED = 0.5, 0.02


def tracked(*kinds: type) -> list[Any]:
    """What the garbage collector knows, of just these types.

    While everything is held no other thread should run: a tuple that one is just building must not have a second
    owner, or Python raises SystemError there. So threads ask for their turn after half a second only, as of the time
    when all who wait by the usual interval have been served.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_ALONE)
    try:
        time.sleep(_SERVED)
        return [thing for thing in gc.get_objects() if type(thing) in kinds]
    finally:
        sys.setswitchinterval(usual)


class _Tally:
    """What was found so far."""

    def __init__(self, kinds: dict[str, Size]) -> None:
        self._kinds = kinds
        self._seen: set[int] = set()
        self._found: dict[tuple[str, str], list[int]] = {}

    def add(self, owner: str, things: Iterable[Any], measure: Size, kind: str = "") -> None:
        for thing in things:
            try:
                block = measure(thing)
            except Exception:  # noqa: BLE001 - odd objects (fake, sparse, half-built) are of no interest here
                continue
            if block is not None and block[0] and block[1] and block[0] not in self._seen:
                self._seen.add(block[0])
                self._found.setdefault((owner, kind), []).append(block[1])

    def named(self, thing: Any, name: str | None) -> None:
        """Something that the walk came by."""
        for kind, measure in self._kinds.items():
            if name is None:
                self.add(f"other {kind}s", [thing], measure)
            else:
                self.add(name, [thing], measure, "" if name.endswith(_WITHOUT_KIND) else kind)

    def sizes(self) -> dict[str, int]:
        told = {}
        for (owner, kind), blocks in self._found.items():
            many = f"{len(blocks)} {kind}s" if len(blocks) > 1 else kind
            told[f"{owner} ({many})" if kind else owner] = sum(blocks)
        return dict(sorted(told.items(), key=lambda item: -item[1]))


def array(thing: Any) -> tuple[int, int] | None:
    """The memory that a NumPy array is in; a view's is that of the array it was made of."""
    if not any(base.__name__ == "ndarray" for base in type(thing).__mro__):
        return None
    while isinstance(thing.base, type(thing)) or type(thing.base).__name__ == "ndarray":
        thing = thing.base
    if type(thing.base).__name__ == "mmap":
        return None  # a file's pages
    return thing.ctypes.data, int(thing.nbytes)


def is_object_array(thing: Any) -> bool:
    """Whether an array holds Python objects, whose memory is not its own: strings of a data frame."""
    return type(thing).__name__ == "ndarray" and bool(thing.dtype.hasobject) and thing.dtype.kind == "O"


def data_frame(thing: Any) -> tuple[int, int] | None:
    """What a data frame holds that is no NumPy array, without the strings in it; its arrays are found by themselves."""
    if type(thing).__name__ in FRAMES and hasattr(type(thing), "estimated_size"):  # polars
        return id(thing), int(thing.estimated_size())
    if any(base.__name__ == "ArrowExtensionArray" for base in type(thing).__mro__):
        return id(thing), int(thing.nbytes)
    return None


_wanted_kinds: dict[type, bool] = {}


def _is_wanted(kind: type) -> bool:
    if kind not in _wanted_kinds:
        _wanted_kinds[kind] = any(base.__name__ in _NAMES for base in kind.__mro__)
    return _wanted_kinds[kind]


def _of_script() -> list[Named]:
    """The variables of a script or a notebook, but for IPython's own."""
    items = list(vars(sys.modules["__main__"]).items())
    return [(value, name, True) for name, value in items if not OF_IPYTHON.fullmatch(name)]


def of_ipython() -> list[Any]:
    """The notebook's shell, where everything comes together: its outputs are asked for by themselves."""
    script = vars(sys.modules["__main__"])
    shell = getattr(script.get("get_ipython"), "__self__", None)
    return [shell, getattr(shell, "displayhook", None), script, script.get("Out")]


def _of_modules() -> Iterator[Named]:
    for module in list(sys.modules.values()):
        if (
            isinstance(module, types.ModuleType)
            and module.__name__ != "__main__"
            and is_module_of_person(module)
        ):
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield value, f"{module.__name__}.{name}", True


def _frames() -> Iterator[types.FrameType]:
    """Of all threads, the innermost first; without those of this file, which would keep themselves alive."""
    for innermost in sys._current_frames().values():
        frame: types.FrameType | None = innermost
        while frame is not None:
            if is_function(frame) and frame.f_code.co_filename != __file__:
                yield frame
            frame = frame.f_back


def _wanted(tracked: list[Any], until: float) -> tuple[list[Any], bool]:
    """Everything of interest, and whether that is all; the collector knows an array only by what it is in."""
    found: dict[int, Any] = {}
    for first in range(0, len(tracked), _AT_ONCE):
        if time.thread_time() > until:
            return list(found.values()), False
        some = tracked[first : first + _AT_ONCE]
        inside = [*some, *gc.get_referents(*some)]
        while inside:
            kinds = {kind for kind in set(map(type, inside)) if kind in (dict, tuple) or _is_wanted(kind)}
            inside = [thing for thing in inside if type(thing) in kinds]
            found.update({id(thing): thing for thing in inside if type(thing) not in (dict, tuple)})
            # A dict or a tuple with nothing in it that has references is not tracked either.
            inside = gc.get_referents(
                *(x for x in inside if type(x) in (dict, tuple) and not gc.is_tracked(x))
            )
    return list(found.values()), True


def last_traceback() -> list[Any]:
    """Local variables of the functions that an exception, shown last, went through."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    tracebacks = [getattr(sys, "last_traceback", None)]
    while isinstance(error, BaseException) and len(tracebacks) < 100:
        tracebacks.append(error.__traceback__)
        error = error.__cause__ or error.__context__
    values: list[Any] = []
    for traceback in tracebacks:
        while traceback is not None:
            frame = traceback.tb_frame
            if is_function(frame):
                values += [value for value, _, _ in variables(frame)]
            traceback = traceback.tb_next
    return values


def _outputs() -> list[Any]:
    outputs = getattr(sys.modules.get("__main__"), "Out", None)
    return list(outputs.values()) if isinstance(outputs, dict) else []
