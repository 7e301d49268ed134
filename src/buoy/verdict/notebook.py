"""Several runs in one process (a notebook's kernel): the run that was training is judged, the others are listed."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from buoy.fields import number
from buoy.flight.attempt import is_kernel
from buoy.flight.trainings import Training, training_of
from buoy.machine import procfs
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.advice import (
    FINISHED,
    LEFT,
    NOT_BEGUN,
    UNSAVED,
    WANTS_MEMORY,
    finished_since,
    from_here,
    how_to_resume,
    step_at_opening,
    what_to_do,
    with_its_checkpoints,
)
from buoy.verdict.model import Cause, Claim, Grade, Reading, Verdict, Where

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
"""The end of a run whose process had another end, for users."""
_MOST_LISTED = 3
TOO_MUCH = "free what is held first, or use less: what was asked for was too much"


def part_of(
    run: str,
    recording: str,
    events: Any,
    about: dict[str, Any],
    step: int | None,
    phase: str | None,
    is_over: bool,
) -> tuple[Training, str | None]:
    """What is known of this run's training in a process, and its end where that is not the end of the process.

    `about`: attempt.json; `step` and `phase`: where the process stands. A run without a step may have died in its
    first, or while its data was loaded: only between two cells, or when another run came after it, is it known to have
    had no part in the process's end. A kernel that ended (`is_over`) between two cells ended no training.
    """
    own = training_of(events, recording, run)
    if own.may_have_stepped(step):
        own = Training()  # then the end of the process is all that is known
    in_kernel = is_kernel(about.get("command"))
    was_idle = in_kernel and phase == IDLE
    is_apart = in_kernel or not own.is_last or os.path.realpath(run) != os.path.realpath(recording)
    story = None
    if not own.began:
        story = NOT_BEGUN if own.opened and (was_idle or not own.is_newest) else None
    elif own.finished or own.unsaved is not None:
        story = (FINISHED if own.finished else UNSAVED) if is_apart else None
    elif (was_idle and is_over) or (own.ended is not None and (own.error is not None or not own.is_last)):
        story = LEFT
    return own, story


def part_in(evidence: Evidence, run: str) -> tuple[Training, str | None]:
    """The same, of a recording that was read as evidence."""
    main = evidence.main
    step, phase = (main.step, main.phase) if main is not None else (None, None)
    return part_of(run, evidence.run_folder, evidence.events, evidence.attempt, step, phase, evidence.is_dead)


def of_run(verdict: Verdict, evidence: Evidence, run: str, whole: bool = False) -> Verdict:
    """The verdict on the process as it concerns this run.

    `whole`: the end of the process is reported, whatever became of this run before that.
    """
    own, story = part_in(evidence, run)
    lives_idle = _lives_idle(verdict, evidence, own)
    if story is None and lives_idle:
        step = evidence.main.step if evidence.main is not None and own.is_last else own.step
        if not own.began or not step:
            lives = _reading_of_idle(evidence)
            cause = Cause("still-running", Claim("The kernel is alive and idle", "certain", (lives,)),
                          next=("nothing: run the next cell",))  # fmt: skip
            return replace(verdict, run=run, cause=cause)
        own, story = own._replace(step=step), LEFT
    if story is None or whole:
        if own.is_beside:
            step = None if own.is_followed_by_a_loop else own.step
            verdict = replace(verdict, where=replace(verdict.where, step=step, epoch=None))
        is_other = os.path.realpath(run) != os.path.realpath(verdict.run)
        named = replace(verdict, run=run) if is_other else verdict
        return _with_progress(with_its_checkpoints(named, evidence, own), evidence, own)
    hint = finished_since(evidence, run) if story in (LEFT, UNSAVED) else None
    in_kernel = evidence.is_kernel
    reading = _reading_of_idle(evidence) if lives_idle and own.ended is None else _reading(story, own)
    claim = Claim(_sentence(story, own, evidence, run, lives_idle), _grade(story, own), (reading,))
    return replace(
        verdict,
        run=run,
        mechanism=Claim("none of its own" if evidence.is_dead else "none: its process is alive", "certain"),
        cause=Cause(
            story, claim, next=(hint or what_to_do(story, run, in_kernel, own, not evidence.is_dead),)
        ),
        where=Where(step=own.step),
        holders=(),
        wall=number(own.ended.get("wall")) if own.ended else None,
        ran_for=None,
        beside=_end_of_process(verdict, evidence),
    )


def _lives_idle(verdict: Verdict, evidence: Evidence, own: Training) -> bool:
    """Whether it is a kernel that lives and trains nothing now: no cell runs, or only the one that asks."""
    if verdict.cause.id != "still-running" or not evidence.is_kernel:
        return False
    is_asking = waits_for_us(evidence.pid) or (own.is_last and is_asked_by_itself(evidence.pid))
    return is_asking or (evidence.main is not None and evidence.main.phase == IDLE)


def waits_for_us(pid: int | None) -> bool:
    """Whether this process is asked from within that one: a notebook's `!buoy why` about its own kernel."""
    above = os.getppid()
    while pid and above > 1:
        if above == pid:
            return True
        stat = procfs.stat_of(above)
        above = stat.ppid if stat is not None else 0
    return False


def is_asked_by_itself(pid: int | None) -> bool:
    """Whether this very process is asked about while no loop of a run is under way in it: by a cell of its own."""
    there = sys.modules.get("buoy.flight.recorder")
    recorder = there.current() if there is not None and pid == os.getpid() else None
    return recorder is not None and not recorder.is_training


def _reading_of_idle(evidence: Evidence) -> Reading:
    words = "the kernel's process exists and runs no cell"
    return Reading(words, f"/proc/{evidence.pid}/stat", evidence.now.wall)


def _sentence(story: str, own: Training, evidence: Evidence, run: str, lives_idle: bool) -> str:
    if story == NOT_BEGUN:
        step = step_at_opening(evidence, run)
        return f"This run was opened at step {step} and did no further step" if step else (
            "This run was opened and did no step")  # fmt: skip
    idle = "The kernel is alive and idle; this" if lives_idle and story == LEFT else "This"
    return f"{idle} training {ending(story, own)}{_before_the_end(own, evidence)}"


def ending(story: str, own: Training) -> str:
    """How a training ended, after its name."""
    at = f" at step {own.step}" if own.step else ""
    if story == FINISHED:
        return f"finished{at}"
    if story == UNSAVED:
        full = ": the disk is full" if own.had_no_room else ""
        return f"reached its end{at}, which could not be saved{full}"
    if own.error is not None:
        return f"stopped{at}, unfinished, with {error_name(own.error)}"
    if own.ended is None or own.ended.get("kind") == "trained":
        return f"stopped{at}, unfinished: no cell was running"
    other = "a loop without a run" if own.is_followed_by_a_loop else "another run"
    return f"stopped{at}, unfinished; {other} trained next"


def error_name(error: dict[str, object]) -> str:
    """The exception's type, as Python shows it."""
    return printable(str(error.get("type")).removeprefix("builtins."), 60)


def _before_the_end(own: Training, evidence: Evidence, of: str = " before its process ended") -> str:
    t, end = number(own.ended.get("t")) if own.ended else None, evidence.died_t
    return f", {format_duration(end - t)}{of}" if t is not None and end is not None and end >= t else ""


def _grade(story: str, own: Training) -> Grade:
    """What was announced is certain; that nothing was is only likely to mean that there was nothing.

    An exception ended its cell for certain, but a loop of the user's own may have come to its end before that. Of two
    runs that one loop trains in turns, the one announced first may well have been training.
    """
    if story in (FINISHED, UNSAVED):
        return "certain"
    gave_way = story == LEFT and (own.ended or {}).get("kind") in ("training", "loop") and not own.in_turns
    return "certain" if gave_way else "likely"


def _reading(story: str, own: Training) -> Reading:
    if story == NOT_BEGUN:
        return Reading("the recording knows of no step of it", "events.jsonl")
    if own.ended is None:
        return Reading("the kernel was between two cells", "beacon")
    what = f"{own.ended.get('run')} began to train"
    if own.error is not None:
        what = f"{error_name(own.error)}: {own.error.get('message')}".rstrip(": ")
    elif own.unsaved is not None:
        what = own.unsaved
    elif own.ended.get("kind") == "trained":
        what = "its last step was done" if story == FINISHED else "its loop was left"
    elif own.ended.get("kind") == "loop":
        what = "a step was counted that no run had announced"
    return Reading(printable(what, 160), "events.jsonl", number(own.ended.get("wall")))


def _end_of_process(verdict: Verdict, evidence: Evidence) -> str | None:
    """How the process ended afterwards, where that was not well."""
    if not evidence.is_dead or verdict.cause.id == "clean-exit":
        return None
    ask = f"`buoy why {shlex.quote(from_here(verdict.run))} --attempt {verdict.attempt}`"
    return f"its process ended later: {verdict.cause.id}; details: {ask}"


def _with_progress(verdict: Verdict, evidence: Evidence, own: Training) -> Verdict:
    """A script that fails after its training is done has lost no training; nor has one that did no step."""
    if verdict.cause.id == "still-running" or (verdict.cause.id == "clean-exit" and own.unsaved is None):
        return verdict
    grade: Grade = "certain"
    if own.finished:
        words = f"its training had finished at step {own.step}{_before_the_end(own, evidence)}"
    elif own.unsaved is not None:
        words = f"its training {ending(UNSAVED, own)}"
    elif own.is_followed_by_a_loop:
        at = f" at step {own.step}" if own.step else ""
        words = f"its training had stopped{at}; a loop without a run trained next"
    elif own.opened and not own.began:
        step, grade = step_at_opening(evidence, verdict.run), "likely"
        words = f"no step of this run was done{f' after step {step}' if step else ''}"
    else:
        return verdict
    cascade = (Claim(words, grade), *verdict.cause.cascade)
    return replace(verdict, cause=replace(verdict.cause, cascade=cascade))


def was_between_cells(evidence: Evidence) -> bool:
    """Whether it was a notebook's kernel that ran no cell when it ended."""
    idle = evidence.main is not None and evidence.main.phase == IDLE
    return idle and evidence.is_kernel


def stories(evidence: Evidence) -> list[tuple[str, str, Training]]:
    """The runs that had trained in this process and had ended before it did, the latest first: folder and story."""
    names = [event.get("run") for event in evidence.events if event.get("kind") == "training"]
    found = []
    for name in dict.fromkeys(str(name) for name in reversed(names)):
        folder = os.path.normpath(os.path.join(evidence.run_folder, name))
        own, story = part_in(evidence, folder)
        if story is not None and story != NOT_BEGUN:
            found.append((folder, story, own))
    return found


def of_kernel(verdict: Verdict, evidence: Evidence) -> Verdict:
    """The verdict on a kernel that was at none of its runs: it lists how each of them ended, and what is to be done."""
    listed = stories(evidence)
    if not listed:
        return verdict
    claims = [
        Claim(f"{_name(folder)} {ending(story, own)}{_before_the_end(own, evidence, ' before')}", _grade(story, own))
        for folder, story, own in listed[:_MOST_LISTED]
    ]  # fmt: skip
    where = replace(verdict.where, epoch=None)
    # What lowers a training's memory is no help outside of one.
    wants_memory = verdict.cause.id in WANTS_MEMORY
    steps = [] if wants_memory else [step for step in verdict.cause.next if step != how_to_resume(evidence)]
    first = [TOO_MUCH] if wants_memory else []
    if listed[0][2].is_followed_by_a_loop:
        claims.insert(0, Claim(f"a loop without a run trained last, {where.step} steps", "certain"))
        first.append(f"the loop without a run: {how_to_resume(evidence)}")
    else:
        where = replace(where, step=None, phase=None)
    cause = verdict.cause
    cause = replace(cause, cascade=(*claims, *cause.cascade), next=(*first, _next(listed, evidence), *steps))
    return replace(verdict, cause=cause, where=where)


def _next(listed: list[tuple[str, str, Training]], evidence: Evidence) -> str:
    """What is to be done about the run that was left last; or that there is nothing."""
    for folder, story, own in listed:
        if story in (LEFT, UNSAVED):
            todo = finished_since(evidence, folder) or what_to_do(story, folder, True, own)
            return f"{_name(folder)}: {todo}"
    names = [_name(folder) for folder, _, _ in listed]
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"nothing of {' and '.join(names[:_MOST_LISTED])}{more} was lost: training had finished"


def _name(folder: str) -> str:
    return printable(os.path.basename(folder), 40)


def in_a_line(verdict: Verdict, evidence: Evidence) -> str | None:
    """The end of a kernel that was stopped between two cells, as a restart does; None where more is to be said."""
    if verdict.cause.id != "terminated" or not was_between_cells(evidence):
        return None
    line = "the previous kernel was stopped (SIGTERM) between two cells, as a restart does"
    left = [each for each in stories(evidence) if each[1] in (LEFT, UNSAVED)]
    for folder, story, own in left[:1]:
        line += f"; {_name(folder)} {ending(story, own)}: `buoy why {shlex.quote(from_here(folder))}`"
    return line
