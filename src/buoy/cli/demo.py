"""`buoy demo`: a training dies in a session made small for real, and the same one, guarded, does not."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile

from buoy.cli.parser import Parser
from buoy.errors import need_linux

_DESCRIPTION = "Show in a minute or two what buoy does, on this machine, with a small real training."


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    parser = Parser("buoy demo", "buoy demo [-o DIR]", _DESCRIPTION)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="keep the runs and the report there (default: a new temporary folder)",
    )
    chosen = parser.parse_args(arguments)
    need_linux("the demo needs")
    from buoy.demo.story import tell

    if chosen.output:
        return tell(chosen.output)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = tempfile.mkdtemp(prefix="buoy-demo-")
    try:
        return tell(folder)
    except BaseException:  # cut short, there is no report to keep
        shutil.rmtree(folder, ignore_errors=True)
        raise
