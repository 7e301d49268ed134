"""`buoy report`: the run on one page of HTML."""

from __future__ import annotations

import os
import sys

from buoy.cli.parser import Parser
from buoy.errors import ExitCode

_DESCRIPTION = (
    "Write one self-contained HTML page about a run: timelines, checkpoints, verdicts, environment."
)


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    chosen = _parser().parse_args(arguments)
    from buoy.text import printable
    from buoy.verdict.select import asked_for
    from buoy.view.history import read

    history = read(asked_for(chosen.run).run)  # a run without an attempt is an error with a hint
    if chosen.format == "json":
        from buoy.text import json_text
        from buoy.view.report import as_json

        text = json_text(as_json(history)) + "\n"
    else:
        from buoy.view.report import page

        text = page(history)
    default = None if chosen.format == "json" else os.path.join(history.folder, "report.html")
    target = chosen.output or default
    if target is None or target == "-":
        sys.stdout.write(text)
        return int(ExitCode.OK)
    from buoy.view.report import write

    size = write(target, text)
    sys.stderr.write(f"buoy: wrote {printable(target)} ({size // 1024} KiB); open it in a browser\n")
    return int(ExitCode.OK)


def _parser() -> Parser:
    parser = Parser("buoy report", "buoy report [RUN] [-o FILE] [--format html|json]", _DESCRIPTION)
    parser.add_run()
    parser.add_argument("-o", "--output", metavar="FILE", help="`-` is stdout (default: RUN/report.html)")
    parser.add_argument(
        "--format", choices=("html", "json"), default="html", help="json: the same numbers, on stdout"
    )
    return parser
