"""A run's own end within a recording that holds more: a kernel's death is no death of what was finished before."""

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
    finished_since,
    what_to_do,
    with_its_checkpoints,
)
from buoy.verdict.model import Cause, Claim, Grade, Reading, Verdict, Where
from buoy.verdict.now import is_asked_by_itself, waits_for_us
from buoy.verdict.saved import from_here, step_at_opening
from buoy.verdict.values import number

if TYPE_CHECKING:
    from buoy.verdict.evidence import Evidence

IDLE = "done"
"""The phase of a notebook's kernel between two cells, and of a script that is about to end."""
STORIES = {
    FINISHED: "finished",
    UNSAVED: "end not saved",
    NOT_BEGUN: "no step done",
    LEFT: "left unfinished",
}
"""The same for people, in a list."""


def of_run(verdict: Verdict, evidence: Evidence, run_folder: str, whole: bool = False) -> Verdict:
    """The verdict on the recording as it concerns this run; the same where the run and the recording are one.

    `whole`: its process's end is told, whatever became of this run's training before that.
    """
    recording = verdict.run
    own = training_of(evidence.events, recording, run_folder)
    is_other = os.path.realpath(run_folder) != os.path.realpath(recording)
    main = evidence.main
    was_idle = main is not None and main.phase == IDLE
    if not own.began and own.may_have_stepped(main.step if main else None):
        own = Training()  # it trained in a loop that told us nothing: the process's end is all there is
    in_kernel = is_kernel(evidence.attempt.get("command"))
    story = what_became(own, is_other, in_kernel, was_idle, evidence.is_dead)
    is_asking = waits_for_us(evidence.pid) or (own.is_last and is_asked_by_itself(evidence.pid))
    waits = in_kernel and verdict.cause.id == "still-running" and (was_idle or is_asking)
    if story is None and waits:
        return _in_an_idle_kernel(verdict, evidence, own, run_folder)
    if story is None or whole:
        named = replace(verdict, run=run_folder) if is_other else verdict
        if own.is_beside:
            step = None if own.is_followed_by_a_loop else own.step
            named = replace(named, where=replace(named.where, step=step, epoch=None))
        return _with_progress(with_its_checkpoints(named, evidence, own), evidence, own)
    words = _words(story, own, evidence, waits)
    found = step_at_opening(evidence, run_folder)
    if story == NOT_BEGUN and found:
        words = f"This run was made again at step {found}, and no further step of it was done"
    hint = what_to_do(story, run_folder, in_kernel, own, not evidence.is_dead)
    if story in (LEFT, UNSAVED):
        hint = finished_since(evidence, run_folder) or hint
    reading = _reading(story, own)
    return replace(
        verdict,
        run=run_folder,
        mechanism=Claim(_mechanism(evidence), "certain"),
        cause=Cause(story, Claim(words, grade_of(story, own), (reading,) if reading else ()), next=(hint,)),
        where=Where(step=own.step),
        holders=(),
        wall=number(own.ended.get("wall")) if own.ended else None,
        ran_for=None,
        beside=_later(verdict, evidence, recording),
    )


def _in_an_idle_kernel(verdict: Verdict, evidence: Evidence, own: Training, run_folder: str) -> Verdict:
    """No cell runs, so no training does: where this one was left, and by what if that was recorded."""
    lives = Reading(
        "the kernel's process exists and runs no cell", f"/proc/{evidence.pid}/stat", evidence.now.wall
    )
    counted = evidence.main.step if evidence.main is not None else None
    step = own.step if own.ended is not None or not own.is_last else counted
    if not own.began or not step:
        claim = Claim("The kernel lives and is idle", "certain", (lives,))
        cause = Cause("still-running", claim, next=("nothing: run the next cell",))
        return replace(verdict, run=run_folder, cause=cause)
    words = f"The kernel lives and is idle; this training was left at step {step}, unfinished"
    hint = what_to_do(LEFT, run_folder, True)
    return replace(
        verdict,
        run=run_folder,
        cause=Cause(LEFT, Claim(words, "likely", (lives,)), next=(hint,)),
        where=Where(step=step, epoch=verdict.where.epoch),
    )


def what_became(
    own: Training, is_other: bool, in_kernel: bool, was_idle: bool, is_over: bool = False
) -> str | None:
    """The end of a run that was not its process's end; None when the two are one story.

    A run without a step may have died in its first, or while its data was loaded: only between two cells (`was_idle`),
    or when another run came after it, is it known to have had no part in the end. A kernel that ended (`is_over`)
    between two cells ended no training.
    """
    if not own.began:
        had_no_part = (in_kernel and was_idle) or not own.is_newest
        return NOT_BEGUN if own.opened and had_no_part else None
    if own.unsaved is not None or own.finished:
        is_apart = is_other or in_kernel or not own.is_last
        return (FINISHED if own.finished else UNSAVED) if is_apart else None
    if own.ended is not None and (own.error is not None or not own.is_last):
        return LEFT
    return LEFT if in_kernel and was_idle and is_over else None


def _words(story: str, own: Training, evidence: Evidence, waits: bool) -> str:
    if story == NOT_BEGUN:
        return "This run was made, and no step of it was done"
    it = "The kernel lives and is idle; this training" if waits and story == LEFT else "This training"
    return f"{it} {fate(story, own)}{before(own, evidence)}"


def fate(story: str, own: Training) -> str:
    """What became of a training, after its name."""
    at = f" at step {own.step}" if own.step else ""
    if story == FINISHED:
        return f"was finished{at}"
    if story == UNSAVED:
        return f"came to its end{at}, and that could not be saved" + (
            ": the disk is full" if own.had_no_room else ""
        )
    if own.error is not None:
        return f"was left by {error_name(own.error)}{at}, unfinished"
    if own.ended is None or own.ended.get("kind") == "trained":
        return f"was left{at}, unfinished: no cell ran when its process ended"
    if own.partner is not None:
        name = printable(os.path.basename(own.partner), 40)
        return f"was left{at}, unfinished; {name}, trained in turns with it, trained last"
    other = "a loop without a run" if own.is_followed_by_a_loop else "another one"
    return f"was left{at}, unfinished, when {other} began"


def error_name(error: dict[str, object]) -> str:
    """The exception's type, as Python shows it."""
    return printable(str(error.get("type")).removeprefix("builtins."), 60)


def before(own: Training, evidence: Evidence) -> str:
    """How long before the end of its process, where there was one."""
    t = number(own.ended.get("t")) if own.ended else None
    end = evidence.died_t
    if t is None or end is None or end < t:
        return ""
    return f", {format_duration(end - t)} before its process ended"


def grade_of(story: str, own: Training) -> Grade:
    """What was announced is certain; that nothing was is only likely to mean that there was nothing.

    An exception ended its cell for certain, but a loop of the person's own may have come to its end before that.
    """
    if story == NOT_BEGUN or own.ended is None or own.error is not None or own.partner is not None:
        return "likely"
    return "likely" if story == LEFT and own.ended.get("kind") == "trained" else "certain"


def _mechanism(evidence: Evidence) -> str:
    return "none of its own" if evidence.is_dead else "none: its process is alive"


def _reading(story: str, own: Training) -> Reading | None:
    if story == NOT_BEGUN:
        return Reading("the recording knows of no step of it", "events.jsonl")
    if own.ended is None:
        return Reading("the kernel was between two cells", "beacon")
    what = f"{own.ended.get('run')} {'was the last of both' if own.partner is not None else 'began'} to train"
    if own.error is not None:
        what = f"{error_name(own.error)}: {own.error.get('message')}".rstrip(": ")
    elif own.unsaved is not None:
        what = own.unsaved
    elif own.ended.get("kind") == "trained":
        what = "its last step was done" if story == FINISHED else "it was given up"
    elif own.ended.get("kind") == "loop":
        what = "a step was counted that no run had announced"
    return Reading(printable(what, 160), "events.jsonl", number(own.ended.get("wall")))


def _later(verdict: Verdict, evidence: Evidence, recording: str) -> str | None:
    """What became of the process afterwards, where that did not end well."""
    if not evidence.is_dead or verdict.cause.id == "clean-exit":
        return None
    ask = f"`buoy why {shlex.quote(from_here(recording))} --attempt {verdict.attempt}`"
    return f"the process it was in ended: {verdict.cause.id}; {ask} tells of that"


def _with_progress(verdict: Verdict, evidence: Evidence, own: Training) -> Verdict:
    """A script that fails after its training is done has lost no training; nor has one that did no step."""
    if verdict.cause.id == "still-running" or (verdict.cause.id == "clean-exit" and own.unsaved is None):
        return verdict
    if own.finished:
        claim = Claim(f"its training had been finished at step {own.step}{before(own, evidence)}", "certain")
    elif own.unsaved is not None:
        claim = Claim(f"its training {fate(UNSAVED, own)}", "certain")
    elif own.is_followed_by_a_loop:
        at = f" at step {own.step}" if own.step else ""
        claim = Claim(f"its training had stopped{at}; a loop without a run trained since", "certain")
    elif own.opened and not own.began:
        step = step_at_opening(evidence, verdict.run)
        after = f"no further step of this run had been done after step {step}"
        claim = Claim(after if step else "no step of this run had been done", "likely")
    else:
        return verdict
    return replace(verdict, cause=replace(verdict.cause, cascade=(claim, *verdict.cause.cascade)))
