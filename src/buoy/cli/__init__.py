"""The `buoy` command. A verb's module is imported only when that verb is chosen."""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module

# verb -> (module, one line for `buoy --help`)
VERBS = {
    "check": (
        "buoy.cli.check",
        "read training code for the lines that will kill the session: `buoy check train.py`",
    ),
    "demo": ("buoy.cli.demo", "watch a training die in a small session, and the same one guarded live on"),
    "explain": ("buoy.cli.explain", "print the page about a rule or a cause: `buoy explain kernel-oom`"),
    "report": ("buoy.cli.report", "write one HTML page about a run: timelines, checkpoints, verdicts"),
    "ckpt": ("buoy.cli.ckpt", "list, verify, export, prune and bring back the checkpoints of a run"),
    "notebook": ("buoy.cli.notebook", "load buoy by itself in each new notebook kernel"),
    "plan": (
        "buoy.cli.plan",
        "say whether a training fits, with how many bytes, and what makes it fit: `buoy plan train.py:build`",
    ),
    "run": ("buoy.cli.run", "run a training under the flight recorder: `buoy run train.py`"),
    "runs": ("buoy.cli.runs", "list the runs here, and remove one"),
    "top": ("buoy.cli.top", "show a run as it goes: steps, RAM, VRAM, disk and time against their limits"),
    "why": ("buoy.cli.why", "say what killed the last attempt, how sure we are, and how to resume"),
}

_OVERVIEW = """\
usage: buoy VERB [options]

Keeps machine-learning training alive in small sessions, and says why it died.

{verbs}

  buoy VERB --help   the options of a verb
  buoy --version     the version

exit codes: `run` gives the command's own code (128+N for signal N; 125 buoy could not start, 126 not
executable, 127 not found). The others: 0 fine, 1 found something (`why`: no verdict), 2 error.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; errors go to stderr without a traceback."""
    from buoy.errors import BuoyError, ExitCode

    arguments = sys.argv[1:] if argv is None else argv
    try:
        _prepare_output()
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BuoyError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    except BrokenPipeError:  # `buoy why | head`: the reader has gone, which is no error of ours
        sys.stderr.close()
        return int(ExitCode.OK)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        sys.stderr.write(f"error: cannot write the result: {error.strerror}\n")
        sys.stdout = None  # what is left in it cannot be written either
        return int(ExitCode.ERROR)
    except KeyboardInterrupt:
        return 130


def _prepare_output() -> None:
    """A closed stdout and a terminal without our letters are no reason to fail."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long-lived as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _dispatch(arguments: list[str]) -> int:
    from buoy.errors import ExitCode, UsageError

    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in VERBS.items())
        sys.stdout.write(_OVERVIEW.format(verbs=verbs))
        return 0
    if arguments[0] in ("-V", "--version"):
        from buoy import __version__

        sys.stdout.write(f"buoy {__version__}\n")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        from difflib import get_close_matches

        near = [f"run {verb}"] if verb.endswith(".py") else get_close_matches(verb, VERBS, n=1)
        raise UsageError("unknown command", received=repr(verb), expected=" or ".join(f"`{v}`" for v in VERBS),
                         hint=f"did you mean `buoy {near[0]}`?" if near else "`buoy --help` lists them")  # fmt: skip
    try:
        os.getcwd()
    except FileNotFoundError:
        code = ExitCode.RUN_FAILED if verb == "run" else ExitCode.ERROR
        raise UsageError(
            "the working directory is gone", hint="`cd` to a folder that exists", exit_code=code
        ) from None
    module = import_module(VERBS[verb][0])
    return int(module.execute(rest))
