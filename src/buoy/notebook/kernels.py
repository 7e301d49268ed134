"""The kernels that recorded into this folder (scripts do not count), and what ended a training in this one."""

from __future__ import annotations

import os
from typing import NamedTuple

from buoy.fields import count, number
from buoy.flight.attempt import Attempt, attempt_numbers, is_kernel
from buoy.machine.files import read_json
from buoy.notebook.cards import show, show_text
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict import verdict_on
from buoy.verdict.advice import last_save, loop_without_a_run
from buoy.verdict.evidence import Evidence, load
from buoy.verdict.notebook import error_name, stories
from buoy.verdict.select import part_in
from buoy.view.cards import verdict_card


class Life(NamedTuple):
    """One kernel, or one IPython in a terminal, from its first recorded cell on. Times are of the wall clock."""

    number: int
    """Its attempt in the folder."""
    began: float
    ended: float | None
    """None: it lives."""


def lives(folder: str) -> list[Life]:
    """All kernels that recorded here, the one that asks included, by their numbers."""
    found = []
    for index in attempt_numbers(folder):
        attempt = os.path.join(folder, "attempts", f"{index:04d}")
        about = read_json(os.path.join(attempt, "attempt.json")) or {}
        if is_session(about.get("command")):
            began = number(about.get("wall")) or 0.0
            found.append(Life(index, began, _ended(attempt, began)))
    return found


def _ended(attempt: str, began: float) -> float | None:
    death = read_json(os.path.join(attempt, "death.json")) or {}
    wall = number(death.get("wall"))
    if wall is not None:  # all that is read of most: a folder may hold hundreds
        return wall
    evidence = load(attempt)
    if not evidence.is_dead:
        return None
    return evidence.last_wall if evidence.last_wall is not None else began


def unseen(known: list[Life]) -> list[Life]:
    """Those that ended since the last kernel began here, the latest end first: that one showed all ends before it."""
    ended = [
        (life.ended, life)
        for life in known
        if life.ended is not None
        and not any(other.number > life.number and other.began >= life.ended for other in known)
    ]
    return [life for _, life in sorted(ended, reverse=True)]


def last_ended(known: list[Life]) -> Life | None:
    """The kernel that ended last; None when none did."""
    return max(
        (life for life in known if life.ended is not None), key=lambda life: life.ended or 0.0, default=None
    )


def is_session(command: object) -> bool:
    """Whether cells are typed into a recorded command: a notebook's kernel, or IPython in a terminal.

    >>> is_session(["python", "/usr/bin/ipython3"]), is_session(["python", "train.py"])
    (True, False)
    """
    words = command[:2] if isinstance(command, list) else []
    return is_kernel(command) or any(
        os.path.basename(str(word).removesuffix("/__main__.py")).lower().startswith("ipython")
        for word in words
    )


def show_error_of_this_kernel(attempt: Attempt) -> bool:
    """Show how the training that this kernel was at last was left by an exception; False where none was."""
    evidence = load(attempt.folder)
    told = stories(evidence)
    if told and told[0][2].error is not None and not told[0][2].is_followed_by_a_loop:
        verdict = verdict_on(part_in(attempt, told[0][0]))
        show(verdict_card(verdict.to_json()), str(verdict))
        return True
    words = _of_another_cell(evidence)
    if words is not None:
        show_text(words)
    return words is not None


def _of_another_cell(evidence: Evidence) -> str | None:
    """The exception of a cell in which no run trained, where nothing has trained since, and what a loop had done."""
    kinds = ("training", "loop", "cell-error")
    told = [event for event in evidence.events if event.get("kind") in kinds]
    last = told[-1] if told else {}
    if last.get("kind") != "cell-error" or last.get("runs"):
        return None
    message = printable(str(last.get("message") or ""), 160)
    wall = number(last.get("wall"))
    ago = f", {format_duration(max(0.0, evidence.now.wall - wall))} ago" if wall is not None else ""
    words = f"in this kernel a cell ended with {error_name(last)}: {message}".rstrip(": ") + ago
    is_a_loop = not evidence.events_of("training") or loop_without_a_run(evidence) is not None
    steps = count(last.get("step")) if is_a_loop else None
    if not steps:
        return words
    saved = last_save(evidence)
    kept = f"last saved: {saved.path}" if saved is not None else "no checkpoint of that was seen"
    return f"{words}; a loop without a run had trained to step {steps}: {kept}"
