"""A run as a small card of HTML: where it is, its plan beside what came, and what was adapted."""

from __future__ import annotations

from buoy.flight.attempt import Attempt
from buoy.units import format_duration
from buoy.view import changes, planned
from buoy.view.history import History, read_life
from buoy.view.lines_html import lines_html
from buoy.view.now import lines, state

_MOST = 8


def run_card(title: str, attempt: Attempt | None, folder: str, step: int) -> str:
    """The card of the run in this folder; without a recording only the title."""
    text = title if attempt is None else "\n".join(_lines(attempt, folder, step))
    return lines_html(text, boxed=True)


def _lines(attempt: Attempt, folder: str, step: int) -> list[str]:
    text = lines({**state(attempt, folder), "step": step})  # the newest sample is a moment old
    life = read_life(attempt, every=8)
    history = History(attempt.run_folder, "", [life])
    told = planned.comparison(history, folder)
    if told is not None:
        text += ["", planned.heading(told)]
        text += [
            f"  {what}: planned {wanted}, was {real}"
            for what, wanted, real in map(planned.cells, told["rows"])
        ]
    made = changes.changes(history)[-_MOST:]
    if made:
        text += ["", "adapted in this attempt:"]
        text += [
            f"  {format_duration(each.at) if each.at is not None else 'n/a':>12}  "
            + (f"step {each.step}: " if each.step is not None else "")
            + each.text
            for each in made
        ]
    return text
