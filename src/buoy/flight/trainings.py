"""The trainings within one recording: a notebook's kernel may train several runs, one after the other or in turns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple


class Training(NamedTuple):
    """What the recording says of one run's training."""

    opened: bool = False
    """Whether this run was made within the recording at all."""
    step: int | None = None
    """The last step that is known of it, None before the first; of one that goes on the beacon knows more."""
    began: bool = False
    length: int | None = None
    """The step that it will end at, as far as its epochs told."""
    is_last: bool = False
    """Whether it is the one that trained last: the recording's own step is its."""
    is_newest: bool = False
    """Whether no other run was made, or trained, after it was made or trained."""
    finished: bool = False
    ended: dict[str, Any] | None = None
    """The event that ended its part: its own end, an exception that left its cell, or the beginning of another run or
    of a loop without one; None once it trains again."""
    counted: int | None = None
    """Where the recorder's count stood when it was made; None once a training was announced after that."""
    stepped_unseen: bool = False
    """Whether steps were counted then, before any training was announced: they may be its own."""
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
    def partner(self) -> str | None:
        """The run that was trained in turns with it, and trained last, if that is what is known of its end."""
        return str((self.ended or {}).get("run")) if (self.ended or {}).get("in_turns") is True else None

    @property
    def had_no_room(self) -> bool:
        """Whether that was for want of room on the disk."""
        return self.unsaved is not None and (self.ended or {}).get("no_room") is True

    @property
    def is_beside(self) -> bool:
        """Whether the recording's own step is another run's."""
        return (self.opened or self.began) and not self.is_last

    def may_have_stepped(self, count: int | None) -> bool:
        """Whether a loop that announced nothing may have trained it; `count` is where the recorder's stands now."""
        return self.stepped_unseen or (self.counted is not None and (count or 0) > self.counted)


def training_of(events: Iterable[dict[str, Any]], recording: str, run: str) -> Training:
    """What became of the run in the folder `run` within the recording of the run folder `recording`."""
    name = os.path.relpath(os.path.abspath(run), os.path.abspath(recording))
    found = Training()
    last = newest = None
    is_alone = False
    in_turns: set[object] = set()
    for event in events:
        kind, of = event.get("kind"), event.get("run")
        newest = of if kind in ("opened", "training") else newest
        is_under_way = found.began and found.ended is None and (last == name or last in in_turns)
        if kind == "opened" and of == name:
            found = found._replace(opened=True, counted=_count(event.get("counted")) or 0, length=None)
        elif kind == "training" and of == name:
            if event.get("together") is True:
                in_turns.add(last)
            elif last not in in_turns:
                in_turns = set()
            last, is_alone = name, False
            found = Training(True, _count(event.get("step")) or found.step, True, found.length)
        elif kind == "training":
            left = _count(event.get("left"))
            if last == name and found.ended is None:
                found = found._replace(step=left or found.step)
            if is_under_way and event.get("together") is True:
                in_turns.add(of)
            elif is_under_way:
                found = found._replace(ended={**event, "in_turns": of in in_turns})
            if found.counted is not None:
                unseen = found.stepped_unseen or (left or 0) > found.counted
                found = found._replace(counted=None, stepped_unseen=unseen)
            last, is_alone = of, False
        elif kind == "loop":
            if is_under_way:
                at = _count(event.get("left")) if last == name else None
                found = found._replace(ended=event, step=at or found.step)
            found = found._replace(stepped_unseen=found.stepped_unseen or found.counted is not None)
            last, is_alone = None, True
        elif kind == "length" and of == name:
            found = found._replace(length=_count(event.get("step")))
        elif kind == "trained" and of == name:
            if found.error is None or event.get("finished") is True:
                finished = event.get("finished") is True
                found = found._replace(step=_count(event.get("step")), finished=finished, ended=event)
        elif kind == "cell-error" and found.began and _left(event, name, last, found):
            # Of two that were trained in turns, the count is that of the one announced last.
            at = _count(event.get("step")) or found.step if last == name else None
            found = found._replace(ended=event, step=at)
        elif kind == "save" and event.get("what") == "buoy" and last == name and not found.ended:
            found = found._replace(step=_count(event.get("step")))
    return found._replace(
        is_last=last == name, is_newest=newest == name, is_followed_by_a_loop=found.began and is_alone
    )


def _left(error: dict[str, Any], name: str, last: object, found: Training) -> bool:
    """Whether this exception ended the cell that the run trained in, before anything else had ended its part."""
    ended = found.ended or {}
    given_up = ended.get("kind") == "trained" and not found.finished and found.unsaved is None
    if found.ended is not None and not given_up:
        return False
    runs = error.get("runs")
    return name in runs if isinstance(runs, list) else last == name and not given_up


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
