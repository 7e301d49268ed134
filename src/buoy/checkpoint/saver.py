"""Saving: the training waits for one copy into the arena, a process of its own does the rest.

The trainer's end of the writer process: starting it, handing over a checkpoint, hearing how it went. A save answers
with a receipt, since the trainer continues long before it is known how the write went.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from buoy import __version__
from buoy.checkpoint import lock as holders
from buoy.checkpoint.arena import Arena, Job, copy_all, has_room, memory_room
from buoy.checkpoint.commit import Part, next_name, remove_leftovers
from buoy.checkpoint.encoding import AsTensor, Encoded, Tensor, encode, encode_all
from buoy.checkpoint.manifest import PIECE_BYTES, Layout, lay_out, signature_of
from buoy.errors import BuoyError
from buoy.units import format_bytes, format_duration

_WRITER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "writer.py")
_START_SECONDS = 20.0
_MOST_REPLY = 65536


class WriterLink:
    """A started writer; `OSError` when it cannot be started."""

    def __init__(self, lock: int) -> None:
        """`lock`: the run's lock, which the writer holds too, until all it was given is on disk."""
        if not sys.executable:
            raise OSError("Python does not know its own executable (sys.executable is empty)")
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = (theirs.fileno(), lock)
        try:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", _WRITER, *map(str, descriptors), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,
            )
            if launcher.wait(_START_SECONDS):  # it forks at once: the writer is nobody's child
                raise OSError(f"the checkpoint writer did not start (exit code {launcher.returncode})")
        except (OSError, subprocess.SubprocessError) as error:
            self._ours.close()
            raise OSError(str(error)) from error
        finally:
            theirs.close()

    def send(self, arena: int, request: dict[str, object], values: bytes) -> None:
        """Hand over a checkpoint: once this returns, it needs the trainer no more."""
        text = json.dumps(request).encode()
        note = os.memfd_create("buoy-note", os.MFD_CLOEXEC)
        try:
            for data in (len(text).to_bytes(8, "little") + text, values):
                view = memoryview(data)
                while view:
                    view = view[os.write(note, view) :]
            socket.send_fds(self._ours, [b"save"], [arena, note])
        finally:
            os.close(note)

    def reply(self, timeout: float) -> dict[str, object] | None:
        """What the writer says; None if it says nothing in time; `OSError` when it has died."""
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        if not poll.poll(max(0.0, (deadline - time.monotonic()) * 1000)):
            return None
        data = self._ours.recv(_MOST_REPLY)
        if not data:
            raise OSError("the checkpoint writer has died")
        reply = json.loads(data)
        return reply if isinstance(reply, dict) else {}

    def dismiss(self) -> None:
        """It is given nothing more, and leaves once what it has is on disk."""
        try:
            self._ours.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has died

    def is_silent(self) -> bool:
        """Whether a writer that was given up has said nothing yet; one that has, or has died, is let go."""
        try:
            if self.reply(0.0) is None:
                return True
        except (OSError, ValueError):
            pass
        self.forget()
        return False

    def end(self, timeout: float) -> None:
        """Let the writer go, and wait until it has: then the lock is free."""
        try:
            self._ours.shutdown(socket.SHUT_WR)
            while self.reply(timeout) is not None:
                pass
        except OSError:
            pass
        self.forget()

    def forget(self) -> None:
        """Close our end without a word: a forked child's part."""
        self._ours.close()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one save."""

    step: int
    folder: str
    """Where it is, or will be once it is committed."""
    bytes: int
    """What it takes on disk, or would; 0 when nothing was tried."""
    stall_seconds: float
    """How long the training waited."""
    write_seconds: float | None
    """None while it is being written."""
    error: str | None = None
    """Why there is no checkpoint; training continues."""
    errno: int | None = None

    @property
    def committed(self) -> bool:
        """Whether it is on disk, whole."""
        return self.error is None and self.write_seconds is not None


_LEAST_PATIENCE = 60.0
"""Seconds for a checkpoint that is being written; a disk that hangs longer must not take the training with it."""
_USUAL_TIMES = 10
"""So many times what the last one took is waited for a checkpoint."""
_SLOW_DISK = 10 << 20
"""Bytes a second that the slowest disk in use writes."""
_MOST_GIVEN_UP = 2
"""Writers that hang: with so many of them it is the disk, and one more would only take memory."""
_END_SECONDS = 10.0
_MANIFEST_BYTES, _BYTES_PER_PIECE = 800, 40
_FRAMEWORKS = ("torch", "tensorflow", "keras", "numpy")


class Saver:
    """Writes the checkpoints of one run; made by `Store.saver`, which takes the run's lock for it."""

    def __init__(
        self,
        checkpoints: str,
        lock: int,
        say: Callable[[str], object],
        event: Callable[..., object],
        told: Callable[[Receipt], object],
    ) -> None:
        """`told` hears how each save went."""
        self._checkpoints = checkpoints
        self._lock = lock
        self._say = say
        self._event = event
        self._hear = told
        self._pid = os.getpid()
        self._link: WriterLink | None = None
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._in_flight: Receipt | None = None
        self._request: tuple[dict[str, object], bytes] | None = None
        """What is in flight, until the writer has said how it went: another writer may have to take it over."""
        self._asked = time.monotonic()
        self._usual = 0.0
        """Seconds that the last checkpoint took to be written."""
        self._given_up: list[WriterLink] = []
        """Writers that did not answer: each still has its arena, and may commit what it was given."""
        self._last: Receipt | None = None
        self._told: set[str] = set()
        _savers.add(self)

    def save(
        self,
        items: Mapping[str, object],
        about: Mapping[str, object],
        as_tensor: AsTensor,
        *,
        wait: bool = False,
        make_room: Callable[[int], str | None] | None = None,
        most: float | None = None,
    ) -> Receipt:
        """Save these values as the checkpoint of `about["step"]`.

        `make_room` receives how many bytes it will take, before anything is copied, and may refuse in words.
        `most`: seconds to wait for the checkpoint before, where there is less time than usual.

        Once this returns, the trainer's death loses nothing: the writer has all it needs. What goes wrong on
        disk is in a receipt's `error` (this one's, or a later `last()`), never raised.
        """
        started = time.perf_counter()
        if self._lock < 0 or self._pid != os.getpid():
            raise BuoyError("this Run is closed and saves nothing more", received=self._checkpoints,
                            expected="one open Run per folder, in one process",
                            hint="create a new Run to continue")  # fmt: skip
        step = about["step"]
        assert isinstance(step, int)
        if self._in_flight is not None and self._settle(self._patience(most)) is None:
            unanswered = self._give_up(self._in_flight)
            if not wait:
                return self._failed(step, started, unanswered, errno.EBUSY)
            self._say(unanswered)  # and at once to another one: there is no later
        encoded = encode_all(items, as_tensor)
        layout = self._layout_of(encoded.tensors)
        values = json.dumps(encoded.tree, separators=(",", ":"), allow_nan=False).encode()
        described = encode("about", dict(about), lambda value: None).tree
        fields: dict[str, object] = {"step": step, "about": described, "versions": _versions()}
        name = f"step-{step:09d}"
        refusal = make_room(_bytes_on_disk(layout, values)) if make_room is not None else None
        if refusal is not None:
            return self._failed(step, started, refusal, errno.ENOSPC)
        if not self._ready(layout):
            return self._stream(name, layout, encoded, values, fields, started)
        assert self._arena is not None
        self._fill(self._arena.memory, layout, encoded)
        request = {"checkpoints": self._checkpoints, "name": name, "size": layout.size,
                   "ends": layout.ends, "fields": fields}  # fmt: skip
        # In flight before it is sent: whatever interrupts us here, the arena is not filled again under the writer.
        self._in_flight = Receipt(
            step, next_name(self._checkpoints, name), _bytes_on_disk(layout, values), 0.0, None
        )
        self._asked = time.monotonic()
        if not self._hand_over(request, values):
            self._in_flight = None
            return self._stream(name, layout, encoded, values, fields, started)
        self._in_flight = replace(self._in_flight, stall_seconds=time.perf_counter() - started)
        self._request = (request, values)
        return (self._settle(self._patience()) if wait else None) or self._in_flight

    def size(self, items: Mapping[str, object], as_tensor: AsTensor) -> int:
        """Bytes that a checkpoint of these values takes; the arena is made ready meanwhile.

        Refuses, as `save` would, what cannot be saved.
        """
        encoded = encode_all(items, as_tensor)
        layout = self._layout_of(encoded.tensors)
        if self._lock >= 0 and self._pid == os.getpid() and self._in_flight is None:
            self._ready(layout)
        return _bytes_on_disk(layout, json.dumps(encoded.tree, separators=(",", ":")).encode())

    def last(self) -> Receipt | None:
        """How the newest finished save went, as far as the writer has answered; never blocks."""
        if self._in_flight is not None:
            self._settle(0.0)
        return self._last

    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._in_flight is not None and self._settle(0.0) is None

    def is_overdue(self) -> bool:
        """Whether a checkpoint is being written for longer than anybody waits for it."""
        return self._in_flight is not None and self._patience() <= 0

    def wait(self, most: float | None = None) -> Receipt | None:
        """Wait until nothing is being written, or the writer does not answer; how the newest save went."""
        if self._in_flight is not None:
            self._settle(self._patience(most))
        return self._last

    def close(self) -> None:
        """Wait for the writer, let it go, release the lock; twice is as good as once."""
        if self._lock < 0 or self._pid != os.getpid():
            return
        self.wait()
        if self._in_flight is not None:
            self._say(self._give_up(self._in_flight))
        if self._link is not None:
            self._link.end(_END_SECONDS)
        self._let_go()

    def _let_go(self) -> None:
        """Close what is open without a word to the writer."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)
        if self._link is not None:
            self._link.forget()
        for link in self._given_up:
            link.forget()
        if self._arena is not None:
            self._arena.close()
        self._link = self._arena = None

    def _layout_of(self, tensors: Mapping[str, Tensor]) -> Layout:
        if self._layout is None or self._layout.signature != signature_of(tensors):
            self._layout = lay_out(tensors)
        return self._layout

    def _ready(self, layout: Layout) -> bool:
        """Make the arena and the writer ready; False when the state must be streamed instead."""
        self._given_up = [link for link in self._given_up if link.is_silent()]
        if self._link is None and len(self._given_up) >= _MOST_GIVEN_UP:
            return False
        if self._arena is None or self._arena.size < layout.size:
            if self._arena is not None:
                self._arena.close()
                self._arena = None
            if not has_room(layout.size):
                if self._given_up:
                    return False
                self._say_once(
                    f"not enough memory for a copy of the state ({format_bytes(layout.size)}, "
                    f"{format_bytes(memory_room())} left): training waits while checkpoints are written"
                )
                return False
            try:
                self._arena = Arena(layout.size)
            except OSError as error:
                self._say_once(f"no shared memory ({error}): training waits while checkpoints are written")
                return False
            self._arena.touch()
        return self._started()

    def _started(self) -> bool:
        if self._link is None:
            try:
                self._link = WriterLink(self._lock)
            except OSError as error:
                self._say_once(f"{error}: training waits while checkpoints are written")
                return False
        return True

    def _fill(self, memory: memoryview, layout: Layout, encoded: Encoded) -> None:
        memory[: len(layout.header)] = layout.header
        plain: list[Job] = []
        for name, (start, end) in layout.places.items():
            tensor, room = encoded.tensors[name], memory[start:end]
            if not room:
                continue
            if tensor.address is not None:
                plain.append((room, tensor.address))
            else:
                tensor.copy_into(room)
        copy_all(plain)

    def _hand_over(self, request: dict[str, object], values: bytes) -> bool:
        for _ in range(2):
            if not self._started():
                return False
            assert self._link is not None and self._arena is not None
            try:
                self._link.send(self._arena.descriptor, request, values)
                return True
            except OSError:  # it died while idle: another one
                self._link.forget()
                self._link = None
        return False

    def _hand_over_again(self, asked: Receipt, why: Exception) -> bool:
        """The writer died over a checkpoint whose copy is still in the arena: another one, once, may finish it."""
        self._event("trouble", what=f"checkpoint of step {asked.step}: {why}")
        if self._link is not None:
            self._link.forget()
            self._link = None
        request, self._request = self._request, None
        if request is None:
            return False
        if not self._given_up:  # else one of them may be at work there
            remove_leftovers(self._checkpoints)
        return self._hand_over(*request)

    def _stream(
        self,
        name: str,
        layout: Layout,
        encoded: Encoded,
        values: bytes,
        fields: dict[str, object],
        started: float,
    ) -> Receipt:
        """Write here and now, with memory for one tensor only."""
        step = fields["step"]
        assert isinstance(step, int)
        if self._given_up:  # writing here and now would hang as they do, and the training with it
            who = holders.in_words(holders.writers_of(self._checkpoints))
            return self._failed(
                step, started, f"the checkpoint writer ({who or 'n/a'}) does not respond", errno.EBUSY
            )

        def parts() -> Iterator[memoryview]:
            yield memoryview(layout.header)
            largest = max((end - start for start, end in layout.places.values()), default=0)
            room = memoryview(bytearray(largest))
            for tensor_name, (start, end) in layout.places.items():
                if end > start:
                    encoded.tensors[tensor_name].copy_into(room[: end - start])
                    yield room[: end - start]

        try:
            part = Part(self._checkpoints, name)
            try:
                part.write_stream(parts())
                part.write_values(values)
                folder = part.commit(fields)
            except BaseException:
                part.drop()
                raise
        except OSError as error:
            size = _bytes_on_disk(layout, values)
            return self._failed(step, started, error.strerror or str(error), error.errno, size)
        seconds = time.perf_counter() - started
        self._last = Receipt(step, folder, part.bytes, seconds, seconds)
        self._hear(self._last)
        return self._last

    def _patience(self, most: float | None = None) -> float:
        """A writer that hangs is waited for once, not at every save."""
        size = self._in_flight.bytes if self._in_flight is not None else 0
        bound = max(_LEAST_PATIENCE, _USUAL_TIMES * self._usual, size / _SLOW_DISK)
        left = max(0.0, self._asked + bound - time.monotonic())
        return left if most is None else min(left, max(0.0, most))

    def _give_up(self, asked: Receipt) -> str:
        """Leave the writer alone with its arena: it may still read it, and commit. What happened, in words."""
        assert self._link is not None
        self._link.dismiss()
        self._given_up.append(self._link)
        if self._arena is not None:
            self._arena.close()
        self._link = self._arena = self._in_flight = self._request = None
        who = holders.in_words(holders.writers_of(self._checkpoints))
        waited = format_duration(time.monotonic() - self._asked)
        text = f"the checkpoint writer ({who or 'n/a'}) has not responded for {waited} while saving step {asked.step}"
        self._event("trouble", what=text)
        return text

    def _settle(self, timeout: float) -> Receipt | None:
        """The receipt of what is in flight, once the writer has answered; None while it has not."""
        asked = self._in_flight
        assert asked is not None
        assert self._link is not None
        try:
            reply = self._link.reply(timeout)
            if reply is None or reply.get("step") not in (asked.step, None):
                return None  # nothing yet, or the end of a save that was interrupted
        except (OSError, ValueError) as error:
            if self._hand_over_again(asked, error):
                return self._settle(timeout)
            reply = {"error": str(error)}
        self._in_flight = self._request = None
        told, number, seconds, size = (reply.get(key) for key in ("error", "errno", "seconds", "bytes"))
        self._last = Receipt(
            asked.step,
            str(reply.get("folder", asked.folder)),
            size if isinstance(size, int) else asked.bytes,
            asked.stall_seconds,
            seconds if isinstance(seconds, float) else None,
            None if told is None else str(told),
            number if isinstance(number, int) else None,
        )
        self._usual = self._last.write_seconds or self._usual
        self._hear(self._last)
        return self._last

    def _failed(self, step: int, started: float, text: str, number: int | None, size: int = 0) -> Receipt:
        self._last = Receipt(step, self._checkpoints, size, time.perf_counter() - started, None, text, number)
        return self._last

    def _say_once(self, text: str) -> None:
        if text[:20] not in self._told:
            self._told.add(text[:20])
            self._say(text)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _bytes_on_disk(layout: Layout, values: bytes) -> int:
    """Exact but for the manifest, which has a few lines for every piece."""
    pieces = len(layout.places) + layout.size // PIECE_BYTES + 2
    return layout.size + len(values) + _MANIFEST_BYTES + _BYTES_PER_PIECE * pieces


def _versions() -> dict[str, str]:
    """What wrote it; only of what is loaded anyway."""
    found = {"buoy": __version__, "python": platform.python_version()}
    for name in _FRAMEWORKS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def _forget_after_fork() -> None:
    """A data-loading worker must hold neither the lock nor the writer's connection: both would outlive the trainer."""
    for saver in list(_savers):
        saver._let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
