"""The verdicts of all attempts on one page: the newest as cards, the older ones folded, and none left out."""

from __future__ import annotations

from html import escape
from typing import Any

from buoy.text import printable
from buoy.view.card import verdict_card

_OPEN = 3
_MOST_CARDS, _MOST_LINES = 60_000, 20_000
"""Signs for the folded cards, and for the lines of those that find no room there: the page has a limit."""
_LINE = 160


def cards(told: list[dict[str, Any]]) -> str:
    """The verdicts, given in order of time, the newest first."""
    newest_first = told[::-1]
    open_ones = "".join(map(verdict_card, newest_first[:_OPEN]))
    older = newest_first[_OPEN:]
    if not older:
        return open_ones
    folded, number = _within(_MOST_CARDS, [verdict_card(each) for each in older])
    lines, more = _within(_MOST_LINES, [_line(each) for each in older[number:]])
    left = len(older) - number - more
    if left:
        lines += (
            f'<p class="soft">and {left} before these: <code>buoy why --attempt N</code> tells of each</p>'
        )
    words = "1 earlier verdict" if len(older) == 1 else f"{len(older)} earlier verdicts"
    return f"{open_ones}<details><summary>{words}</summary>{folded}{lines}</details>"


def _within(most: int, parts: list[str]) -> tuple[str, int]:
    """As many of the parts as there is room for, and their number."""
    used = number = 0
    for part in parts:
        used += len(part.encode())
        if used > most:
            break
        number += 1
    return "".join(parts[:number]), number


def _line(verdict: dict[str, Any]) -> str:
    cause = verdict.get("cause")
    cause = cause if isinstance(cause, dict) else {}
    claim = cause.get("claim")
    words = claim.get("text", "") if isinstance(claim, dict) else ""
    name = f"attempt {verdict.get('attempt', '?')}: {cause.get('id', 'unknown')}"
    return f'<p>{escape(printable(name, 60))} <span class="soft">{escape(printable(str(words), _LINE))}</span></p>'
