"""Other attempts of a run: who asks about the last may mean another one."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace

from buoy.flight.attempt import Attempt, attempts_of, is_kernel, lost_recording
from buoy.machine.records import read_json
from buoy.text import printable
from buoy.verdict.asked import Asked, concerned
from buoy.verdict.evidence import load
from buoy.verdict.going_on import FINISHED, LEFT, NOT_BEGUN
from buoy.verdict.judge import judge
from buoy.verdict.kernel_end import stories, with_its_runs
from buoy.verdict.model import Verdict
from buoy.verdict.own_story import of_run
from buoy.verdict.saved import from_here
from buoy.verdict.values import mapping, number, text

MOST_LOOKS = 8
"""Attempts that are looked at, newest first."""
_NO_NEWS = ("clean-exit", "still-running", FINISHED, LEFT, NOT_BEGUN)


def tell(asked: Asked) -> Verdict:
    """The verdict on what is asked for; of a process that ended it names the run that it was at.

    A notebook's kernel outlives its trainings: where it was at none of them, the verdict is the kernel's.
    """
    evidence = load(asked.attempt.folder)
    whole = asked.of_process and evidence.is_dead
    run = concerned(asked.attempt) if whole else asked.run
    if not whole or not is_kernel(evidence.attempt.get("command")):
        return of_run(judge(evidence), evidence, run, whole)
    recording = asked.attempt.run_folder
    had_ended = any(
        os.path.realpath(ended) == os.path.realpath(run) for ended, _, _ in stories(evidence, recording)
    )
    verdict = of_run(judge(evidence), evidence, recording if had_ended else run, whole)
    return with_its_runs(verdict, evidence)


def beside(verdict: Verdict, asked: Asked) -> Verdict:
    """The verdict on the last attempt, with a word about another that may be meant.

    Where the last one runs well and the one before it died, that death is what is asked for.
    """
    run = asked.attempt.run_folder if asked.of_process else asked.run
    others = [asked._replace(attempt=other) for other in attempts_of(run) if other != asked.attempt]
    if verdict.cause.id == "still-running":
        return _before(verdict, others) or verdict
    if verdict.cause.id == NOT_BEGUN and others:
        return _last_trained(verdict, others)
    if verdict.beside is not None:
        return verdict
    if (lost := lost_recording(run)) is not None:
        return replace(
            verdict,
            beside=f"a later recording of this run is not here ({from_here(lost)}): this is about one before it",
        )
    return replace(
        verdict,
        beside=_lived_beside(verdict, asked.attempt, [other.attempt for other in others[-MOST_LOOKS:]], run),
    )


def _before(running: Verdict, others: list[Asked]) -> Verdict | None:
    """The death of the attempt before, if it died."""
    verdict = tell(others[-1]) if others else None
    if verdict is None or verdict.cause.id in _NO_NEWS:
        return None
    return replace(
        verdict, beside=f"attempt {running.attempt} is running now; this is about the one before it"
    )


def _last_trained(idle: Verdict, others: list[Asked]) -> Verdict:
    """The end of the last attempt that did a step of this run: one that only opened it again ended nothing."""
    for other in reversed(others[-MOST_LOOKS:]):
        verdict = tell(other)
        if verdict.cause.id != NOT_BEGUN:
            return replace(verdict, beside=opened_again(idle.attempt))
    return idle


def opened_again(attempt: int) -> str:
    """Of a later attempt that ended nothing."""
    return f"attempt {attempt} opened it again and did no step of it"


def _lived_beside(verdict: Verdict, found: Attempt, others: list[Attempt], run: str) -> str | None:
    """A line about another attempt that ended during or after this one and did not end well."""
    mine = _life(found)
    if mine is None:
        return None
    for other in reversed(others):
        theirs = _life(other)
        record = read_json(os.path.join(other.folder, "verdict.json")) or {}
        cause = text(mapping(record.get("cause")).get("id"))
        if theirs is None or cause is None or theirs[0] != mine[0]:
            continue  # of another boot: neither clocks nor pids can be compared
        (_, began, ended), (_, other_began, other_ended) = mine, theirs
        if other_ended <= began or other_began >= ended:
            continue
        if other_ended > ended or (cause != "clean-exit" and verdict.cause.id == "clean-exit"):
            name = shlex.quote(printable(run, 60))
            ask = f"`buoy why {name} --attempt {other.number}`"
            return f"attempt {other.number} ran at the same time and ended with {cause}: {ask}"
    return None


def _life(attempt: Attempt) -> tuple[str, float, float] | None:
    """The boot it lived in, its beginning and its end there; None where one of them was not recorded."""
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    death = read_json(os.path.join(attempt.folder, "death.json")) or {}
    boot, began, ended = text(about.get("boot_id")), number(about.get("t")), number(death.get("t"))
    if boot is None or began is None or ended is None:
        return None
    return boot, began, ended
