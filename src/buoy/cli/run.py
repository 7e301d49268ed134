"""`buoy run`: run a training under the flight recorder."""

from __future__ import annotations

import argparse
import os
import sys

from buoy.cli.parser import Parser
from buoy.errors import BuoyError, ExitCode, LaunchError, UsageError, need_linux

_DESCRIPTION = """\
Run a training under the flight recorder. The script is not changed, its output is not touched, and its exit code is
returned (128+N for signal N). If it dies, what killed it is printed on stderr; `buoy why` says it again in full."""

_EPILOG = """\
`train.py` and `-m package.train` run in the Python that buoy runs in. What comes after them is theirs.
If buoy itself is killed, the command keeps running and is still recorded: to end both, signal the command.
exit codes: the command's own; 125 buoy could not start, 126 not executable, 127 not found.
BUOY_HANG_SECONDS=N looks for a hang after N idle seconds without a step instead of the built-in patience."""


def execute(arguments: list[str]) -> int:
    """Parse, check that the command can be started, and supervise it."""
    parser = _parser()
    own, command = _divided(parser, arguments)
    try:
        return _run(parser.parse_args(own), command)
    except LaunchError:
        raise
    except BuoyError as error:
        error.exit_code = ExitCode.RUN_FAILED  # the command did not run: its own codes stay free
        raise


def _divided(parser: Parser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command: what comes after `--`, or begins with the first word that is no option.

    >>> _divided(_parser(), ["--restart", "2", "train.py", "--lr", "1"])
    (['--restart', '2'], ['train.py', '--lr', '1'])
    """
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] != "-m":
        if arguments[position] == "--":
            return arguments[:position], arguments[position + 1 :]
        position += 2 if parser.takes_value(arguments[position]) else 1
    return arguments[:position], arguments[position:]


def _run(options: argparse.Namespace, command: list[str]) -> int:
    need_linux("recording needs")
    from buoy.supervisor.launch import startable
    from buoy.supervisor.run import Order, supervise
    from buoy.supervisor.start import default_run_folder, log_home
    from buoy.units import parse_time_limit

    if not command:
        raise UsageError(
            "no command to run", expected="a training script, or a command", hint="`buoy run train.py`"
        )
    command = startable(command)
    _check_hang_seconds()
    if options.run == "":
        raise UsageError(
            "an empty run folder", received="--run ''", expected="a folder", hint="`--run runs/train`"
        )
    if options.restart < 0:
        raise UsageError(
            "a negative number of restarts",
            received=str(options.restart),
            expected="0 or more",
            hint="`--restart 3`",
        )
    return supervise(
        Order(
            command,
            os.path.expanduser(options.run) if options.run else default_run_folder(command),
            mirror=log_home(options.mirror, f"--mirror {options.mirror}"),
            time_limit=parse_time_limit(options.time_limit),
            restart=options.restart,
            say=_say,
        )
    )


def _check_hang_seconds() -> None:
    given = os.environ.get("BUOY_HANG_SECONDS")
    try:
        if given is None or float(given) > 0:
            return
    except ValueError:
        pass
    raise UsageError(
        "cannot read BUOY_HANG_SECONDS",
        received=repr(given),
        expected="seconds, more than 0",
        hint="BUOY_HANG_SECONDS=60",
    )


def _say(text: str) -> None:
    try:
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody listens; training continues


def _parser() -> Parser:
    parser = Parser(
        "buoy run",
        "buoy run [options] train.py [ARGUMENTS]  |  buoy run [options] [--] COMMAND [ARGUMENTS]",
        _DESCRIPTION,
        _EPILOG,
    )
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/<script>)")
    parser.add_argument(
        "--mirror", metavar="DIR", help="a mirror for the end of the log, such as a mounted drive"
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
