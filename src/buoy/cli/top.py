"""`buoy top`: where the run is, as it goes on."""

from __future__ import annotations

import os
import sys
import time

from buoy.cli.arguments import Parser
from buoy.errors import ExitCode

_DESCRIPTION = (
    "Show where a run is: step rate, RAM, VRAM, disk and time against their limits, checkpoints, warnings."
)
_LIVE_SECONDS, _PLAIN_SECONDS = 1.0, 15.0


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    chosen = _parser().parse_args(arguments)
    from buoy.flight.attempt import find_attempt
    from buoy.view.now import lines, state

    if chosen.format == "json":
        import json

        sys.stdout.write(json.dumps(state(find_attempt(chosen.run))) + "\n")
        return int(ExitCode.OK)
    if chosen.once:
        sys.stdout.write("\n".join(lines(state(find_attempt(chosen.run)))) + "\n")
        return int(ExitCode.OK)
    find_attempt(chosen.run)  # a wrong name is an error now, not a line in a live view
    try:
        _follow_live(chosen.run) if _is_real_terminal() else _follow_plain(chosen.run)
    except KeyboardInterrupt:
        pass
    return int(ExitCode.OK)


def _follow_live(run: str | None) -> None:
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        sys.stderr.write("buoy: `pip install rich` gives a live view; plain lines until then\n")
        return _follow_plain(run)
    from buoy.flight.attempt import find_attempt
    from buoy.view.now import lines, state

    with Live(Text(""), auto_refresh=False, screen=True) as live:
        while True:
            now = state(find_attempt(run))  # looked up again: a restart is a new attempt
            text = [*lines(now), "", "Ctrl-C ends this view; the training goes on"]
            live.update(Text("\n".join(text)), refresh=True)
            time.sleep(_LIVE_SECONDS)


def _follow_plain(run: str | None) -> None:
    """Where there is no terminal (Colab's `!`), few lines: what is printed there is kept for ever."""
    from buoy.flight.attempt import find_attempt
    from buoy.view.now import lines, state

    while True:
        now = state(find_attempt(run))
        sys.stdout.write(" | ".join(" ".join(line.split()) for line in lines(now) if line.strip()) + "\n")
        sys.stdout.flush()
        if now["status"] not in ("running", "no sample yet"):
            return
        time.sleep(_PLAIN_SECONDS)


def _is_real_terminal() -> bool:
    if "google.colab" in sys.modules or os.environ.get("COLAB_RELEASE_TAG"):
        return False  # Colab's shell says it is a terminal and cannot redraw
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _parser() -> Parser:
    parser = Parser("buoy top", "buoy top [RUN] [--once] [--format text|json]", _DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="run folder (default: follows the newest run)")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: the numbers, once")
    return parser
