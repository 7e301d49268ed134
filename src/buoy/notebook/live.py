"""A card below the training cell, drawn by the training's own steps: no thread, no widget, no comm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from buoy.flight.recorder import Recorder
from buoy.notebook.display import Output
from buoy.view.lines_html import lines_html
from buoy.view.liveness import RUNNING
from buoy.view.now import lines, state

_LEAST_SECONDS = 2.0
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
        self._step: Callable[[int | None], None] = recorder.beacon.step
        recorder.beacon.step = self._stepped  # type: ignore[method-assign]
        shell.events.register("pre_run_cell", self._begins)
        shell.events.register("post_run_cell", self._ends)

    def stop(self) -> None:
        """Draw no more."""
        self._recorder.beacon.step = self._step  # type: ignore[method-assign,assignment]
        self._shell.events.unregister("pre_run_cell", self._begins)
        self._shell.events.unregister("post_run_cell", self._ends)

    def _stepped(self, number: int | None = None) -> None:
        self._step(number)
        if time.monotonic() >= self._next:
            self._draw()

    def _begins(self, info: Any = None) -> None:
        self._output = None
        self._next = time.monotonic() + _LEAST_SECONDS

    def _ends(self, result: Any = None) -> None:
        if self._output is not None:
            self._draw()
            self._output = None

    def _draw(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, such as the one that traces a plan, has no page to draw on
        begin = time.monotonic()
        if self._recorder.attempt is None:  # nothing is recorded now: there may be later
            self._next = begin + _LEAST_SECONDS
            return
        try:
            text = where(self._recorder)
            self._output = self._output or Output()
            self._output.show(lines_html(text, boxed=True), text)
        except Exception:  # noqa: BLE001 - a card that cannot be drawn must not end the training
            self._next = float("inf")
            return
        end = time.monotonic()
        self._next = end + max(_LEAST_SECONDS, (end - begin) / _SHARE)


def where(recorder: Recorder, *, is_asked: bool = False) -> str:
    """Where this kernel's training is, in lines; `is_asked`: by a cell, which is then what runs, and no step does."""
    assert recorder.attempt is not None
    now = state(recorder.attempt)
    if is_asked and not recorder.is_training and now["status"] == RUNNING:
        now = {**now, "status": "idle"}
    return "\n".join(lines(now))
