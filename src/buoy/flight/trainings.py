"""The trainings within one recording: a notebook's kernel, or a script, may train several runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

_LOOP = object()
"""What trained last, where that was a loop without a run."""


class Training(NamedTuple):
    """What the recording says of one run's training."""

    opened: bool = False
    """Whether this run was made within the recording at all."""
    step: int | None = None
    """The last step that is known of it, None before the first; of one that still trains the beacon knows more."""
    began: bool = False
    length: int | None = None
    """The step that it will end at, once its epochs have shown it."""
    is_last: bool = False
    """Whether nothing has trained after it: the recording's own step is its step."""
    is_newest: bool = False
    """Whether no other run was made, or trained, after it was made or trained."""
    finished: bool = False
    ended: dict[str, Any] | None = None
    """The event that ended its part: its own end, an exception that ended its cell, or another run or loop that began
    to train; None once it trains again."""
    counted: int | None = None
    """The recorder's count when it was made; None once a training was announced before another step."""
    in_turns: bool = False
    """Whether it was announced in the middle of another run's loop, or another in the middle of its own."""
    is_followed_by_a_loop: bool = False
    """Whether a loop without a run has trained after the last training: the recording's own step is that loop's."""

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that ended the cell that it trained in, if that is what ended its part."""
        return self.ended if self.ended is not None and self.ended.get("kind") == "cell-error" else None

    @property
    def unsaved(self) -> str | None:
        """Why its end could not be saved, if it came to its end and that is so."""
        why = (self.ended or {}).get("unsaved")
        return why if isinstance(why, str) and why and not self.finished else None

    @property
    def had_no_room(self) -> bool:
        """Whether that was for lack of disk space."""
        return self.unsaved is not None and (self.ended or {}).get("no_room") is True

    @property
    def is_beside(self) -> bool:
        """Whether the recording's own step is another run's."""
        return (self.opened or self.began) and not self.is_last

    def may_have_stepped(self, count: int | None) -> bool:
        """Whether a loop that announced nothing may have trained it; `count` is where the recorder's stands now."""
        return not self.began and self.counted is not None and (count or 0) > self.counted


def training_of(events: Iterable[dict[str, Any]], recording: str, run: str) -> Training:
    """What the recording in the run folder `recording` says of the run in the folder `run`."""
    name = os.path.relpath(os.path.abspath(run), os.path.abspath(recording))
    found = Training()
    last: object = None
    newest: object = None
    for event in events:
        kind, is_mine = event.get("kind"), event.get("run") == name
        if kind in ("opened", "training"):
            newest = event.get("run")
        if kind in ("training", "loop"):
            left, in_turns = _count(event.get("left")), found.in_turns or event.get("together") is True
            if kind == "training" and is_mine:
                step = _count(event.get("step")) or found.step
                found = Training(True, step, True, found.length, in_turns=in_turns)
            elif found.began and found.ended is None and last == name:
                found = found._replace(ended=event, step=left or found.step, in_turns=in_turns)
            elif kind == "training" and (left or 0) <= (found.counted or 0):
                found = found._replace(counted=None)
            last = event.get("run") if kind == "training" else _LOOP
        elif kind == "cell-error":
            if found.began and _ended_its_cell(event, name, last, found):
                # Where it was not the last to train, the recorder's count is another run's.
                step = _count(event.get("step")) or found.step if last == name else found.step
                found = found._replace(ended=event, step=step)
        elif not is_mine and kind != "save":
            continue
        elif kind == "opened":
            found = found._replace(opened=True, counted=_count(event.get("counted")) or 0, length=None)
        elif kind == "length":
            found = found._replace(length=_count(event.get("step")))
        elif kind == "trained":
            finished = event.get("finished") is True
            if found.error is None or finished:
                found = found._replace(step=_count(event.get("step")), finished=finished, ended=event)
        elif kind == "save" and event.get("what") == "buoy" and last == name and not found.ended:
            found = found._replace(step=_count(event.get("step")))
    return found._replace(
        is_last=last == name, is_newest=newest == name, is_followed_by_a_loop=found.began and last is _LOOP
    )


def _ended_its_cell(error: dict[str, Any], name: str, last: object, found: Training) -> bool:
    """Whether this exception ended the cell that the run trained in."""
    given_up = found.ended is not None and found.ended.get("kind") == "trained" and not found.unsaved
    runs = error.get("runs")
    if isinstance(runs, list):
        # Leaving `with run:` gives the training up before the cell is at its end; another run's turn ends nothing.
        was_taken_over = found.in_turns and (found.ended or {}).get("kind") == "training"
        still = found.ended is None or was_taken_over or (given_up and not found.finished)
        return name in runs and still
    return last == name and found.ended is None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
