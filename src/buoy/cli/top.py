"""`buoy top`: where the run is, live."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from buoy.cli.parser import Parser
from buoy.errors import ExitCode

if TYPE_CHECKING:
    from buoy.flight.attempt import Attempt

_DESCRIPTION = (
    "Show where a run is: step rate, RAM, VRAM, disk and time against their limits, checkpoints, warnings."
)
_LIVE_SECONDS, _PLAIN_SECONDS = 1.0, 15.0
_BESIDE_BAR = 58
"""Columns of a line that are not the bar: name, figures, and the time that is left."""
_FIGURES = 41
"""The same without that time: a narrow terminal cuts it off before the figures."""
_LEAST_BAR = 6


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    chosen = _parser().parse_args(arguments)
    from buoy.view.top import lines

    now = _now(chosen.run)  # a wrong name is an error now, not a line in a live view
    if chosen.format == "json":
        from buoy.text import json_text

        sys.stdout.write(json_text(now, None) + "\n")
        return int(ExitCode.OK)
    if chosen.once:
        sys.stdout.write("\n".join(lines(now)) + "\n")
        return int(ExitCode.OK)
    try:
        _follow_live(chosen.run) if _is_real_terminal() else _follow_plain(chosen.run)
    except KeyboardInterrupt:
        pass
    return int(ExitCode.OK)


def _now(run: str | None) -> dict[str, Any]:
    """Looked up each time: a restart is a new attempt."""
    from buoy.verdict.select import asked_for
    from buoy.view.top import state_of

    return state_of(asked_for(run))


def _follow_live(run: str | None) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        sys.stderr.write("buoy: `pip install rich` gives a live view; plain lines until then\n")
        return _follow_plain(run)

    console = Console()
    with Live("", console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_frame(_now(run), console.width, console.height), refresh=True)
            time.sleep(_LIVE_SECONDS)


def _frame(now: dict[str, Any], columns: int, rows: int) -> Any:
    """One screenful: bars as wide as there is room, lines cut instead of wrapped, as many events as fit."""
    from rich.text import Text

    from buoy.view.top import LIVES, lines

    bar = min(40, columns - _BESIDE_BAR)
    if bar < _LEAST_BAR:
        bar = max(0, min(_LEAST_BAR, columns - _FIGURES))
    leave = "Ctrl-C ends this view" + ("; training continues" if now["status"] in LIVES else "")
    text = _fitting([[*lines(now, bar, events), "", leave] for events in range(rows, -1, -1)], columns, rows)
    frame = Text("\n".join(text), no_wrap=True, overflow="ellipsis")
    frame.stylize("bold", 0, len(text[0]))
    # Only the bars have a colour: words in green or yellow cannot be read on every background.
    for found in re.finditer(r"\[(#+)\.*\].*?(\d+) %", frame.plain):
        share = int(found[2])
        colour = "red" if share >= 90 else "yellow" if share >= 75 else "green"
        frame.stylize(colour, *found.span(1))
    return frame


def _fitting(choices: list[list[str]], columns: int, rows: int) -> list[str]:
    """The first that fits with its long lines folded; else the last with them cut: what is live must not scroll."""
    from textwrap import wrap

    for text in choices:
        folded = [part for line in text for part in wrap(line, columns, subsequent_indent="  ") or [""]]
        if len(folded) <= rows:
            return folded
    return choices[-1]


def _follow_plain(run: str | None) -> None:
    """Where there is no terminal (Colab's `!`), few lines: what is printed there is kept for ever."""
    from buoy.flight.attempt import find_attempt
    from buoy.view.top import lines, may_change

    while True:
        now = _now(run)
        sys.stdout.write(" | ".join(" ".join(line.split()) for line in lines(now) if line.strip()) + "\n")
        sys.stdout.flush()
        if not may_change(now) or _is_below(find_attempt(run)):
            return
        time.sleep(_PLAIN_SECONDS)


def _is_below(attempt: Attempt) -> bool:
    """Whether the watched process waits for us: a notebook's `!buoy top` about its own kernel would never end."""
    from buoy.machine.files import read_json
    from buoy.verdict.notebook import waits_for_us

    return waits_for_us((read_json(os.path.join(attempt.folder, "attempt.json")) or {}).get("pid"))


def _is_real_terminal() -> bool:
    if os.environ.keys() & {"COLAB_RELEASE_TAG", "JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE"}:
        return False  # a notebook's `!` says it is a terminal and cannot redraw
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _parser() -> Parser:
    parser = Parser("buoy top", "buoy top [RUN] [--once] [--format text|json]", _DESCRIPTION)
    parser.add_run()
    parser.add_argument("--once", action="store_true", help="print it once and exit")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: the numbers, once")
    return parser
