"""Which variables hold a training's memory: the sidecar asks while it lives, the process itself answers.

There a thread of ours sleeps until then, at no cost. The main thread cannot do it: the first step of a `fit` may fill
a cache for minutes inside one call of C. The sidecar's signal is answered in C (`faulthandler` writes to a pipe), so
that it disturbs no system call and no handler of the user's. A plain script, that has no other thread, gets none of
ours: a second thread makes Python 3.12 and later warn of every fork; there the main thread answers between two lines.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from buoy.errors import trouble
from buoy.flight.imports import after_import
from buoy.flight.privacy import mask_text
from buoy.flight.stacks import ANSWER, HOLDERS_SIGNAL
from buoy.machine.files import high_number, write_json

_THREADED = ("numpy", "torch")
"""Whoever imports one of these has further threads from then on."""
_HIGH_DESCRIPTORS = 48
_SETTLE = 0.05
"""Seconds in which the whole of one request arrives: it is written in pieces."""
_LEAST_PAUSE = 1.0
_END_SECONDS = 10.0
"""For so long the interpreter's end waits for a look: it takes a fraction of a second, on a starved machine more."""
_LEAST_SHARE = 0.03
"""Of the process's memory: a variable that holds less is not named."""
_OUTSIDE_SHARE = 0.2
_SHOWN = 3


class Attendant:
    """Answers for this process; also calls `tick` now and then, for a notebook's card."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._pid = os.getpid()
        self._answered = 0.0
        self._work = _thread.allocate_lock()
        """Held by whoever looks or ticks, and for good by the interpreter's end."""
        self._is_started = False
        self._waking = -1
        self._tick: Callable[[], None] | None = None
        self._period = 0.0
        try:
            signal.signal(HOLDERS_SIGNAL, lambda *_: self._answer())
        except ValueError:
            pass  # not in the main thread: then nobody answers before there is a thread of ours
        for package in _THREADED:
            after_import(package, self.start)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def start(self) -> None:
        """Answer in a thread from now on; where none can be had, the main thread goes on to answer."""
        # A thread reserves 64 MiB of addresses: too much where those are limited.
        import resource  # not on Windows, where verdicts are read too

        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        if self._is_started or limited or os.getpid() != self._pid:
            return
        try:
            reading, self._waking = _pipe()
            _thread.start_new_thread(self._wait, (reading, _inode(reading)))
        except (OSError, RuntimeError):
            return
        self._is_started = True
        faulthandler.register(HOLDERS_SIGNAL, self._waking, all_threads=False, chain=False)

    def every(self, seconds: float, tick: Callable[[], None] | None) -> None:
        """Call `tick` so often, in the thread; None: no more."""
        self._tick, self._period = tick, seconds
        if self._is_started and os.getpid() == self._pid:
            try:
                os.write(self._waking, b"\n")
            except OSError:
                pass  # a script that closes all files, or so many asked at once that it wakes anyway

    def _wait(self, reading: int, pipe: int | None) -> None:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        while True:
            ready = poll.poll(1000 * self._period if self._tick is not None else None)
            try:
                if ready and not self._hear(reading, pipe):
                    return
                if self._tick is not None and self._work.acquire(False):
                    try:
                        self._tick()
                    finally:
                        self._work.release()
            except Exception as error:  # noqa: BLE001 - whatever fails here, the training does not
                trouble("the thread that names what holds memory", error)
                if _inode(reading) != pipe:
                    return

    def _hear(self, reading: int, pipe: int | None) -> bool:
        """Whether our pipe is still there: a script that closes all files may have another of this number by now."""
        time.sleep(_SETTLE)
        words = os.read(reading, 1 << 16) if _inode(reading) == pipe else b""
        if words.strip():
            self._answer()
        return bool(words)

    def _answer(self) -> None:
        now = time.monotonic()
        if os.getpid() != self._pid or now - self._answered < _LEAST_PAUSE or not self._work.acquire(False):
            return
        try:
            write_json(os.path.join(self.folder, ANSWER), {"t": now, "wall": time.time(), **_survey()})
        except OSError:
            pass  # a full disk, a folder that is gone
        except Exception as error:  # noqa: BLE001 - whatever fails here, the training does not
            trouble("the answer about what holds memory", error)
        finally:
            self._work.release()
        self._answered = time.monotonic()

    def _end(self) -> None:
        """The interpreter shuts down. A thread that it cuts off in the middle of a library's code crashes it.

        So a look that has begun is waited for, and none begins any more.
        """
        self._tick = None
        if os.getpid() == self._pid:
            self._work.acquire(timeout=_END_SECONDS)
        self._pid = -1

    def _forget(self) -> None:
        """In a forked child: it has no such thread, and nobody asks it."""
        if self._is_started:
            faulthandler.unregister(HOLDERS_SIGNAL)
            self._is_started = False


def _survey() -> dict[str, object]:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return {"error": "this Python has no lock that keeps its objects still"}
    try:
        from buoy.machine.variables import survey

        found = survey().to_json()
    except Exception as error:  # noqa: BLE001 - said in the answer, too
        trouble("the survey of what holds memory", error)
        return {"error": repr(error)[:200]}
    for variable in found["variables"]:  # type: ignore[attr-defined]
        variable["name"] = mask_text(variable["name"])[:80]
    return found


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return high_number(reading, _HIGH_DESCRIPTORS), high_number(writing, _HIGH_DESCRIPTORS)


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def large(values: dict[str, Any], on_device: bool = False) -> list[dict[str, Any]]:
    """The variables of an answer that are worth a name, the largest first: in RAM, or on a GPU."""
    found = values.get("variables")
    known = [each for each in found if _is_whole(each)] if isinstance(found, list) else []
    least = 0.0 if on_device else _LEAST_SHARE * _size(values, "resident")
    return [each for each in known if bool(each["device"]) is on_device and each["bytes"] >= least]


def _is_whole(variable: object) -> bool:
    """Whether all parts are there: a log may be damaged."""
    if not isinstance(variable, dict) or not isinstance(variable.get("bytes"), int):
        return False
    return all(isinstance(variable.get(part), str) for part in ("name", "what", "place", "device"))


def _size(values: dict[str, Any], name: str) -> float:
    size = values.get(name)
    return float(size) if isinstance(size, int | float) else 0.0


def texts(values: dict[str, Any], name: str) -> list[str]:
    """The names that an answer has under this one."""
    found = values.get(name)
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def outside(values: dict[str, Any]) -> str | None:
    """What an answer says of memory that is in no Python object, if that is much."""
    from buoy.units import format_bytes

    size, resident = _size(values, "outside"), _size(values, "resident")
    if not size or size < _OUTSIDE_SHARE * resident:
        return None
    words = f"{format_bytes(size)} are outside Python objects"
    if pipelines := texts(values, "pipelines"):
        return f"{words}, where tf.data keeps the elements of {' and '.join(pipelines[:_SHOWN])}"
    if graphs := texts(values, "graphs"):
        return f"{words}, such as the graphs that the tensors in {', '.join(graphs[:_SHOWN])} keep"
    return words


def children(values: dict[str, Any]) -> str | None:
    """What the processes hold that it started, if that is more than it holds itself."""
    from buoy.units import format_bytes

    size, number = _size(values, "children_bytes"), int(_size(values, "children"))
    if not number or size <= _size(values, "resident"):
        return None
    return f"{format_bytes(size)} are in {'its child process' if number == 1 else f'its {number} child processes'}"


def where(variable: dict[str, Any]) -> str:
    """`in load_data, train.py:31`; of what has no name, where the code is."""
    place = str(variable["place"])
    return place if not place or place.startswith("the code") else f"in {place}"


def describe(variable: dict[str, Any]) -> str:
    """`images (list of 41,200 NumPy arrays, 6.2 GiB) in load_data, train.py:31`."""
    from buoy.units import format_bytes

    device = f" on {variable['device']}" if variable["device"] else ""
    words = f"{variable['name']} ({variable['what']}, {format_bytes(variable['bytes'])}{device}) {where(variable)}"
    return words.rstrip()


def sentence(values: dict[str, Any], on_device: bool = False) -> str | None:
    """An answer as the one line that a user sees; None where it names nothing.

    >>> held = {"name": "images", "bytes": 3 << 30, "what": "list of 9 strings", "place": "load, a.py:3", "device": ""}
    >>> sentence({"variables": [held], "resident": 5 << 30, "outside": 2 << 30})
    'Memory is held by images (list of 9 strings, 3.0 GiB) in load, a.py:3; 2.0 GiB are outside Python objects.'
    """
    if values.get("error"):
        return f"What holds the memory could not be read: {values['error']}."
    named = [describe(each) for each in large(values, on_device)[:_SHOWN]]
    more = [] if on_device else [each for each in (children(values), outside(values)) if each is not None]
    if not named:
        return f"Memory: {'; '.join(more)}." if more else None
    if not on_device and not more and _size(values, "found") > 1.1 * _size(values, "resident") > 0:
        more = ["some of it is shared, or not written yet"]
    return f"Memory is held by {'; '.join([*named, *more])}."
