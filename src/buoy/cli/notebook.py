"""`buoy notebook`: load buoy by itself in each new kernel, or stop doing so."""

from __future__ import annotations

import sys

from buoy.cli.parser import Parser
from buoy.errors import ExitCode

_DESCRIPTION = (
    "Load buoy by itself in each new notebook kernel; without it, `%load_ext buoy` in the first cell does."
)


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    parser = Parser("buoy notebook", "buoy notebook install|uninstall|status", _DESCRIPTION)
    parser.add_argument("what", choices=("install", "uninstall", "status"))
    chosen = parser.parse_args(arguments)
    from buoy.notebook import startup

    if chosen.what == "install":
        sys.stdout.write(f"{startup.install()}\n")
        sys.stderr.write("buoy: new kernels load buoy; restart those that are open\n")
    elif chosen.what == "uninstall":
        sys.stderr.write("buoy: removed\n" if startup.uninstall() else "buoy: it was not installed\n")
    else:
        installed = startup.is_installed()
        sys.stdout.write(f"{'installed' if installed else 'not installed'}: {startup.path()}\n")
        return int(ExitCode.OK if installed else ExitCode.FOUND)
    return int(ExitCode.OK)
