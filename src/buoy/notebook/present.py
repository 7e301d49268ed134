"""What ended a training in this very kernel, which lives: an exception that left its cell."""

from __future__ import annotations

from buoy.flight.attempt import Attempt
from buoy.notebook.display import show, show_text
from buoy.text import printable
from buoy.units import format_duration
from buoy.verdict.asked import part_in
from buoy.verdict.beside import tell
from buoy.verdict.evidence import Evidence, load
from buoy.verdict.kernel_end import stories
from buoy.verdict.own_story import error_name
from buoy.verdict.saved import last_save, steps_of_its_own
from buoy.verdict.values import count, number
from buoy.view.card import verdict_card


def tell_of_this_kernel(attempt: Attempt) -> bool:
    """Show how the training that this kernel was at last was left by an exception; False where none was."""
    evidence = load(attempt.folder)
    told = stories(evidence, attempt.run_folder)
    if told and told[0][2].error is not None and not told[0][2].is_followed_by_a_loop:
        verdict = tell(part_in(attempt, told[0][0]))
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
    has_runs = bool(evidence.events_of("training"))
    steps = steps_of_its_own(evidence) if has_runs else count(last.get("step"))
    if not steps:
        return words
    saved = last_save(evidence)
    kept = f"last saved: {saved.path}" if saved is not None else "no checkpoint of that was seen"
    return f"{words}; a loop without a run had trained to step {steps}: {kept}"
