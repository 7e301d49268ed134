"""`buoy why`: what killed the last attempt, how sure that is, the evidence, and what to do next."""

from __future__ import annotations

import sys

from buoy.cli.parser import Parser
from buoy.errors import ExitCode
from buoy.verdict.model import Verdict

_DESCRIPTION = "Say what killed the last attempt, how sure that is, the evidence, and what to do next."
_EPILOG = "exit codes: 0 a verdict, 1 none (the cause is unknown, or the training is running), 2 an error"


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    chosen = _parser().parse_args(arguments)
    from buoy.verdict import why

    verdict = why(chosen.run, chosen.attempt)
    if chosen.format == "json":
        from buoy.text import json_text

        sys.stdout.write(json_text(verdict.to_json()) + "\n")
    else:
        from buoy.view import wants_colour
        from buoy.view.verdict import render

        sys.stdout.write(render(verdict, chosen.format, colour=wants_colour(sys.stdout)) + "\n")
        if chosen.format == "full":
            sys.stderr.write(f"hint: `buoy explain {verdict.cause.id}` says what that is\n")
    return int(ExitCode.OK if _says_something(verdict) else ExitCode.FOUND)


def _says_something(verdict: Verdict) -> bool:
    return verdict.cause.id not in ("unknown", "recorder-lost", "still-running")


def _parser() -> Parser:
    parser = Parser(
        "buoy why", "buoy why [RUN] [--attempt N] [--format full|concise|json]", _DESCRIPTION, _EPILOG
    )
    parser.add_run()
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt (default: the last)")
    parser.add_argument("--format", choices=("full", "concise", "json"), default="full",
                        help="full: at most 25 lines; concise: at most 6; json: for programs")  # fmt: skip
    return parser
