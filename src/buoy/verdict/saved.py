"""What a training can go on from: the last save, as the recording saw it and as it lies in the run's own folder."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from buoy.flight.trainings import Training
from buoy.text import printable
from buoy.verdict.values import count, integer, number, text

if TYPE_CHECKING:
    from buoy.checkpoint.store import Entry
    from buoy.verdict.evidence import Evidence

_STEP_IN_NAME = re.compile(r"(?:^|[^a-z])step[-_=]?(\d{1,12})(?!\d)|^checkpoint-(\d{1,12})$", re.IGNORECASE)
"""`step-000001200` (ours), `epoch=3-step=1200.ckpt` (Lightning), `checkpoint-1200` (transformers)."""


class Saved(NamedTuple):
    """Something that was saved."""

    path: str
    age: float | None
    """Seconds before the end; None where the clocks do not tell."""
    step: int | None
    """The step that is in it; None where neither the event nor the name knows it."""


def step_in_name(path: str) -> int | None:
    """The step that a checkpoint's name gives.

    >>> step_in_name("runs/cats/checkpoints/step-000001200"), step_in_name("epoch=3-step=70.ckpt")
    (1200, 70)
    >>> step_in_name("best.pt") is None
    True
    """
    found = _STEP_IN_NAME.search(os.path.basename(path.rstrip(os.sep)))
    return int(found[1] or found[2]) if found else None


def newest_checkpoint(run_folder: str) -> Entry | None:
    """The newest whole checkpoint in a run's own folder."""
    from buoy.checkpoint.store import Store

    return next((entry for entry in Store(run_folder).list() if entry.complete), None)


def step_at_opening(evidence: Evidence, run_folder: str) -> int | None:
    """The step of the checkpoint that this run found when it was made in this process; None where it found none."""
    recording = os.path.dirname(os.path.dirname(evidence.folder))
    name = os.path.relpath(os.path.abspath(run_folder), recording)
    made = [event for event in evidence.events_of("opened") if event.get("run") == name]
    newest = text(made[-1].get("newest")) if made else None
    return step_in_name(newest) if newest else None


def last_save(evidence: Evidence) -> Saved | None:
    """The last thing that the recording saw saved, by the run that trained last."""
    saves = [event for event in evidence.events_of("save") if text(event.get("path"))]
    opened = evidence.events_of("opened")
    trained = evidence.events_of("training")
    # A notebook trains one run after the other: what another one saved is of no use to the last that trained.
    if is_in_a_loop_of_its_own(evidence):
        began = _loop_began(evidence)
        is_its_own = [e.get("what") != "buoy" and (number(e.get("t")) or 0.0) >= began for e in saves]
        saves, opened = [save for save, is_its in zip(saves, is_its_own, strict=True) if is_its], []
    elif trained:
        of = trained[-1].get("run")
        saves = [event for event in saves if event.get("what") != "buoy" or _is_saved_by(evidence, event, of)]
        opened = [event for event in opened if event.get("run") == of]
    elif opened:
        begun = number(opened[-1].get("t")) or 0.0
        saves = [event for event in saves if (number(event.get("t")) or 0.0) >= begun]
    if not saves:
        newest = text(opened[-1].get("newest")) if opened else None
        return Saved(printable(newest, 80), None, step_in_name(newest)) if newest else None
    last = saves[-1]
    path, t, end = str(last["path"]), number(last.get("t")), evidence.last_t
    step = count(last.get("step")) or step_in_name(path)
    folder = os.path.dirname(path)
    if last.get("what") == "buoy":  # a folder each, however soon one follows the other
        saves = [last]
    together = [
        event for event in saves
        if os.path.dirname(str(event["path"])) == folder and abs((number(event.get("t")) or 0.0) - (t or 0.0)) < 5.0
    ]  # fmt: skip
    if folder and len({event["path"] for event in together}) > 1:  # a checkpoint of several files
        path, step = folder, step or step_in_name(folder)
    age = max(0.0, end - t) if t is not None and end is not None else None
    return Saved(printable(path, 80), age, step)


def saved_of(run_folder: str, evidence: Evidence, own: Training) -> Saved | None:
    """What this run can go on from: what lies in its folder counts more than what the recording saw."""
    kept = newest_checkpoint(run_folder)
    if kept is not None:
        end = evidence.last_wall
        age = end - kept.time if end is not None and kept.time is not None else None
        # One that is newer than the end was made by a later attempt: all the better, but not before this end.
        return Saved(
            printable(from_here(kept.folder), 80), age if age is not None and age >= 0 else None, kept.step
        )
    if not own.is_last and own.is_newest:
        return None  # what the recording saw was saved by another run
    seen = last_save(evidence)
    if seen is not None and os.path.abspath(seen.path).startswith(os.path.abspath(run_folder) + os.sep):
        return None  # it was here, and is no more
    return seen


def from_here(folder: str) -> str:
    """A folder as it can be typed here."""
    path = os.path.relpath(folder)
    return folder if path.startswith("..") else path


def is_in_a_loop_of_its_own(evidence: Evidence) -> bool:
    """Whether a loop that no run of ours saves trained last: it was told of, or steps came after a run was finished."""
    return steps_of_its_own(evidence) is not None


def steps_of_its_own(evidence: Evidence) -> int | None:
    """How many steps the loop did that no run of ours saves, where such a one trained last; else None."""
    last = _last_told(evidence)
    step = evidence.main.step if evidence.main is not None else None
    if last.get("kind") == "loop":
        return step or 1  # one is what announced it
    is_over = last.get("kind") == "trained" and last.get("finished") is True
    done = integer(last.get("step"))
    if not is_over or step is None or step == done:
        return None
    return step - done if done is not None and step > done else step


def _last_told(evidence: Evidence) -> dict[str, object]:
    kinds = ("opened", "training", "trained", "loop")
    return next((event for event in reversed(evidence.events) if event.get("kind") in kinds), {})


def _loop_began(evidence: Evidence) -> float:
    return number(_last_told(evidence).get("t")) or 0.0


def _is_saved_by(evidence: Evidence, save: dict[str, object], run: object) -> bool:
    """Whether a checkpoint lies in the folder of this run, given as seen from the recording's."""
    recording = os.path.dirname(os.path.dirname(evidence.folder))
    name = os.path.basename(os.path.normpath(os.path.join(recording, str(run))))
    return os.path.basename(os.path.dirname(os.path.dirname(str(save.get("path"))))) == name
