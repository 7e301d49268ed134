"""`buoy runs`: the runs below a folder; `buoy runs rm` removes one after asking."""

from __future__ import annotations

import os
import shlex
import sys

from buoy.cli.parser import Parser, agreed
from buoy.errors import ExitCode, RunFolderError, UsageError

_DESCRIPTION = "List the runs below a folder, newest first; `buoy runs rm RUN` removes one after asking."


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    if arguments[:1] == ["rm"]:
        return _remove(arguments[1:])
    chosen = _parser().parse_args(arguments)
    from buoy.text import json_text, printable
    from buoy.view.runs import SCHEMA, listed, table

    folder = os.path.abspath(chosen.folder or ".")
    if not os.path.isdir(folder):
        raise RunFolderError("no such folder", received=chosen.folder, expected="a folder that holds runs",
                             hint="`buoy runs` looks here and in `runs/`")  # fmt: skip
    runs = listed(folder)
    if chosen.format == "json":
        sys.stdout.write(json_text({"schema": SCHEMA, "runs": runs}) + "\n")
    elif runs:
        sys.stdout.write(table(runs) + "\n")
    else:
        sys.stderr.write(
            f"buoy: no run in {printable(folder)} or its runs/; `buoy run -- python train.py` makes one\n"
        )
    return int(ExitCode.OK)


def _remove(arguments: list[str]) -> int:
    parser = Parser("buoy runs rm", "buoy runs rm RUN [--yes]", "Remove a run folder, after asking.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    chosen = parser.parse_args(arguments)
    from buoy.flight.attempt import attempt_numbers, is_run
    from buoy.text import printable
    from buoy.units import format_bytes
    from buoy.view.runs import describe, recorded_in, shown

    folder = chosen.run.rstrip("/") if os.path.lexists(chosen.run) else os.path.join("runs", chosen.run)
    if os.path.islink(folder) or not is_run(folder):
        raise RunFolderError(
            "this is not a run folder, nothing was removed",
            received=chosen.run,
            expected="a folder (no link) that `buoy run`, `buoy.watch()` or `buoy.Run` made",
            hint="`buoy runs` lists them",
        )
    run = describe(os.path.abspath(folder))
    if run["alive"] and (attempt_numbers(folder) or not run["finished"]):
        raise UsageError("this run is still being written, nothing was removed", received=chosen.run,
                         expected="a run that has ended", hint="stop the training first")  # fmt: skip
    holds = f"{_counted(run['attempts'], 'attempt')}, {_counted(run['checkpoints'], 'checkpoint')}"
    what = f"{printable(folder)} ({format_bytes(run['bytes'])}, {holds})"
    if run["checkpoints"] and not run["finished"] and not chosen.yes:
        raise UsageError(
            "this run is unfinished, nothing was removed",
            received=what,
            expected=f"a finished run: step {run['checkpoint_step']} in it is the only checkpoint to resume from",
            hint=f"`buoy runs rm {shlex.quote(chosen.run)} --yes` removes it all the same",
        )
    others = [shown(other) for other in recorded_in(folder)]
    if others:
        named = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        sys.stderr.write(
            f"buoy: {printable(folder)} holds the recording of {named}: `buoy why` and `buoy report` will know nothing "
            "of those attempts; their checkpoints stay\n"
        )
    if not chosen.yes and not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(
            "no terminal to ask on: nothing was removed",
            received=f"{what}, without a terminal",
            expected="a terminal in which to answer, or `--yes`",
            hint=f"`buoy runs rm {shlex.quote(chosen.run)} --yes` removes it without asking",
        )
    if not chosen.yes and not agreed(f"remove {what}?"):
        sys.stderr.write("buoy: nothing was removed\n")
        return int(ExitCode.FOUND)
    import shutil

    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise RunFolderError(
            "the run could not be removed completely",
            received=f"{error.filename or folder}: {error.strerror}",
            expected="a folder that may be changed",
            hint="what could be removed of it is gone; the rest can only be removed by its owner",
        ) from None
    sys.stderr.write(f"buoy: removed {what}\n")
    return int(ExitCode.OK)


def _counted(number: int | None, what: str) -> str:
    amount = "an unknown number of" if number is None else number or "no"
    return f"{amount} {what}{'s' if number != 1 else ''}"


def _parser() -> Parser:
    parser = Parser(
        "buoy runs", "buoy runs [DIR] [--format text|json]  |  buoy runs rm RUN [--yes]", _DESCRIPTION
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", help="where to look (default: here and in runs/)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: for programs")
    return parser
