"""A verdict as a small card of HTML: for the report and for a notebook. No script, no address, light and dark."""

from __future__ import annotations

import os
from html import escape
from typing import Any

from buoy.text import printable
from buoy.units import format_bytes, format_duration
from buoy.verdict.traces import is_cell

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
    cause = _mapping(verdict.get("cause"))
    claim = _mapping(cause.get("claim"))
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
        _evidence(claim, _mapping(verdict.get("mechanism"))),
        _before(cause.get("cascade")),
        _row("where", _place(_mapping(verdict.get("where")))),
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
    for item in [item for item in claim.get("evidence") or () if isinstance(item, dict)][:4]:
        source = f' <span style="opacity:.75">({_text(item["source"])})</span>' if item.get("source") else ""
        lines.append(f"<li>{_text(item.get('text', ''), _READING)}{source}</li>")
    known = " ".join(lines)
    if mechanism.get("text") and _text(mechanism["text"]) not in known:
        lines.append(f'<li><span style="opacity:.75">mechanism:</span> {_text(mechanism["text"])}</li>')
    return f'<ul style="margin:4px 0;padding-left:20px">{"".join(lines)}</ul>' if lines else ""


def _before(cascade: object) -> str:
    """What had happened before, each with how sure that is."""
    claims = (
        [claim for claim in cascade if isinstance(claim, dict)] if isinstance(cascade, list | tuple) else []
    )
    return "".join(
        _row("before", f"{_text(claim.get('text', ''))} ({_text(claim.get('grade', 'possible'))})")
        for claim in claims[:3]
    )


def _memory(holders: object) -> str:
    """Who held the memory, with the variables first."""
    known = [each for each in holders if isinstance(each, dict)] if isinstance(holders, list | tuple) else []
    lines = []
    for each in known[:_HOLDERS]:
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


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
