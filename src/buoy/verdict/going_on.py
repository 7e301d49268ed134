"""How a run goes on: from what lies in its own folder, which may be more, or less, than the recording saw."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from buoy.flight.trainings import Training
from buoy.verdict.model import Verdict
from buoy.verdict.values import printable

if TYPE_CHECKING:
    from buoy.checkpoint.store import Entry
    from buoy.verdict.evidence import Evidence

FINISHED, NOT_BEGUN, LEFT = "finished", "not-begun", "left"
_WANTS_MEMORY = ("kernel-oom", "gpu-oom", "memory-error", "thrashing")
"""Causes whose advice is about the size of a training."""


def newest_checkpoint(run_folder: str) -> Entry | None:
    """The newest whole checkpoint in a run's own folder."""
    from buoy.checkpoint.store import Store

    return next((entry for entry in Store(run_folder).list() if entry.complete), None)


def what_to_do(story: str, run_folder: str, in_kernel: bool) -> str:
    """What is to be done of a run whose part ended before its process did."""
    if story == NOT_BEGUN:
        return "train it: nothing of it was lost"
    kept = newest_checkpoint(run_folder)
    if story == FINISHED:
        return (
            "nothing: its last checkpoint holds the end" if kept else "nothing; no checkpoint of it is here"
        )
    again = "train it again in a cell" if in_kernel else "train it again"
    if kept is None:
        return f"{again}: no checkpoint of it is here, it begins anew"
    return f"{again}: it goes on from its last checkpoint, step {kept.step}"


def with_its_checkpoints(verdict: Verdict, evidence: Evidence, own: Training) -> Verdict:
    """The advice of a verdict in the light of the run's own checkpoints; the same where it has no part in this."""
    if not own.opened and not own.began:
        return verdict
    from buoy.verdict.causes.common import go_on, go_on_from

    told = go_on(evidence)
    if own.finished:
        done = what_to_do(FINISHED, verdict.run, False).replace(
            "nothing", "nothing of its training was lost", 1
        )
        steps = [step for step in verdict.cause.next if step != told]
        if verdict.cause.id in _WANTS_MEMORY:
            steps = [
                "what was asked for after the training was too much: free what it holds first, or take less"
            ]
        return replace(verdict, cause=replace(verdict.cause, next=(done, *steps)))
    better = go_on_from(evidence, _saved(verdict, evidence, own))
    steps = [better if step == told else step for step in verdict.cause.next]
    return replace(verdict, cause=replace(verdict.cause, next=tuple(steps)))


def from_here(folder: str) -> str:
    """A folder as it can be typed here."""
    path = os.path.relpath(folder)
    return folder if path.startswith("..") else path


def _saved(verdict: Verdict, evidence: Evidence, own: Training) -> tuple[str, float | None] | None:
    from buoy.verdict.causes.common import last_save

    kept = newest_checkpoint(verdict.run)
    if kept is not None:
        end = evidence.last_wall
        age = end - kept.time if end is not None and kept.time is not None else None
        # One that is newer than the end was made by a later attempt: all the better, but not before this end.
        return printable(from_here(kept.folder), 80), age if age is not None and age >= 0 else None
    if not own.is_last and own.is_newest:
        return None  # what the recording saw was saved by another run
    seen = last_save(evidence)
    if seen is not None and os.path.abspath(seen[0]).startswith(os.path.abspath(verdict.run) + os.sep):
        return None  # it was here, and is no more
    return seen
