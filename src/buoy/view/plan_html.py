"""A plan as HTML, for notebooks: no script, no address, and the page's own colours."""

from __future__ import annotations

import re
from html import escape

from buoy.planner.result import FITS, NOT, TIGHT, Plan, Remedy
from buoy.view.cards import lines_html
from buoy.view.plan import (
    EXACT,
    answer_lines,
    change,
    compared_with,
    hint,
    tiers,
    times,
    title,
    verdict_words,
)

_FONT = "font:14px/1.5 system-ui,sans-serif"
_BAR = 12
_EDGES = {FITS: "#1a7f4b", TIGHT: "#9a6700", NOT: "#b3261e"}
_CELL = "padding:4px 10px;vertical-align:top;border-top:1px solid #8884"
_CODE = "display:block;font:12px/1.45 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere"
# Longer code is folded up: a click shows it.
_SHORT = 2


def html(plan: Plan) -> str:
    """A small card for each place, and a table of what was tried."""
    cards = []
    for answer in plan.answers:
        edge = _EDGES.get(answer.verdict, "#666")
        body = "\n".join(answer_lines(plan, answer, _BAR)[1:])
        cards.append(
            f'<div style="{_FONT};border:1px solid #8884;border-radius:6px;'
            f'border-left:4px solid {edge};padding:10px 14px;margin:8px 0;max-width:60em">'
            f"<b>{escape(title(answer))}</b>"
            f"{lines_html(body)}</div>"
        )
    if plan.remedies:
        cards.append(_table(plan))
    if tiers(plan):
        cards.append(lines_html(tiers(plan)))
    notes = "".join(f"<li>{_words(note)}</li>" for note in plan.notes)
    listed = f"<ul>{notes}</ul>" if notes else ""
    return f'<div style="{_FONT}">{"".join(cards)}{listed}<p>hint: {_words(hint(plan))}</p></div>'


def _table(plan: Plan) -> str:
    heads = (f"remedy for {plan.remedies_for}", "peak", "time", "", "")
    head = "".join(f'<th style="{_CELL};text-align:left">{escape(word)}</th>' for word in heads)
    together = [plan.cheapest] if plan.cheapest is not None and plan.cheapest not in plan.remedies else []
    rows = "".join(_row(plan, remedy) for remedy in [*together, *plan.remedies])
    style = f"{_FONT};border-collapse:collapse;max-width:75em"
    return f"<div style='overflow-x:auto'><table style=\"{style}\"><tr>{head}</tr>{rows}</table></div>"


def _row(plan: Plan, remedy: Remedy) -> str:
    cells = (
        _chosen(plan, remedy),
        _peak(plan, remedy),
        escape(times(remedy)),
        f"{EXACT[remedy.exact]}, {escape(verdict_words(remedy))}",
        f"{_words(remedy.note)}{_code(remedy)}",
    )
    styles = ("", "white-space:nowrap", "white-space:nowrap", "", "")
    filled = zip(cells, styles, strict=True)
    return (
        "<tr>"
        + "".join(f'<td style="{_CELL};text-align:left;{more}">{cell}</td>' for cell, more in filled)
        + "</tr>"
    )


def _chosen(plan: Plan, remedy: Remedy) -> str:
    name = escape(remedy.title)
    return f"<b>{name}</b><br><small>the cheapest that fits</small>" if remedy is plan.cheapest else name


def _peak(plan: Plan, remedy: Remedy) -> str:
    """The size, and below it the change, in a narrow column."""
    size, _, less = change(remedy, compared_with(plan)).removeprefix("peak ").partition(" (")
    return f"{escape(size)}<br><small>{escape(less.rstrip(')'))}</small>" if less else escape(size)


def _code(remedy: Remedy) -> str:
    if not remedy.code:
        return ""
    block = f'<code style="{_CODE}">{escape(remedy.code)}</code>'
    if len(remedy.code.splitlines()) <= _SHORT:
        return block
    return f"<details><summary>code</summary>{block}</details>"


def _words(text: str) -> str:
    """A sentence, its `code` as such."""
    return re.sub(r"`([^`]+)`", r'<code style="overflow-wrap:anywhere">\1</code>', escape(text))
