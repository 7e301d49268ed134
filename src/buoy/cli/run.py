"""`buoy run`: run a training under the flight recorder."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from buoy.cli.arguments import Parser
from buoy.errors import BuoyError, ExitCode, LaunchError, UsageError

_DESCRIPTION = """\
Run a training under the flight recorder. The script is not changed, its output is not touched, and its exit code is
returned (128+N for signal N). If it dies, what killed it is printed on stderr; `buoy why` says it again in full."""

_EPILOG = """\
exit codes: the command's own; 125 buoy could not start, 126 not executable, 127 not found.
BUOY_HANG_SECONDS=N tells a hang after N seconds without a step instead of the built-in patience."""


def execute(arguments: list[str]) -> int:
    """Parse, check that the command can be started, and supervise it."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        return _run(_parser().parse_args(own), arguments[len(own) + 1 :])
    except LaunchError:
        raise
    except BuoyError as error:
        error.exit_code = ExitCode.RUN_FAILED  # the command did not run: its own codes stay free
        raise


def _run(options: argparse.Namespace, command: list[str]) -> int:
    from buoy.supervisor.run import Order, supervise
    from buoy.supervisor.start import default_run_folder
    from buoy.units import parse_duration

    if not command:
        raise UsageError(
            "no command to run",
            expected="the command after `--`",
            hint="`buoy run -- python train.py`",
        )
    _check_command(command[0])
    folder = options.run or default_run_folder(command)
    if options.restart < 0:
        raise UsageError("a negative number of restarts", received=str(options.restart), expected="0 or more",
                         hint="`--restart 3`")  # fmt: skip
    return supervise(
        Order(
            command,
            folder,
            mirror=options.mirror,
            time_limit=parse_duration(options.time_limit) if options.time_limit else None,
            restart=options.restart,
            say=_say,
        )
    )


def _check_command(name: str) -> None:
    """Say early what exec would say later, before anything is written."""
    if shutil.which(name) is not None:
        return
    path = shutil.which(name, mode=os.F_OK)
    from buoy.supervisor.launch import launch_error

    raise launch_error(name, 13 if path is not None else 2)


def _say(text: str) -> None:
    try:
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody listens; the training goes on


def _parser() -> Parser:
    parser = Parser("buoy run", "buoy run [options] -- COMMAND [ARGUMENTS]", _DESCRIPTION, _EPILOG)
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/<script>)")
    parser.add_argument(
        "--mirror", metavar="DIR", help="a second home for the log's tail, such as a mounted drive"
    )
    parser.add_argument(
        "--time-limit",
        metavar="12h",
        help="when the session ends (default: the platform's limit, where known)",
    )
    parser.add_argument(
        "--restart",
        metavar="N",
        type=int,
        default=0,
        help="start again up to N times after a death that can be survived",
    )
    return parser
