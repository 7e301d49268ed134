"""The end of a notebook's kernel in which no run was being trained: what had become of each, and what is to be done."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from buoy.flight.attempt import is_kernel
from buoy.flight.trainings import Training, training_of
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.going_on import (
    FINISHED,
    LEFT,
    NOT_BEGUN,
    UNSAVED,
    WANTS_MEMORY,
    finished_since,
    go_on,
    go_on_from,
    what_to_do,
)
from buoy.verdict.model import Cause, Claim, Verdict
from buoy.verdict.own_story import IDLE, before, fate, grade_of, what_became
from buoy.verdict.saved import from_here, last_save, saved_of, steps_of_its_own

if TYPE_CHECKING:
    from buoy.verdict.evidence import Evidence

_MOST = 3
TOO_MUCH = "what was asked for was too much: free what is held first, or take less"


def fitting(cause: Cause, evidence: Evidence) -> Cause:
    """The cause without advice on how a training goes on, where a kernel had trained nothing."""
    if not _trained_nothing(evidence):
        return cause
    return replace(cause, next=tuple(step for step in cause.next if step != go_on(evidence)))


def _trained_nothing(evidence: Evidence) -> bool:
    """Whether no step was counted and no training announced in this notebook's kernel."""
    stepped = evidence.main is None or bool(evidence.main.step) or bool(evidence.last_sample.get("step"))
    return (
        is_kernel(evidence.attempt.get("command"))
        and not stepped
        and not any(event.get("kind") in ("training", "loop") for event in evidence.events)
    )


def in_a_line(verdict: Verdict, evidence: Evidence) -> str | None:
    """The end of a kernel that was told to stop between two cells, as a restart does; None where more is to be said."""
    if verdict.cause.id != "terminated" or not was_between_cells(evidence):
        return None
    recording = os.path.dirname(os.path.dirname(evidence.folder))
    left = [each for each in stories(evidence, recording) if each[1] in (LEFT, UNSAVED)]
    words = "the kernel before this one was told to stop (SIGTERM) between two cells, as a restart does"
    for folder, story, own in left[:1]:
        name = printable(os.path.basename(folder), 40)
        words += f"; before that {name} {fate(story, own)}: `buoy why {shlex.quote(from_here(folder))}`"
    alone = _loop_without_a_run(evidence)
    if alone is not None:
        words += f"; {alone.text}"
    return words


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
    recording = os.path.dirname(os.path.dirname(evidence.folder))
    told = stories(evidence, recording)
    mine = next((each for each in told if os.path.realpath(each[0]) == os.path.realpath(verdict.run)), None)
    is_a_run = training_of(evidence.events, recording, verdict.run).began
    is_told = mine is not None and mine[1] in (FINISHED, UNSAVED)
    others = [each for each in told if each is not mine] if is_told else told
    if not others or (is_a_run and mine is None):
        return verdict  # there is none, or it was at one of them
    claims = [
        Claim(
            f"{printable(os.path.basename(folder), 40)} {fate(story, own)}"
            + before(own, evidence).removesuffix(" its process ended"),
            grade_of(story, own),
        )
        for folder, story, own in others[:_MOST]
    ]
    if is_told:  # the one that trained last came to its end: that comes first
        return replace(verdict, cause=replace(verdict.cause, cascade=(*verdict.cause.cascade, *claims)))
    where, steps = replace(verdict.where, epoch=None), list(verdict.cause.next)
    alone = _loop_without_a_run(evidence)
    if alone is None or was_between_cells(evidence):
        where = replace(where, step=None, phase=None)
        steps = _advice(verdict, evidence, told)
    if alone is not None:
        claims.insert(0, alone)
    cause = replace(verdict.cause, cascade=(*claims, *verdict.cause.cascade), next=tuple(steps))
    return replace(verdict, cause=cause, where=where)


def _advice(verdict: Verdict, evidence: Evidence, told: list[tuple[str, str, Training]]) -> list[str]:
    """How to go on with the run that was left last; what lowers a training's memory is no help outside of one."""
    # The same in other words, where the run's own folder was looked into.
    same: set[str | None] = {go_on(evidence)}
    for folder, _, own in told:
        same |= {finished_since(evidence, folder), go_on_from(evidence, saved_of(folder, evidence, own))}
    steps = [step for step in verdict.cause.next if step not in same]
    left = next((each for each in told if each[1] in (LEFT, UNSAVED)), None)
    names = [printable(os.path.basename(folder), 40) for folder, story, _ in told if story == FINISHED]
    whose = " and ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
    again = f"nothing of {whose} was lost: {'they were' if len(names) > 1 else 'it was'} finished"
    if left is not None:
        folder, story, own = left
        todo = finished_since(evidence, folder) or what_to_do(story, folder, True, own)
        again = f"{printable(os.path.basename(folder), 40)}: {todo}"
    if verdict.cause.id in WANTS_MEMORY:
        return [TOO_MUCH, *_advice_on_the_loop(verdict, evidence), again]
    return [*_advice_on_the_loop(verdict, evidence), again, *steps]


def _loop_without_a_run(evidence: Evidence) -> Claim | None:
    """What became of the loop that trained last, where no run of ours saved it."""
    steps = steps_of_its_own(evidence)
    if steps is None:
        return None
    told, saved = f"a loop without a run trained last, for {_in_words(steps)}", last_save(evidence)
    if saved is None:
        return Claim(f"{told}, and no checkpoint of that was seen", "certain")
    age = f" {format_duration(saved.age)} before the end" if saved.age is not None else ""
    return Claim(f"{told}; the last save that was seen{age}: {saved.path}", "certain")


def _advice_on_the_loop(verdict: Verdict, evidence: Evidence) -> list[str]:
    """How the loop goes on that trained last without a run; nothing after an orderly end, which a person wanted."""
    steps = steps_of_its_own(evidence)
    if steps is None or verdict.cause.id == "clean-exit":
        return []
    todo = go_on(evidence)
    if last_save(evidence) is not None:
        return [f"the loop without a run: {todo}"]
    lost = f"{_in_words(steps)} of the loop without a run had no checkpoint"
    return [f"{lost}: {todo}, or give it a run (`buoy.Run`, `buoy.keras.Loop`)"]


def _in_words(steps: int) -> str:
    return f"{steps} steps" if steps != 1 else "1 step"
