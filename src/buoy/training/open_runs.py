"""The runs of this process by folder: a cell that is run again takes its folder over, and each is finished at exit."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from buoy.text import printable

if TYPE_CHECKING:
    from buoy.training.run import Run

_open: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()


def close_earlier(folder: str | None, say: Callable[[str], None]) -> None:
    """Finish the run that this process had on the folder, if any."""
    if folder is None:
        return
    before = _open.get(os.path.realpath(folder))
    if before is not None:
        say(f"another Run on {printable(folder)} was open in this process; it is closed now")
        before.finish()


def opened(run: Run) -> None:
    """This run has its folder now; it is finished when the process ends well."""
    if run.folder is not None:
        _open[os.path.realpath(run.folder)] = run
    atexit.register(_finish_at_exit, weakref.ref(run), os.getpid())


def closed(run: Run) -> None:
    """Its folder is free."""
    if run.folder is not None and _open.get(os.path.realpath(run.folder)) is run:
        del _open[os.path.realpath(run.folder)]


def _finish_at_exit(reference: weakref.ref[Run], pid: int) -> None:
    run = reference()
    if run is None or pid != os.getpid():  # a forked worker is not the training
        return
    if getattr(sys, "last_value", None) is None:  # not after an exception: a step may have been half done
        run._save_the_end(is_known=False)
    run.finish()
