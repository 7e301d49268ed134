"""HTML cards for notebooks and the report: a verdict, all verdicts of a run, a run and its plan. No script."""

from __future__ import annotations

import os
from html import escape
from typing import Any

from buoy.fields import mapping, mappings
from buoy.flight.attempt import Attempt, attempts_of, is_run
from buoy.text import printable
from buoy.units import format_bytes, format_duration
from buoy.verdict.stacks import is_cell
from buoy.view import history as changes
from buoy.view import outcome
from buoy.view.history import History, read_life
from buoy.view.top import lines, state

WELL = ("clean-exit", "finished", "not-begun", "left")
"""Ends at which nothing was lost."""
_HOLDERS = 4
_READING = 110
"""Signs of a reading that are shown: a line of the kernel's log says the rest to nobody."""
_MOST_ADVICE = 4000
"""Signs of a piece of advice: it may be a command, of which nothing can be left out."""
_UNFINISHED, _DIED = "#9a6700", "#b3261e"
_GRADES = {"certain": "#1a7f4b", "likely": "#9a6700", "possible": "#7a4fb5"}
# A notebook's page brings its own colours: the card only asks for what stands out on both light and dark.
_BOX = (
    "font:14px/1.5 system-ui,sans-serif;border:1px solid #8884;border-left:4px solid {edge};"
    "border-radius:6px;padding:10px 14px;margin:8px 0;max-width:56em"
)


def verdict_card(verdict: dict[str, Any]) -> str:
    """The card of a verdict given as in verdict.json; what is not there is left out."""
    cause = mapping(verdict.get("cause"))
    claim = mapping(cause.get("claim"))
    grade = str(claim.get("grade", "possible"))
    edge = (
        _UNFINISHED
        if cause.get("id") in ("left", "not-begun")
        else "#1a7f4b"
        if cause.get("id") in WELL
        else _DIED
    )
    parts = [
        f'<div class="buoy-card" style="{_BOX.format(edge=edge)}">',
        f"<div><b>{_text(cause.get('id', 'unknown'))}</b> "
        f'<span style="opacity:.75">{_headline(verdict)}</span></div>',
        f'<div style="font-size:16px;margin:4px 0">{_text(claim.get("text", ""))} '
        f"{chip(grade, _GRADES.get(grade, '#666'))}</div>",
        _evidence(claim, mapping(verdict.get("mechanism"))),
        _before(cause.get("cascade")),
        _row("where", _place(mapping(verdict.get("where")))),
        _memory(verdict.get("holders")),
        _row("beside", _code(printable(str(verdict.get("beside") or ""), 400))),
        _next(cause.get("next")),
        "</div>",
    ]
    return "".join(parts)


def chip(word: str, colour: str) -> str:
    """A word in white on its own ground: a coloured word cannot be read on light and dark pages alike."""
    return (
        f'<span style="color:#fff;background:{colour};border-radius:9px;padding:1px 8px;font-size:12px">'
        f"{_text(word)}</span>"
    )


def _headline(verdict: dict[str, Any]) -> str:
    run = printable(os.path.basename(str(verdict.get("run") or "")) or "run", 60)
    text = f"{run}, attempt {verdict.get('attempt', '?')}"
    ran = verdict.get("ran_for")
    return escape(text + (f", ran {format_duration(ran)}" if isinstance(ran, int | float) else ""))


def _evidence(claim: dict[str, Any], mechanism: dict[str, Any]) -> str:
    lines = []
    for item in _each(claim.get("evidence"))[:4]:
        source = f' <span style="opacity:.75">({_text(item["source"])})</span>' if item.get("source") else ""
        lines.append(f"<li>{_text(item.get('text', ''), _READING)}{source}</li>")
    known = " ".join(lines)
    if mechanism.get("text") and _text(mechanism["text"]) not in known:
        lines.append(f'<li><span style="opacity:.75">mechanism:</span> {_text(mechanism["text"])}</li>')
    return f'<ul style="margin:4px 0;padding-left:20px">{"".join(lines)}</ul>' if lines else ""


def _before(cascade: object) -> str:
    """What had happened before, each with how sure that is."""
    return "".join(
        _row("before", f"{_text(claim.get('text', ''))} ({_text(claim.get('grade', 'possible'))})")
        for claim in _each(cascade)[:3]
    )


def _memory(holders: object) -> str:
    """Who held the memory, with the variables first."""
    lines = []
    for each in _each(holders)[:_HOLDERS]:
        size = each.get("bytes")
        told = format_bytes(size if isinstance(size, int) else None)
        detail = f", {_text(each['detail'], 200)}" if each.get("detail") else ""
        lines.append(_row("memory", f"{told} <b>{_text(each.get('name'), 60)}</b>{detail}"))
    return "".join(lines)


def _place(where: dict[str, Any]) -> str:
    parts = []
    if isinstance(where.get("step"), int) and where["step"]:
        parts.append(f"step {where['step']}")
    if isinstance(where.get("epoch"), int):
        parts.append(f"epoch {where['epoch'] + 1}")
    if where.get("cell"):
        parts.append(f"cell {printable(str(where['cell']), 60)}")
    if where.get("file") and is_cell(str(where["file"])):
        is_named = where.get("cell") and where.get("function") == "<module>"
        of = "" if is_named else f" of {printable(str(where.get('file_cell') or 'a cell'), 20)}"
        function = (
            ""
            if where.get("function") in (None, "<module>")
            else f" in {printable(str(where['function']), 30)}"
        )
        parts += [f"line {where['line']}{of}{function}"] if where.get("line") else []
    elif where.get("file"):
        line = f":{where['line']}" if where.get("line") else ""
        parts.append(f"{os.path.basename(printable(str(where['file']), 200))}{line}")
    return escape(", ".join(parts))


def _next(steps: object) -> str:
    if not isinstance(steps, list | tuple) or not steps:
        return ""
    first, *others = [_code(printable(str(step), _MOST_ADVICE)) for step in steps[:3]]
    more = "".join(f"<li>{step}</li>" for step in others)
    return f'<div style="margin-top:6px"><b>next</b> {first}</div>' + (
        f'<ul style="margin:2px 0;padding-left:20px">{more}</ul>' if more else ""
    )


def _code(text: str) -> str:
    """Words with `commands` between backticks."""
    parts = escape(text).split("`")
    return "".join(
        f'<code style="background:#8882;padding:1px 5px;border-radius:4px">{part}</code>'
        if number % 2
        else part
        for number, part in enumerate(parts)
    )


def _row(label: str, text: str) -> str:
    return f'<div><span style="opacity:.75">{label}</span> {text}</div>' if text else ""


def _text(value: object, most: int = 400) -> str:
    return escape(printable(str(value), most))


def _each(value: object) -> list[dict[str, Any]]:
    """Of a list in verdict.json, or a tuple in a verdict that was not written."""
    return mappings(list(value) if isinstance(value, tuple) else value)


# JupyterLab's page sets its own, proportional font for `<pre>` and breaks words anywhere: bars and tables fall apart.
_TEXT = "font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;word-break:normal;background:none"
_BOX_STYLE = ";border:1px solid #8884;border-radius:6px;padding:8px 12px"


def lines_html(text: str, *, boxed: bool = False) -> str:
    """The lines, in the page's own colours; `boxed` with a frame around them."""
    return f'<pre style="{_TEXT}{_BOX_STYLE if boxed else ""}">{escape(text)}</pre>'


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
    told = outcome.comparison(history, folder)
    if told is not None:
        text += ["", outcome.heading(told)]
        text += [
            f"  {what}: planned {wanted}, was {real}"
            for what, wanted, real in map(outcome.cells, told["rows"])
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
        lines += f'<p class="soft">and {left} before these: <code>buoy why --attempt N</code> shows each</p>'
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
    cause = mapping(verdict.get("cause"))
    words = mapping(cause.get("claim")).get("text", "")
    name = f"attempt {verdict.get('attempt', '?')}: {cause.get('id', 'unknown')}"
    return f'<p>{escape(printable(name, 60))} <span class="soft">{escape(printable(str(words), _LINE))}</span></p>'
