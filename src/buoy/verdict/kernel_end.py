"""The end of a notebook's kernel in which no run was being trained: what had become of each, and what is to be done."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from buoy.flight.attempt import is_kernel
from buoy.flight.trainings import Training, training_of
from buoy.verdict.going_on import LEFT, NOT_BEGUN, UNSAVED, WANTS_MEMORY, go_on, what_to_do
from buoy.verdict.model import Claim, Verdict
from buoy.verdict.own_story import IDLE, before, fate, grade_of, what_became
from buoy.verdict.saved import is_in_a_loop_of_its_own
from buoy.verdict.values import printable

if TYPE_CHECKING:
    from buoy.verdict.evidence import Evidence

_MOST = 3
TOO_MUCH = "what was asked for was too much: free what is held first, or take less"


def trained_nothing(evidence: Evidence) -> bool:
    """Whether no step was counted and no training announced in this notebook's kernel."""
    stepped = evidence.main is None or bool(evidence.main.step) or bool(evidence.last_sample.get("step"))
    return (
        is_kernel(evidence.attempt.get("command"))
        and not stepped
        and not any(event.get("kind") in ("training", "loop") for event in evidence.events)
    )


def was_between_cells(evidence: Evidence) -> bool:
    """Whether it was a notebook's kernel that ran no cell when it ended."""
    idle = evidence.main is not None and evidence.main.phase == IDLE
    return idle and is_kernel(evidence.attempt.get("command"))


def stories(evidence: Evidence, recording: str) -> list[tuple[str, str, Training]]:
    """The runs that had trained in this process and had ended before it did, the latest first: folder and story."""
    names = [event.get("run") for event in evidence.events if event.get("kind") == "training"]
    in_kernel = is_kernel(evidence.attempt.get("command"))
    idle = evidence.main is not None and evidence.main.phase == IDLE
    found = []
    for name in dict.fromkeys(str(name) for name in reversed(names)):
        folder = os.path.normpath(os.path.join(recording, name))
        own = training_of(evidence.events, recording, folder)
        story = what_became(own, True, in_kernel, idle, evidence.is_dead)
        if story is not None and story != NOT_BEGUN:
            found.append((folder, story, own))
    return found


def with_its_runs(verdict: Verdict, evidence: Evidence) -> Verdict:
    """The verdict on a kernel that was at none of its runs: it names what had become of each, and advises of those."""
    told = stories(evidence, verdict.run)
    if not told:
        return verdict
    claims = [
        Claim(
            f"{printable(os.path.basename(folder), 40)} {fate(story, own)}{before(own, evidence)}",
            grade_of(story, own),
        )
        for folder, story, own in told[:_MOST]
    ]
    where, steps = verdict.where, list(verdict.cause.next)
    if not is_in_a_loop_of_its_own(evidence) or was_between_cells(evidence):
        where = replace(where, step=None, epoch=None)
        steps = _advice(verdict, evidence, told)
    cause = replace(verdict.cause, cascade=(*claims, *verdict.cause.cascade), next=tuple(steps))
    return replace(verdict, cause=cause, where=where)


def _advice(verdict: Verdict, evidence: Evidence, told: list[tuple[str, str, Training]]) -> list[str]:
    """How to go on with the run that was left last; what lowers a training's memory is no help outside of one."""
    steps = [step for step in verdict.cause.next if step != go_on(evidence)]
    if verdict.cause.id in WANTS_MEMORY:
        steps = [TOO_MUCH]
    for folder, story, own in told:
        if story in (LEFT, UNSAVED):
            name = printable(os.path.basename(folder), 40)
            return [f"{name}: {what_to_do(story, folder, True, own)}", *steps]
    return ["nothing of its trainings was lost: they were finished", *steps]
