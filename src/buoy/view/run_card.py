"""A run as a small card of HTML: where it is, its plan beside what came, and what was adapted."""

from __future__ import annotations

from buoy.flight.attempt import Attempt, attempts_of, is_run
from buoy.units import format_duration
from buoy.view import changes, planned
from buoy.view.history import History, read_life
from buoy.view.lines_html import lines_html
from buoy.view.now import lines, state

_MOST = 8


def run_card(title: str, attempt: Attempt | None, folder: str, step: int | None = None) -> str:
    """The card of the run in this folder; without a recording only the title. `step`: where it is known better."""
    text = title if attempt is None else "\n".join(_lines(attempt, folder, step))
    return lines_html(text, boxed=True)


def guard_card(title: str, folder: str) -> str:
    """The card of the run in a guard's folder: the guard itself knows nothing more once its fit is over."""
    known = attempts_of(folder) if is_run(folder) else []
    return run_card(title, known[-1] if known else None, folder)


def _lines(attempt: Attempt, folder: str, step: int | None) -> list[str]:
    now = state(attempt, folder)
    text = lines(now if step is None else {**now, "step": step})  # the newest sample is a moment old
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
