"""What is shown below a cell: HTML where the front end can, else text; and the card that follows a training.

The card needs no widget: the training's own steps draw it. Where none come and the recorder has warned of something,
the thread that answers the recorder draws it.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from buoy.errors import trouble
from buoy.flight.recorder import Recorder
from buoy.machine.files import read_bounded
from buoy.verdict.model import Verdict
from buoy.view.cards import lines_html, verdict_card
from buoy.view.history import RUNNING
from buoy.view.top import lines, state


def show(html: str, text: str) -> None:
    """Display once."""
    Output().show(html, text)


def show_verdict(verdict: Verdict) -> None:
    """Its card."""
    show(verdict_card(verdict.to_json()), str(verdict))


def show_text(text: str) -> None:
    """Lines as they are."""
    show(lines_html(text), text)


class Output:
    """One output below a cell, redrawn in place each time."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Display, or replace what is displayed."""
        from IPython.display import display

        content = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(content, raw=True)


_LEAST_SECONDS = 2.0
_LOOK_SECONDS = 2.0
"""Between two looks for news while no step comes."""
_SHARE = 0.005
"""Drawing may take this share of the time: a slow disk makes the card rarer, not the training slower."""


class LiveCard:
    """Shows where the training is while a cell runs; one card per cell, updated in place."""

    def __init__(self, shell: Any, recorder: Recorder) -> None:
        self._shell = shell
        self._recorder = recorder
        self._output: Output | None = None
        self._pid = os.getpid()
        self._next = time.monotonic() + _LEAST_SECONDS
        self._drawing = threading.Lock()
        self._context: contextvars.Context | None = None
        """Of the cell that runs: below that one belongs what is displayed. None between two cells."""
        self._read = 0
        """Bytes of the events that were there when the cell began."""
        self._step: Callable[[int | None], None] = recorder.beacon.step
        recorder.beacon.step = self._stepped  # type: ignore[method-assign]
        shell.events.register("pre_run_cell", self._begins)
        shell.events.register("post_run_cell", self._ends)
        self._begins()  # it is loaded in a cell

    def stop(self) -> None:
        """Draw no more."""
        self._attend(None)
        self._recorder.beacon.step = self._step  # type: ignore[method-assign,assignment]
        self._shell.events.unregister("pre_run_cell", self._begins)
        self._shell.events.unregister("post_run_cell", self._ends)

    def _attend(self, look: Callable[[], None] | None) -> None:
        attendant = self._recorder.attendant
        if attendant is not None:
            attendant.start()
            attendant.every(_LOOK_SECONDS, look)

    def _stepped(self, number: int | None = None) -> None:
        self._step(number)
        if time.monotonic() >= self._next:
            self._draw()

    def _look(self) -> None:
        """In the thread: draw where no step does, once the recorder has warned of something in this cell."""
        context = self._context
        if context is None or time.monotonic() < self._next + _LOOK_SECONDS:
            return
        if self._output is not None or self._is_warned():
            context.run(self._draw)

    def _is_warned(self) -> bool:
        try:
            return b'"kind": "warning"' in read_bounded(self._events(), 1 << 20, at=self._read)
        except (OSError, AssertionError):
            return False

    def _events(self) -> str:
        assert self._recorder.attempt is not None
        return os.path.join(self._recorder.attempt.folder, "events.jsonl")

    def _begins(self, info: Any = None) -> None:
        self._output = None
        self._next = time.monotonic() + _LEAST_SECONDS
        self._context = contextvars.copy_context()
        self._attend(self._look)
        try:
            self._read = os.stat(self._events()).st_size
        except (OSError, AssertionError):
            self._read = 0

    def _ends(self, result: Any = None) -> None:
        self._context = None
        if self._output is not None:
            self._draw(patience=1.0)
            self._output = None

    def _draw(self, patience: float = 0.0) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, such as the one that traces a plan, has no page to draw on
        begin = time.monotonic()
        if self._recorder.attempt is None:  # nothing is recorded now: there may be later
            self._next = begin + _LEAST_SECONDS
            return
        if not self._drawing.acquire(timeout=patience):
            return  # a step, or the thread, is at it
        try:
            text = where(self._recorder)
            self._output = self._output or Output()
            self._output.show(lines_html(text, boxed=True), text)
        except Exception as error:  # noqa: BLE001 - a card that cannot be drawn must not end the training
            trouble("the live card", error)
            self._next = float("inf")
            return
        finally:
            self._drawing.release()
        end = time.monotonic()
        self._next = end + max(_LEAST_SECONDS, (end - begin) / _SHARE)


def where(recorder: Recorder, *, is_asked: bool = False) -> str:
    """Where this kernel's training is, in lines; `is_asked`: by a cell, which is then what runs, and no step does."""
    assert recorder.attempt is not None
    now = state(recorder.attempt)
    if is_asked and not recorder.is_training and now["status"] == RUNNING:
        now = {**now, "status": "idle"}
    return "\n".join(lines(now))
