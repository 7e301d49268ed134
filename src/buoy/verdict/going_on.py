"""How to go on, in words: from the last save, by itself or by hand, and what a run's own folder says to that."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from buoy.flight.attempt import attempts_of, is_kernel
from buoy.flight.log import read_events
from buoy.flight.trainings import Training, training_of
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.model import Verdict
from buoy.verdict.saved import Saved, is_in_a_loop_of_its_own, last_save, newest_checkpoint, saved_of
from buoy.verdict.values import count, mapping, text

if TYPE_CHECKING:
    from buoy.verdict.evidence import Evidence

FINISHED, UNSAVED, NOT_BEGUN, LEFT = "finished", "unsaved", "not-begun", "left"
WANTS_MEMORY = ("kernel-oom", "gpu-oom", "memory-error", "thrashing")
"""Causes whose advice is about the size of a training."""


def go_on(evidence: Evidence) -> str:
    """How to continue: from the last save, if one was seen."""
    return go_on_from(evidence, last_save(evidence))


def go_on_from(evidence: Evidence, saved: Saved | None) -> str:
    """How to continue from what was saved; None: from nothing."""
    restarted, advised = _what_was_restarted(evidence), _command_that_restarts(evidence)
    if saved is None:
        # A run or guard of ours saves by itself, and had no time to.
        if evidence.events_of("training") and not is_in_a_loop_of_its_own(evidence):
            again = f"; {advised} starts it again by itself" if advised else ""
            return f"train it again: no checkpoint had been made yet{restarted or again}"
        again = f"; then {advised} goes on by itself" if advised else ""
        return f"save every few minutes and load it at the start{restarted or again}"
    when = f", saved {format_duration(saved.age)} before the end" if saved.age is not None else ""
    again = f"; {advised} starts it again by itself" if advised else ""
    what = f"step {saved.step}{when} ({saved.path})" if saved.step is not None else f"{saved.path}{when}"
    return f"go on from {what}{restarted or again}"


def _what_was_restarted(evidence: Evidence) -> str:
    """What `buoy run --restart` did about this end, or had done before it; empty where it was not asked for."""
    order = mapping(evidence.attempt.get("restart"))
    allowed, done = count(order.get("allowed")) or 0, count(order.get("done")) or 0
    if not allowed:
        return ""
    decided = next(iter(reversed(evidence.events_of("restart"))), None)
    if decided is not None and decided.get("again") is True:
        return "; it was started again at once"
    if done >= allowed:
        used = "its one restart is" if allowed == 1 else f"its {allowed} restarts are"
        return f"; {used} used up: mend the cause, then give the same command again"
    reason = text(decided.get("why")) if decided is not None else None
    return f"; `--restart {allowed}` did not start it again: {printable(reason, 160)}" if reason else ""


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
        return (
            "nothing: its last checkpoint holds the end" if kept else "nothing; no checkpoint of it is here"
        )
    again = "train it again in a cell" if in_kernel else "train it again"
    if kept is None:
        words = f"{again}: no checkpoint of it is here, it begins anew"
    else:
        words = f"{again}: it goes on from its last checkpoint, step {kept.step}"
    if story != UNSAVED:
        return words
    done = own.step if own is not None else None
    mend = "free some space" if own is not None and own.had_no_room else "mend that"
    lost = f"; steps {kept.step + 1} to {done} are lost" if kept and done and done > kept.step else ""
    if lives:
        return f"{mend} and save it while its process lives (`run.save()`); else {words}"
    return f"{mend}, then {words}{lost}"


def with_its_checkpoints(verdict: Verdict, evidence: Evidence, own: Training) -> Verdict:
    """The advice of a verdict in the light of the run's own checkpoints; the same where it has no part in this."""
    if not own.opened and not own.began:
        return verdict
    told = go_on(evidence)
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
        better = since or go_on_from(evidence, saved_of(verdict.run, evidence, own))
    steps = [better if step == told else step for step in verdict.cause.next]
    in_kernel = is_kernel(evidence.attempt.get("command"))
    died = evidence.is_dead and verdict.cause.id != "clean-exit"
    if found is not None and in_kernel and died and better not in steps:
        # A kernel that had trained nothing is not advised to go on, but this run had been trained before.
        steps.insert(len(steps) if verdict.cause.id in WANTS_MEMORY else 0, better)
    return replace(verdict, cause=replace(verdict.cause, next=tuple(steps)))


def finished_since(evidence: Evidence, run_folder: str) -> str | None:
    """What is left to do about an end after which a later attempt finished the run; None where none did."""
    kept = newest_checkpoint(run_folder)
    if kept is not None and kept.about.get("finished") is not True:
        return None  # what was finished has been trained further since: there is something to go on from
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
