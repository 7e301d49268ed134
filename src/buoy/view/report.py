"""`buoy report`: a run on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable
from html import escape
from typing import Any

from buoy import __version__
from buoy.checkpoint.store import Entry, Store
from buoy.errors import UsageError, in_notebook
from buoy.fields import mapping
from buoy.machine.files import write_whole
from buoy.text import json_text, printable
from buoy.units import format_bytes, format_duration
from buoy.view import cards, chart, outcome
from buoy.view import history as changes
from buoy.view.history import LEAST_SECONDS, History, Life, without_places

SCHEMA = "buoy.report/1"
_MOST_ROWS = 12
_CELL = re.compile(r"In \[\d*\]")
_KEY = {
    "save": "checkpoint",
    "warning": "warning",
    "adapted": "adapted",
    "end": "end",
    "death": "death",
    "limit": "limit",
}


def page(history: History) -> str:
    """The whole run as one HTML file: no request leaves it, and without JavaScript it is a still picture."""
    groups = _groups(history)
    script = _static("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    data = json_text({key: _numbers(axis) for key, (_, axis) in groups.items()}, None)
    body = "".join(
        [
            _header(history),
            cards.cards([_verdict(history, life) for life in history.lives if life.verdict is not None]),
            *(_group(key, title, axis) for key, (title, axis) in groups.items()),
            _attempts(history),
            _planned(history),
            _adapted(history),
            _checkpoints(history),
            _environment(history),
            _missing(history),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(history.name)} · buoy</title><style>{_static('report.css')}</style></head>"
        f"<body>{body}"
        f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def as_json(history: History) -> dict[str, Any]:
    """The numbers of the page, for programs."""
    return {
        "schema": SCHEMA,
        "buoy": __version__,
        "name": history.name,
        "timelines": {key: _numbers(axis) for key, (_, axis) in _groups(history).items()},
        "attempts": [
            {
                "number": life.number,
                "seconds": life.seconds,
                "verdict": _verdict(history, life) if life.verdict is not None else None,
                "missing": life.missing,
                "environment": _facts(life),
            }
            for life in history.lives
        ],
        "checkpoints": [
            {
                "run": name,
                "step": entry.step,
                "time": entry.time,
                "bytes": entry.bytes,
                "complete": entry.complete,
            }
            for name, entry in _entries(history)
        ],
        "plan": outcome.comparison(history),
        "adapted": [
            {"attempt": each.attempt, "at": each.at, "step": each.step, "text": each.text}
            for each in changes.changes(history)
        ],
        "micro_batches": changes.sizes(history.kept),
    }


def write(target: str, text: str) -> int:
    """Whole or not at all: a page that a browser has open is never half there; the bytes that were written."""
    data = text.encode("utf-8", "replace")
    try:
        write_whole(target, data, mode=0o666)  # a page for others too
    except OSError as error:
        raise UsageError(
            "cannot write the report",
            received=f"{target} ({error.strerror})",
            expected="a file in a folder that can be written",
            hint="`!buoy report RUN -o FILE` writes it elsewhere"
            if in_notebook()
            else "choose another with `-o FILE`",
        ) from error
    return len(data)


def _groups(history: History) -> dict[str, tuple[str, chart.Axis]]:
    groups = {"whole": ("The whole run", chart.whole(history))} if history.lives else {}
    end = chart.tail(history)
    if end is not None:
        groups["tail"] = ("The last ten minutes", end)
    return groups


def _numbers(axis: chart.Axis) -> dict[str, Any]:
    return {
        "buckets": axis.buckets,
        "lives": [
            {
                "number": stretch.life.number,
                "first": stretch.first,
                "count": stretch.count,
                "begin": round(stretch.begin, 1),
                "seconds": round(stretch.seconds, 1),
            }
            for stretch in axis.stretches
        ],
        "charts": [chart.numbers(item) for item in chart.charts(axis)],
        "marks": chart.marks(axis),
    }


def _header(history: History) -> str:
    lives = history.lives
    ran = format_duration(sum(life.seconds for life in lives))
    state = "nothing was recorded yet"
    if lives:
        ran = f"{ran} recorded" if any(life.last for life in lives) else "nothing measured"
        state = f"{len(lives)} attempt{'s' if len(lives) > 1 else ''}, {ran}"
        if lives[-1].alive:
            state += ", still running when this page was made"
    made = time.strftime("%Y-%m-%d %H:%M")
    return f'<h1>{escape(history.name)}</h1><p class="soft">{escape(state)} · page of {made}</p>'


def _verdict(history: History, life: Life) -> dict[str, Any]:
    told: dict[str, Any] = without_places(life.verdict, life.about, history.folder)
    where = mapping(told.get("where"))
    if where.get("cell"):
        number = _CELL.match(str(where["cell"]))  # what follows it is the user's own code
        told["where"] = {**where, "cell": number[0] if number is not None else None}
    return told


def _group(key: str, title: str, axis: chart.Axis) -> str:
    marks = chart.marks(axis)
    pictures = chart.charts(axis)
    if not pictures:
        return (
            f'<h2>{escape(title)}</h2><p class="missing">Nothing was measured: the log holds no sample.</p>'
        )
    figures = "".join(_figure(item, axis, marks) for item in pictures)
    kinds = {mark["kind"] for mark in marks} | (
        {"limit"} if any(item.shows_limit for item in pictures) else set()
    )
    legend = "".join(
        f'<span class="key-{kind}" style="color:var(--{_tone(kind)})">{words}</span>'
        for kind, words in _KEY.items()
        if kind in kinds
    )
    return (
        f'<section id="{key}"><h2>{escape(title)}</h2><p class="key soft">{legend}</p>{figures}{_lives(axis)}'
        '<p class="soft">Drag to zoom, double-click to see all again. By keyboard: arrows, + and -, Escape.</p>'
        "</section>"
    )


def _tone(kind: str) -> str:
    return {"death": "limit", "end": "save"}.get(kind, kind)


def _figure(item: chart.Chart, axis: chart.Axis, marks: list[dict[str, Any]]) -> str:
    tell = chart.words(item.unit)
    highest = max(high for value in item.values if value for high in value)
    lowest = min(low for value in item.values if value for low in value)
    said = f"lowest {tell(lowest)}" if item.id.endswith("_free") else f"highest {tell(highest)}"
    if item.limit is not None:
        said += f" of {tell(item.limit)} ({100 * highest / item.limit:.0f} %)"
    labels = "".join(f'<i style="top:{top}%">{escape(label)}</i>' for top, label in chart.ticks(item))
    return (
        f"<figure><figcaption>{escape(item.title)}<span>{said}</span></figcaption>"
        f'<div class="plot"><div class="ticks">{labels}</div>{chart.svg(item, axis, marks)}</div>'
        f"{_untimed(axis) if item.id == 'step_seconds' else ''}</figure>"
    )


def _untimed(axis: chart.Axis) -> str:
    """Which attempts have no curve beside those that have one, and why."""
    numbers = [str(stretch.life.number) for stretch in axis.stretches if stretch.life.is_untimed]
    if not numbers:
        return ""
    named = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return (
        f'<p class="soft">Not known for attempt{"s" if len(numbers) > 1 else ""} {named}: '
        f"that takes {LEAST_SECONDS:.0f} s of steps without a pause.</p>"
    )


def _lives(axis: chart.Axis) -> str:
    labels = []
    for stretch in axis.stretches:
        left, wide = 100 * stretch.first / axis.buckets, 100 * stretch.count / axis.buckets
        words = str(stretch.life.number) + (f": {format_duration(stretch.seconds)}" if wide > 9 else "")
        labels.append(f'<b style="left:{left:.1f}%;width:{wide:.1f}%">{words}</b>')
    return f'<div class="lives"><div>attempt</div><div>{"".join(labels)}</div></div>'


def _table(title: str, heads: list[str], rows: list[list[str]], more: str = "") -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>{more}'


def _attempts(history: History) -> str:
    if len(history.lives) < 2:
        return ""
    rows = []
    for life in reversed(history.lives[-_MOST_ROWS:]):
        said = life.cause or ("running" if life.alive else "n/a")
        own = mapping(mapping(life.verdict).get("where")).get("step")
        # Of a kernel the last step may be another run's.
        step = own if own is not None else life.last.get("step")
        rows.append(
            [
                str(life.number),
                _date(life.about.get("wall")),
                format_duration(life.seconds if life.last else None),
                str(step if step is not None else "n/a"),
                said,
            ]
        )
    return _table("Attempts", ["", "began", "ran", "last step", "ended"], rows)


def _entries(history: History) -> list[tuple[str, Entry]]:
    """The checkpoints with their run's name: a notebook's kernel may have trained several."""
    return [(os.path.basename(home), entry) for home in history.homes for entry in Store(home).list()]


def _checkpoints(history: History) -> str:
    entries = _entries(history)
    rows = [
        [
            printable(name, 40),
            str(entry.step),
            _date(entry.time),
            format_bytes(entry.bytes),
            str(entry.about.get("reason") or "n/a"),
            _metrics(entry),
        ]
        for name, entry in entries[:_MOST_ROWS]
    ]
    left = len(entries) - len(rows)
    more = f'<p class="soft">and {left} older ones</p>' if left > 0 else ""
    heads = ["run", "step", "saved", "size", "because of", "metrics"]
    if [os.path.realpath(home) for home in history.homes] == [os.path.realpath(history.folder)]:
        heads, rows = heads[1:], [row[1:] for row in rows]
    return _table("Checkpoints", heads, rows, more)


def _metrics(entry: Entry) -> str:
    return ", ".join(
        f"{printable(str(name), 30)} {value:.5g}"
        for name, value in mapping(entry.about.get("metrics")).items()
        if isinstance(value, int | float)
    )


def _planned(history: History) -> str:
    told = outcome.comparison(history)
    if told is None:
        return ""
    rows = [outcome.cells(row) for row in told["rows"]]
    note = f'<p class="soft">{escape(outcome.heading(told))}</p>'
    return _table("Plan and reality", ["", "planned", "at most in the run"], rows, note)


def _adapted(history: History) -> str:
    made = changes.changes(history)
    rows = [
        [
            str(each.attempt),
            format_duration(each.at) if each.at is not None else "n/a",
            str(each.step) if each.step is not None else "",
            each.text,
        ]
        for each in made[-_MOST_ROWS:]
    ]
    left = len(made) - len(rows)
    more = f'<p class="soft">and {left} before these</p>' if left > 0 else ""
    return _table("What was adapted", ["attempt", "after", "step", ""], rows, more) + _sizes(history)


def _sizes(history: History) -> str:
    rows = [
        [str(line["step"]), str(line.get("samples") or line.get("parts") or "the whole batch")]
        for line in changes.sizes(history.kept)[-_MOST_ROWS:]
    ]
    return _table("Micro-batches", ["from step", "samples at once"], rows)


def _environment(history: History) -> str:
    if not history.lives:
        return ""
    rows = [[name, value] for name, value in _facts(history.lives[-1]).items()]
    return _table("Environment", ["", ""], rows)


def _facts(life: Life) -> dict[str, str]:
    """What the machine was. Only these keys: a report is passed on, so nothing else of attempt.json goes in."""
    about, limits = life.about, life.limits
    facts = {
        "platform": about.get("platform"),
        "RAM": _said(limits.get("ram"), format_bytes),
        "disk": _said(limits.get("disk"), format_bytes),
        "CPUs": limits.get("cpus"),
        "GPUs": ", ".join(str(gpu.get("name")) for gpu in life.gpus),
        "time limit": _said(about.get("time_limit"), format_duration),
        "Python": about.get("python"),
        "kernel": about.get("kernel"),
        "buoy": about.get("buoy"),
    }
    return {name: printable(str(value), 120) for name, value in facts.items() if value not in (None, "")}


def _said(value: object, tell: Callable[[float], str]) -> str | None:
    return tell(value) if isinstance(value, int | float) else None


def _missing(history: History) -> str:
    notes = list(history.missing)
    notes += [f"attempt {life.number}: {note}" for life in history.lives for note in life.missing]
    if not history.lives:
        notes.append("this run has no attempt")
    if len(history.lives) > chart.MOST_LIVES:
        notes.append(f"only the newest {chart.MOST_LIVES} of {len(history.lives)} attempts are drawn")
    if not notes:
        return ""
    return "<h2>What is missing</h2>" + "".join(
        f'<p class="missing">{escape(note)}</p>' for note in notes[:20]
    )


def _date(wall: object) -> str:
    if not isinstance(wall, int | float) or not 0 < wall < 4e9:
        return "n/a"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall))


def _static(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), "static", name), encoding="utf-8") as file:
        return file.read()
