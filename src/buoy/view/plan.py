"""A plan as text (full, concise), as plain values, and as HTML for notebooks."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from dataclasses import asdict
from html import escape
from typing import Any

from buoy.errors import in_notebook
from buoy.estimate.result import Interval
from buoy.estimate.trace import LOSS
from buoy.planner.result import FITS, NOT, TIGHT, Answer, Need, Plan, Remedy
from buoy.units import format_bytes, format_duration
from buoy.view.verdict import terminal_width

SCHEMA = "buoy.plan/1"
_BAR = 30
_OWNERS = 4
_CODE = " " * 6
SOUGHT = (1 << 17) - 1
"""Larger batches are not sought."""
_GIVEN_BACK = ": where memory is short the allocator gives its cache back"
EXACT = {True: "exact", False: "not exact", None: "no change"}


def full(plan: Plan) -> str:
    """Everything a user wants to see; ends without a newline."""
    lines = [_headline(plan)]
    for answer in plan.answers:
        lines += ["", *answer_lines(plan, answer)]
    if plan.remedies:
        lines += ["", *_remedies(plan)]
    tier = tiers(plan)
    if tier:
        lines += ["", tier]
    lines += [f"note: {note}" for note in plan.notes]
    lines.append(f"hint: {hint(plan)}")
    return "\n".join(piece for line in lines for piece in _folded(line, _columns()))


def _columns() -> int | None:
    """What a terminal holds; text that goes elsewhere has its lines whole."""
    return terminal_width() if sys.stdout.isatty() else None


def _folded(line: str, room: int | None) -> list[str]:
    """The line in pieces that stay in its column; code is left whole, to be copied.

    >>> _folded("  batch      at most 57 in one piece; 64 in micro-batches of 32", 50)
    ['  batch      at most 57 in one piece; 64 in', '             micro-batches of 32']
    """
    if room is None or len(line) <= room or line.startswith(_CODE):
        return [line]
    labelled = re.match(r"  \S+(?: \S+)? {2,}", line)
    deep = len(labelled[0]) if labelled else len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(
        line, room, subsequent_indent=" " * deep, break_long_words=False, break_on_hyphens=False
    )


def concise(plan: Plan) -> str:
    """One line for each place, and one for what makes it fit."""
    lines = [f"{answer.target.id}: {_short(answer)}" for answer in plan.answers]
    if plan.cheapest is not None:
        lines.append(f"cheapest for {plan.remedies_for}: {_effect(plan.cheapest, compared_with(plan))}")
    return "\n".join(lines)


def as_values(plan: Plan) -> dict[str, Any]:
    """Plain values for JSON; unknown is null."""
    now = compared_with(plan) if plan.remedies else None
    return {
        "schema": SCHEMA,
        "source": plan.source,
        "batch": plan.batch,
        "fits": plan.fits,
        "micro_batch": plan.micro_batch,
        "answers": [_answer_values(answer) for answer in plan.answers],
        "remedies_for": plan.remedies_for,
        "remedies": [_remedy_values(remedy, now) for remedy in plan.remedies],
        "next_tier": None if plan.next_tier is None else _answer_values(plan.next_tier),
        "cheapest": None if plan.cheapest is None else _remedy_values(plan.cheapest, now),
        "notes": list(plan.notes),
        "facts": plan.facts,
    }


def hint(plan: Plan) -> str:
    """The one thing to do next."""
    if plan.fits and in_notebook():
        return 'it fits; `buoy.Run("runs/cats")` or `buoy.keras.Guard("runs/cats")` keeps it alive'
    if plan.fits:
        # A file that was run to its first step trains; one with a build function may not.
        script = shlex.quote(plan.source) if plan.source.endswith(".py") else "train.py"
        guard = "`buoy.Run` (Keras: `buoy.keras.Guard`) in it keeps it alive"
        return f"it fits; `buoy run {script}` records it and says why if it dies; {guard}"
    short = next((need for answer in plan.answers for need in answer.needs if need.verdict == NOT), None)
    if plan.cheapest is not None:
        lines = plan.cheapest.code.splitlines()
        return f"{plan.cheapest.title}: " + (lines[0] if len(lines) == 1 else "its code is above")
    if plan.micro_batch:
        return f"micro-batches of {plan.micro_batch}: `buoy.Run(..., micro_batch={plan.micro_batch})`"
    if short is not None and short.name == "time":
        return f"{short.note}; `buoy.Run` saves before the limit and resumes in the next session"
    if short is not None:
        return f"{short.name} runs out first: {short.note or _need(short)}"
    bigger = [answer.target.id for answer in plan.answers if answer.verdict == FITS]
    if bigger:
        return f"it fits {bigger[0]}"
    if all(answer.target.is_cpu for answer in plan.answers):
        most = min((answer.largest for answer in plan.answers if answer.largest), default=None)
        return f"a batch of at most {most}, or more RAM" if most else "a smaller model, or more RAM"
    return "try a smaller model, or a bigger card: `--on colab-a100`"


def _headline(plan: Plan) -> str:
    parameters = plan.facts.get("parameters")
    size = f", {parameters:,} parameters" if isinstance(parameters, int) else ""
    batch = f", batch {plan.batch}" if plan.batch is not None else ""
    autocast, pieces = plan.facts.get("autocast"), plan.facts.get("accumulate", 1)
    precision = f", {autocast}" if autocast else ""
    gathered = f", {pieces} x accumulated" if pieces > 1 else ""
    return f"{plan.source}{size}{batch}, {plan.facts.get('optimizer', 'optimizer')}{precision}{gathered}"


def title(answer: Answer) -> str:
    """The place and its verdict."""
    why = ""
    if answer.verdict in (TIGHT, NOT) and answer.memory_verdict != answer.verdict:
        why = f" ({', '.join(need.name for need in answer.needs if need.verdict == answer.verdict)})"
    return f"{answer.target.words}: {answer.verdict}{why}"


def answer_lines(plan: Plan, answer: Answer, bar: int = _BAR) -> list[str]:
    """One place's answer, its title first."""
    figure, memory = answer.estimate, answer.target.memory
    lines = [title(answer)]
    what = "RAM" if answer.target.is_cpu else "device memory"
    lines.append(
        f"  peak       {_range(answer.peak)} of {format_bytes(memory)} {what}: {answer.memory_verdict}"
        + _decided(answer.memory_verdict, answer.needed, _GIVEN_BACK)
    )
    whole = max(memory or 0, figure.total.likely)
    for part, size in sorted(figure.parts.items(), key=lambda item: -item[1]):
        if size * 200 >= figure.total.likely:
            lines.append(f"    {part:12} {format_bytes(size):>10}  {_bar(size, whole, bar)}")
    largest = [(name, size) for name, size in figure.owners[:_OWNERS] if size * 200 >= figure.total.likely]
    if largest:
        named = [(name if name == LOSS else f"`{name}`", size) for name, size in largest]
        owners = ", ".join(f"{name} {format_bytes(size)}" for name, size in named)
        lines.append(f"  owners     {owners}")
    if answer.largest is not None:
        lines.append(f"  batch      {_batch_words(plan, answer)}")
    elif answer.batch_basis:
        lines.append(f"  batch      the largest is not known: {answer.batch_basis}")
    if answer.target.count > 1:
        lines.append(f"  devices    {answer.target.count}: each holds the whole model; this is one of them")
    for need in answer.needs:
        lines.append(f"  {need.name:10} {_need(need)}")
        if need.verdict in (TIGHT, NOT):
            lines += [f"    {part}: {format_bytes(need.parts[part])}, {why}" for part, why in _largest(need)]
    if answer.step_seconds is not None:
        lines.append(f"  step       {_seconds(answer.step_seconds)} ({answer.step_basis})")
    else:
        lines.append(f"  step       n/a: {answer.step_basis}")
    return lines


def _decided(verdict: str, needed: int | None, more: str = "") -> str:
    """The number by which a verdict was decided, where the peak's interval alone does not say."""
    if needed is None:
        return ""
    words = {FITS: "in", TIGHT: "sure with"}.get(verdict, "takes at least")
    return f" ({words} {needed / 2**30:.2f} GiB{more if verdict == FITS else ''})"


def _batch_words(plan: Plan, answer: Answer) -> str:
    if not answer.largest:
        return "not even one sample fits"
    text = f"at most {answer.largest:,} in one piece"
    if answer.largest >= SOUGHT:
        text = f"{SOUGHT:,} or more in one piece"
    if answer.micro_batch and plan.batch and answer.micro_batch < plan.batch:
        text += f"; {plan.batch} in micro-batches of {answer.micro_batch}"
    elif answer.micro_batch == 0:
        text += "; no micro-batch fits with the kept gradients"
    return text


def _need(need: Need) -> str:
    show = format_bytes if need.unit == "bytes" else format_duration
    size = show(need.high) if need.low == need.high else f"{show(need.low)} to {show(need.high)}"
    limit = f" of {show(need.limit)}" if need.limit is not None else f", limit {show(None)}"
    parts = ""
    if len(need.parts) > 1:
        largest = sorted(need.parts.items(), key=lambda item: -item[1])[:3]
        parts = f" ({', '.join(f'{name} {show(size)}' for name, size in largest)})"
    return f"{size}{limit}: {need.verdict}{parts}" + (f"; {need.note}" if need.note else "")


def _largest(need: Need) -> list[tuple[str, str]]:
    """The parts that matter to a need that may not be met, with where their numbers come from."""
    return [(part, why) for part, why in need.why.items() if need.parts[part] * 20 >= need.high]


def _remedies(plan: Plan) -> list[str]:
    now = compared_with(plan)
    lines = [f"remedies for {plan.remedies_for}, tried on this step:"]
    helping = [remedy for remedy in plan.remedies if (remedy.saving(now) or 0) > 0.01]
    idle = [remedy for remedy in plan.remedies if remedy not in helping]
    for remedy in helping:
        lines += [f"  {_effect(remedy, now)}", *_indented(remedy)]
    untried = [remedy for remedy in idle if remedy.peak is None]
    idle = [remedy for remedy in idle if remedy.peak is not None]
    lines += [f"  {remedy.title}: {remedy.note}" for remedy in untried]
    if idle:
        lines.append("these take nothing from this peak:")
        lines += [f"  {_idle(remedy, now)}" for remedy in idle]
    if plan.cheapest is not None:
        lines += ["the cheapest that fits:", f"  {_effect(plan.cheapest, now)}"]
        # One remedy alone has its code above.
        lines += _indented(plan.cheapest) if plan.cheapest not in plan.remedies else []
    elif any(answer.memory_verdict != FITS for answer in plan.answers):
        lines.append("no combination tried makes it surely fit")
    return lines


def _indented(remedy: Remedy) -> list[str]:
    return [f"{_CODE}{line}".rstrip() for line in remedy.code.splitlines()]


def _idle(remedy: Remedy, now: Interval) -> str:
    found = f" ({change(remedy, now)})" if remedy.basis == "traced" else ""
    return f"{remedy.title}{found}{': ' + remedy.note if remedy.note else ''}"


def _effect(remedy: Remedy, now: Interval) -> str:
    return (
        f"{remedy.title}: {change(remedy, now)}, time {times(remedy)}, {EXACT[remedy.exact]}, {verdict_words(remedy)}"
        + (f" ({remedy.note})" if remedy.note else "")
    )


def verdict_words(remedy: Remedy) -> str:
    """With the number that decided it; where the host's RAM did, the note tells."""
    of_device = remedy.host is None or remedy.host.verdict == FITS
    return remedy.verdict + (_decided(remedy.verdict, remedy.needed) if of_device else "")


def change(remedy: Remedy, now: Interval) -> str:
    """A remedy's peak, and how much less it is."""
    saving = remedy.saving(now)
    if remedy.peak is None or saving is None:
        return "peak n/a"
    sign = "-" if saving >= 0 else "+"
    change = f"{sign}{abs(saving):.0%}" if round(saving, 2) else "the same"
    return f"peak {format_bytes(remedy.peak.likely)} ({change}, {remedy.basis})"


def times(remedy: Remedy) -> str:
    """How much longer a step takes with it."""
    if remedy.time is None:
        return "n/a"
    low, high = remedy.time
    return f"x{low:.2g}" if low == high else f"x{low:.2g}-{high:.2g}"


def tiers(plan: Plan) -> str:
    """What the dearer places would buy; empty where there is nothing to compare."""
    priced = [answer for answer in plan.answers if answer.target.units_per_hour is not None]
    if plan.next_tier is not None:
        priced.append(plan.next_tier)
    if len(priced) < 2:
        return ""
    lines = ["what each tier gives:"]
    for answer in sorted(priced, key=lambda answer: answer.target.units_per_hour or 0):
        words = [title(answer)]  # with its disk and host RAM: the next tier is shown nowhere else
        if answer.largest:
            words.append(f"batch up to {min(answer.largest, SOUGHT):,} in one piece")
        if answer.step_seconds:
            words.append(f"step {_seconds(answer.step_seconds)}")
        price = f"{answer.target.units_per_hour:g} compute units an hour (of {answer.target.units_date})"
        lines.append(f"  {', '.join([*words, price])}")
    return "\n".join(lines)


def _short(answer: Answer) -> str:
    text = f"{answer.verdict}, peak {_range(answer.peak)} of {format_bytes(answer.target.memory)}"
    if answer.largest is not None:
        more = " or more" if answer.largest >= SOUGHT else ""
        text += f", largest batch {min(answer.largest, SOUGHT)}{more}"
    if answer.verdict != answer.memory_verdict:
        text += "; " + "; ".join(
            f"{need.name} {_need(need)}" for need in answer.needs if need.verdict in (TIGHT, NOT)
        )
    return text


def compared_with(plan: Plan) -> Interval:
    """The peak that the remedies are compared with."""
    return next(answer.peak for answer in plan.answers if answer.target.id == plan.remedies_for)


def _range(interval: Interval) -> str:
    low, high = format_bytes(interval.low), format_bytes(interval.high)
    return low if low == high else f"{low} to {high}"


def _seconds(step: tuple[float, float]) -> str:
    low, high = format_duration(step[0]), format_duration(step[1])
    return low if low == high else f"{low} to {high}"


def _bar(size: int, whole: int, longest: int) -> str:
    return "#" * max(1, round(longest * size / max(1, whole)))


def _interval(interval: Interval | None) -> dict[str, int] | None:
    return None if interval is None else asdict(interval)


def _answer_values(answer: Answer) -> dict[str, Any]:
    figure, target = answer.estimate, answer.target
    return {
        "on": target.id,
        "device": target.device.id,
        "verdict": answer.verdict,
        "memory_verdict": answer.memory_verdict,
        "memory": target.memory,
        "peak": _interval(answer.peak),
        "allocated": _interval(figure.allocated),
        "reserved": _interval(figure.reserved),
        "parts": figure.parts,
        "owners": [{"module": name, "bytes": size} for name, size in figure.owners],
        "largest_batch": answer.largest,
        "micro_batch": answer.micro_batch,
        "step_seconds": answer.step_seconds,
        "step_basis": answer.step_basis,
        "batch_basis": answer.batch_basis,
        "needed": answer.needed,
        "units_per_hour": target.units_per_hour,
        "needs": [_need_values(need) for need in answer.needs],
    }


def _need_values(need: Need) -> dict[str, Any]:
    values = asdict(need)
    order = ("name", "low", "high", "limit", "unit", "verdict", "parts", "note", "why")
    return {name: values.get(name, need.verdict) for name in order}


def _remedy_values(remedy: Remedy, now: Interval | None) -> dict[str, Any]:
    return {
        "id": remedy.id,
        "title": remedy.title,
        "exact": remedy.exact,
        "basis": remedy.basis,
        "peak": _interval(remedy.peak),
        "saving": None if now is None else remedy.saving(now),
        "verdict": remedy.verdict,
        "needed": remedy.needed,
        "time": remedy.time,
        "time_basis": remedy.time_basis,
        "code": remedy.code,
        "note": remedy.note,
        "host_ram": None if remedy.host is None else _need_values(remedy.host),
    }


_FONT = "font:14px/1.5 system-ui,sans-serif"
_CARD_BAR = 12
_EDGES = {FITS: "#1a7f4b", TIGHT: "#9a6700", NOT: "#b3261e"}
_CELL = "padding:4px 10px;vertical-align:top;border-top:1px solid #8884"
_CODE_STYLE = (
    "display:block;font:12px/1.45 ui-monospace,Menlo,Consolas,monospace;"
    "white-space:pre-wrap;overflow-wrap:anywhere"
)
# Longer code is folded up: a click shows it.
_SHORT = 2


def html(plan: Plan) -> str:
    """A small card for each place, and a table of what was tried; the page's own colours, no script."""
    from buoy.view.cards import lines_html

    cards = []
    for answer in plan.answers:
        edge = _EDGES.get(answer.verdict, "#666")
        body = "\n".join(answer_lines(plan, answer, _CARD_BAR)[1:])
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
    block = f'<code style="{_CODE_STYLE}">{escape(remedy.code)}</code>'
    if len(remedy.code.splitlines()) <= _SHORT:
        return block
    return f"<details><summary>code</summary>{block}</details>"


def _words(text: str) -> str:
    """A sentence, its `code` as such."""
    return re.sub(r"`([^`]+)`", r'<code style="overflow-wrap:anywhere">\1</code>', escape(text))
