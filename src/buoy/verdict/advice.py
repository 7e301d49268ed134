"""How to resume after an end: from the last save that was recorded, or that lies in the run's own folder."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from buoy.fields import count, mapping, number, text
from buoy.flight.attempt import attempts_of, is_kernel
from buoy.flight.log import read_events
from buoy.flight.trainings import Training, training_of
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.model import Verdict

if TYPE_CHECKING:
    from buoy.checkpoint.store import Entry
    from buoy.verdict.evidence import Evidence

_STEP_IN_NAME = re.compile(r"(?:^|[^a-z])step[-_=]?(\d{1,12})(?!\d)|^checkpoint-(\d{1,12})$", re.IGNORECASE)
"""`step-000001200` (ours), `epoch=3-step=1200.ckpt` (Lightning), `checkpoint-1200` (transformers)."""


class Saved(NamedTuple):
    """Something that was saved."""

    path: str
    age: float | None
    """Seconds before the end; None where the clocks do not say."""
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
    name = os.path.relpath(os.path.abspath(run_folder), evidence.run_folder)
    made = [event for event in evidence.events_of("opened") if event.get("run") == name]
    newest = text(made[-1].get("newest")) if made else None
    return step_in_name(newest) if newest else None


def last_save(evidence: Evidence) -> Saved | None:
    """The last thing that the recording saw saved, by the run that trained last."""
    saves = [event for event in evidence.events_of("save") if text(event.get("path"))]
    opened = evidence.events_of("opened")
    trained = evidence.events_of("training")
    # A notebook trains one run after the other: what another one saved is of no use to the last that trained.
    loop = loop_without_a_run(evidence)
    if loop is not None:
        began = number(loop.get("t")) or 0.0
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
    """What this run can resume from: what lies in its folder counts more than what the recording saw."""
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


def loop_without_a_run(evidence: Evidence) -> dict[str, Any] | None:
    """The event of the loop that no run of ours saves, where such a one trained last."""
    kinds = ("opened", "training", "trained", "loop")
    none: dict[str, Any] = {}
    last = next((event for event in reversed(evidence.events) if event.get("kind") in kinds), none)
    return last if last.get("kind") == "loop" else None


def _is_saved_by(evidence: Evidence, save: dict[str, object], run: object) -> bool:
    """Whether a checkpoint lies in the folder of this run, given as seen from the recording's."""
    name = os.path.basename(os.path.normpath(os.path.join(evidence.run_folder, str(run))))
    return os.path.basename(os.path.dirname(os.path.dirname(str(save.get("path"))))) == name


FINISHED, UNSAVED, NOT_BEGUN, LEFT = "finished", "unsaved", "not-begun", "left"
WANTS_MEMORY = ("kernel-oom", "gpu-oom", "memory-error", "thrashing")
"""Causes whose advice is about the size of a training."""


def how_to_resume(evidence: Evidence) -> str:
    """How to continue: from the last save, if one was seen."""
    return resume_from(evidence, last_save(evidence))


def resume_from(evidence: Evidence, saved: Saved | None) -> str:
    """How to continue from what was saved; None: from nothing."""
    restarted, advised = _what_was_restarted(evidence), _command_that_restarts(evidence)
    if saved is None:
        # A run or guard of ours saves by itself, and had no time to.
        if evidence.events_of("training") and loop_without_a_run(evidence) is None:
            again = f"; {advised} restarts it automatically" if advised else ""
            return f"train it again: no checkpoint had been made yet{restarted or again}"
        again = f"; then {advised} resumes automatically" if advised else ""
        return f"save a checkpoint every few minutes and load it at start-up{restarted or again}"
    when = f", saved {format_duration(saved.age)} before the end" if saved.age is not None else ""
    again = f"; {advised} restarts it automatically" if advised else ""
    what = f"step {saved.step}{when} ({saved.path})" if saved.step is not None else f"{saved.path}{when}"
    return f"resume from {what}{restarted or again}"


def with_restart(verdict: Verdict, evidence: Evidence) -> Verdict:
    """A verdict that was given before `buoy run` decided on a restart, with what it decided."""
    undecided = tuple(event for event in evidence.events if event.get("kind") != "restart")
    then, now = how_to_resume(evidence._replace(events=undecided)), how_to_resume(evidence)
    steps = tuple(now if step == then else step for step in verdict.cause.next)
    return replace(verdict, cause=replace(verdict.cause, next=steps))


def _what_was_restarted(evidence: Evidence) -> str:
    """What `buoy run --restart` did about this end, or had done before it; empty where it was not asked for."""
    order = mapping(evidence.attempt.get("restart"))
    allowed, done = count(order.get("allowed")) or 0, count(order.get("done")) or 0
    if not allowed:
        return ""
    decided = next(iter(reversed(evidence.events_of("restart"))), None)
    if decided is not None and decided.get("again") is True:
        return "; buoy restarted it"
    if done >= allowed:
        used = "its one restart is" if allowed == 1 else f"its {allowed} restarts are"
        return f"; {used} used up: fix the cause, then run the same command again"
    reason = text(decided.get("why")) if decided is not None else None
    return f"; `--restart {allowed}` did not restart it: {printable(reason, 160)}" if reason else ""


def _command_that_restarts(evidence: Evidence) -> str:
    """The command that would have restarted it; empty where it was under that already, or none does the same again."""
    if count(mapping(evidence.attempt.get("restart")).get("allowed")) or not _can_be_restarted(evidence):
        return ""
    return f"`buoy run --restart 3 -- {_pasteable(evidence)}`"


def _can_be_restarted(evidence: Evidence) -> bool:
    """Whether a command was recorded that does the same again: a notebook and `python -c` have none."""
    words = evidence.attempt.get("command")
    if evidence.attempt.get("mode") != "watch" or not isinstance(words, list):
        return True
    return len(words) > 1 and words[1] != "-c" and not is_kernel(words)


def _pasteable(evidence: Evidence) -> str:
    """The command for a shell; one that is too long to show whole is left to the reader."""
    import shlex

    words = evidence.attempt.get("command")
    command = shlex.join(map(str, words)) if isinstance(words, list) and words else "python train.py"
    return command if len(command) <= 90 and command.isprintable() else "..."


def what_to_do(
    story: str, run_folder: str, in_kernel: bool, own: Training | None = None, lives: bool = False
) -> str:
    """What is to be done of a run whose part ended before its process did, or while that one `lives`."""
    if story == NOT_BEGUN:
        return "train it: nothing of it was lost"
    kept = newest_checkpoint(run_folder)
    if story == FINISHED:
        return "nothing: its last checkpoint holds the end" if kept else "nothing; it has no checkpoint here"
    again = "train it again in a cell" if in_kernel else "train it again"
    if kept is None:
        words = f"{again}: it has no checkpoint here, so it starts over"
    else:
        words = f"{again}: it resumes from its last checkpoint, step {kept.step}"
    if story != UNSAVED:
        return words
    done = own.step if own is not None else None
    mend = "free some space" if own is not None and own.had_no_room else "fix that"
    lost = f"; steps {kept.step + 1} to {done} are lost" if kept and done and done > kept.step else ""
    if lives:
        return f"{mend} and save it while its process is alive (`run.save()`); else {words}"
    return f"{mend}, then {words}{lost}"


def with_its_checkpoints(verdict: Verdict, evidence: Evidence, own: Training) -> Verdict:
    """The advice of a verdict in the light of the run's own checkpoints; the same where it has no part in this."""
    if not own.opened and not own.began:
        return verdict
    told = how_to_resume(evidence)
    done = what_to_do(FINISHED, verdict.run, False).replace("nothing", "nothing of its training was lost", 1)
    if own.finished and own.is_followed_by_a_loop:  # that loop's own end is what happened
        name = printable(os.path.basename(verdict.run), 40)
        kept = done.replace("of its training", f"of {name}")
        return replace(verdict, cause=replace(verdict.cause, next=(*verdict.cause.next, kept)))
    if own.finished:
        steps = [step for step in verdict.cause.next if step != told]
        if verdict.cause.id in WANTS_MEMORY:
            steps = [
                "what was asked for after the training was too much: free what it holds first, or take less"
            ]
        return replace(verdict, cause=replace(verdict.cause, next=(done, *steps)))
    found = newest_checkpoint(verdict.run) if not own.began else None
    if found is not None and found.about.get("finished") is True:
        better = done  # it was opened to be used, or to be trained further
    else:
        since = finished_since(evidence, verdict.run)
        better = since or resume_from(evidence, saved_of(verdict.run, evidence, own))
    steps = [better if step == told else step for step in verdict.cause.next]
    in_kernel = evidence.is_kernel
    died = evidence.is_dead and verdict.cause.id != "clean-exit"
    if found is not None and in_kernel and died and better not in steps:
        # A kernel that had trained nothing is not advised to resume, but this run had been trained before.
        steps.insert(len(steps) if verdict.cause.id in WANTS_MEMORY else 0, better)
    return replace(verdict, cause=replace(verdict.cause, next=tuple(steps)))


def finished_since(evidence: Evidence, run_folder: str) -> str | None:
    """What is left to do about an end after which a later attempt finished the run; None where none did."""
    kept = newest_checkpoint(run_folder)
    if kept is not None and kept.about.get("finished") is not True:
        return None  # what was finished has been trained further since: there is something to resume from
    known = attempts_of(run_folder)
    here = [os.path.realpath(attempt.folder) for attempt in known]
    mine = os.path.realpath(evidence.folder)
    for attempt in reversed(known[here.index(mine) + 1 :] if mine in here else ()):
        later = training_of(read_events(attempt.folder), attempt.run_folder, run_folder)
        if later.finished:
            is_other = os.path.realpath(attempt.run_folder) != os.path.dirname(os.path.dirname(mine))
            of = f" of {printable(os.path.basename(attempt.run_folder), 40)}" if is_other else ""
            at = f", at step {later.step}" if later.step else ""
            return f"nothing: attempt {attempt.number}{of} finished it later{at}"
    return None
