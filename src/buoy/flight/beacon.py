"""The beacon: a mapped page through which a training process says where it is, and leaves its last words.

The layout is in docs/flight-log.md. Writing a step is one `pack_into` (about a microsecond), with no system call;
the page outlives the process, whatever kills it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections import namedtuple
from collections.abc import Callable

from buoy.machine.files import open_new, parse_json, read_bounded

MAGIC = b"BUOYBCN1"
SIZE = 4096
PHASES = ("start", "train", "eval", "checkpoint", "data", "done")

_STEP = struct.Struct("<Qddd")  # step, step_t, step_seconds, data_wait
_COUNT = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
_STEP_AT = 64
_DATA_WAIT_AT = _STEP_AT + 24
_PLACE = struct.Struct("<qQd")  # epoch, phase, phase_t
_PLACE_AT = _STEP_AT + _STEP.size
FATAL_AT = 256
_FATAL = struct.Struct("<iiiiQ")  # si_signo, si_errno, si_code, nothing, si_pid and si_uid or si_addr
_CELL_AT, _CELL_MOST = 512, 500
_NOTE_AT, _NOTE_MOST = 1024, SIZE - 1024 - 4
_LENGTH = struct.Struct("<I")

Reading = namedtuple("Reading", "step step_t step_seconds data_wait epoch phase phase_t cell note fatal")
FatalSignal = namedtuple("FatalSignal", "number code pid address")
"""What the kernel said of a fatal signal (see last_words.py). `pid` is the sender's where `code` is not positive."""


class Beacon:
    """The writing end, in the training process."""

    def __init__(self, path: str | None, again: bool = False) -> None:
        self._page = _map(path, again) if path is not None else mmap.mmap(-1, SIZE)
        self._page[: len(MAGIC)] = MAGIC
        self.count = 0
        self.unannounced: Callable[[], None] | None = None
        """Called after a step that is counted while no training is known to be under way."""
        self._last = 0.0
        self._step_seconds = 0.0
        self._data_wait = 0.0
        self._epoch = -1
        self._phase = 0
        self._place()

    def move(self, path: str | None) -> None:
        """Say all that was said on another page from here on; None: on one that nobody reads."""
        page = _map(path, False) if path is not None else mmap.mmap(-1, SIZE)
        page[:] = self._page[:]
        self._page = page

    def step(self, number: int | None = None) -> None:
        """One optimizer step is done."""
        now = time.monotonic()
        self.count = self.count + 1 if number is None else number
        if self._last:
            self._step_seconds += (now - self._last - self._step_seconds) * (
                0.1 if self._step_seconds else 1.0
            )
        self._last = now
        _STEP.pack_into(self._page, _STEP_AT, self.count, now, self._step_seconds, self._data_wait)
        if self._phase != 1:
            self._phase = 1
            self._place()
        if self.unannounced is not None:
            self.unannounced()

    def at(self, number: int) -> None:
        """Another training begins, or resumes, at this step; that is no step of its own."""
        self.count = number
        self._last = 0.0
        _COUNT.pack_into(self._page, _STEP_AT, number)

    def waited(self, seconds: float) -> None:
        """The loop waited this long for data; that a batch came is a sign of life, in an evaluation the only one."""
        self._data_wait += seconds
        _SECONDS.pack_into(self._page, _DATA_WAIT_AT, self._data_wait)

    def epoch(self, number: int) -> None:
        """An epoch begins."""
        self._epoch = number
        self._place()

    def phase(self, name: str) -> str:
        """Enter a phase, and get the one that was left."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; expected one of {', '.join(PHASES)}")
        before = PHASES[self._phase]
        if name == "done":
            self._last = 0.0  # the pause between two cells is no part of the next step
        self._phase = PHASES.index(name)
        self._place()
        return before

    def cell(self, text: str) -> None:
        """Name the notebook cell that runs; empty when none does."""
        self._text(_CELL_AT, _CELL_MOST, text)

    def note(self, value: dict[str, object]) -> None:
        """Leave last words. The longest texts are cut until it fits."""
        text = json.dumps(value)
        while len(text) > _NOTE_MOST:
            value = _shortened(value)
            text = json.dumps(value)
        self._text(_NOTE_AT, _NOTE_MOST, text)

    def detach(self) -> None:
        """In a forked child that is not the training: the page stays the parent's alone."""
        self._page = mmap.mmap(-1, SIZE)

    def read(self) -> Reading | None:
        """What a reader would see now."""
        return parse(self._page[:])

    def _place(self) -> None:
        _PLACE.pack_into(self._page, _PLACE_AT, self._epoch, self._phase, time.monotonic())

    def _text(self, at: int, most: int, text: str) -> None:
        data = text.encode("utf-8", "replace")[:most]
        _LENGTH.pack_into(self._page, at, 0)  # a reader in between sees no text rather than a mixture
        self._page[at + 4 : at + 4 + len(data)] = data
        _LENGTH.pack_into(self._page, at, len(data))


def _map(path: str, again: bool) -> mmap.mmap:
    descriptor = open_new(path, again=again)
    try:
        # Real blocks, not a hole: writing to a hole on a full disk would be a SIGBUS, and ours.
        os.posix_fallocate(descriptor, 0, SIZE)
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)


def _shortened(value: dict[str, object]) -> dict[str, object]:
    if value.get("chain"):
        return {**value, "chain": []}
    longest = max((key for key in value if isinstance(value[key], str)), key=lambda key: len(str(value[key])))
    text = str(value[longest])
    return {**value, longest: text[: len(text) // 3] + " ... " + text[-len(text) // 3 :]}


def parse(page: bytes) -> Reading | None:
    """Read a beacon's bytes; None when they are not one."""
    if len(page) < SIZE or not page.startswith(MAGIC):
        return None
    step, step_t, step_seconds, data_wait = _STEP.unpack_from(page, _STEP_AT)
    epoch, phase, phase_t = _PLACE.unpack_from(page, _PLACE_AT)
    cell = _text_at(page, _CELL_AT, _CELL_MOST)
    words = _text_at(page, _NOTE_AT, _NOTE_MOST)
    try:
        note = parse_json(words.encode()) if words else None
    except ValueError:
        note = None
    name = PHASES[phase] if phase < len(PHASES) else "start"
    number, _, code, _, origin = _FATAL.unpack_from(page, FATAL_AT)
    fatal = FatalSignal(number, code, origin & 0xFFFFFFFF, origin) if number else None
    return Reading(step, step_t or None, step_seconds or None, data_wait, epoch if epoch >= 0 else None,
                   name, phase_t, cell, note if isinstance(note, dict) else None, fatal)  # fmt: skip


def _text_at(page: bytes, at: int, most: int) -> str:
    (length,) = _LENGTH.unpack_from(page, at)
    return page[at + 4 : at + 4 + length].decode("utf-8", "replace") if 0 < length <= most else ""


def read_beacon(path: str) -> Reading | None:
    """The beacon of a process, dead or alive; None when there is none or it is damaged."""
    try:
        return parse(read_bounded(path, SIZE))
    except OSError:
        return None
