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
    is_last: bool = False
    """Whether it is the one that trained last: the recording's own step is its."""
    is_newest: bool = False
    """Whether no other run was made, or trained, after it was made or trained."""
    finished: bool = False
    ended: dict[str, Any] | None = None
    """The event that ended its part: its own end, or the beginning of another run or of a loop without one."""
    broken: int | None = None
    """The step at which an exception ended the cell that it trained in; None once it trains again."""
    counted: int | None = None
    """Where the recorder's count stood when it was made; None once a training was announced after that."""
    stepped_unseen: bool = False
    """Whether steps were counted then, before any training was announced: they may be its own."""
    is_followed_by_a_loop: bool = False
    """Whether a loop without a run has trained after the last training: the recording's own step is that loop's."""

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
    for event in events:
        kind, of = event.get("kind"), event.get("run")
        newest = of if kind in ("opened", "training") else newest
        if kind == "opened" and of == name:
            found = found._replace(opened=True, counted=_count(event.get("counted")) or 0)
        elif kind == "training" and of == name:
            last, is_alone = name, False
            found = Training(True, _count(event.get("step")) or found.step, True)
        elif kind == "training":
            if last == name and found.ended is None and event.get("together") is not True:
                found = found._replace(ended=event, step=_count(event.get("left")) or found.step)
            if found.counted is not None:
                unseen = found.stepped_unseen or (_count(event.get("left")) or 0) > found.counted
                found = found._replace(counted=None, stepped_unseen=unseen)
            last, is_alone = of, False
        elif kind == "loop":
            if last == name and found.ended is None:
                found = found._replace(ended=event, step=_count(event.get("left")) or found.step)
            found = found._replace(stepped_unseen=found.stepped_unseen or found.counted is not None)
            last, is_alone = None, True
        elif kind == "trained" and of == name:
            finished = event.get("finished") is True
            found = found._replace(step=_count(event.get("step")), finished=finished, ended=event)
        elif kind == "cell-error" and last == name and found.ended is None:
            found = found._replace(broken=_count(event.get("step")))
        elif kind == "save" and event.get("what") == "buoy" and last == name and not found.ended:
            found = found._replace(step=_count(event.get("step")))
    return found._replace(
        is_last=last == name, is_newest=newest == name, is_followed_by_a_loop=found.began and is_alone
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
