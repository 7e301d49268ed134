"""Large things that this Python process holds, by who holds them."""

from __future__ import annotations

import gc
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from buoy.machine.heap_walk import (
    FRAMES,
    IN_FRAME,
    Named,
    Walk,
    is_function,
    is_library,
    is_module_of_person,
    variables,
)

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
