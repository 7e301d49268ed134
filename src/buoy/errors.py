"""Everything buoy raises on purpose, and the exit code each becomes.

BuoyError                    base: a message, what was received, what was expected, a hint
 +-- UsageError              the user asked for something that cannot be asked          exit 2
 +-- RunFolderError          a run folder is missing, foreign, damaged or not writable    exit 2
 +-- LaunchError             `buoy run` could not start the command                       exit 125/126/127
 +-- CannotSave              something tracked is neither plain nor a tensor              (checkpoint.state)
 +-- DamagedCheckpoint       a byte is not as it was written: file and tensor are named   (checkpoint.manifest)
 +-- NewerCheckpoint         written by a later buoy                                      (checkpoint.manifest)
 +-- WriterBusy              another process holds the run                                (checkpoint.lock)
 +-- MirrorFailed            the mirror cannot be used                                    (checkpoint.mirror)
 +-- StepError               a training step cannot be split, or does not fit             (microbatch.errors)
 +-- CannotTrack, OtherModel what is tracked does not fit the checkpoint                  (torch.state, keras.holdings)
 +-- EstimateError           a step could not be traced                                   (estimate.request)

try:
    buoy.watch("runs/cats")
except buoy.BuoyError as error:
    print(error.hint)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import IntEnum

from buoy.text import joined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ExitCode(IntEnum):
    """The exit codes of every verb. `run` returns the command's own code, 128+N for signal N.

    >>> int(ExitCode.FOUND)
    1
    """

    OK = 0
    """Nothing to report: `check` clean, `plan` fits, `why` has a verdict."""
    FOUND = 1
    """`check` has findings, `plan` does not fit, `why` has no verdict."""
    ERROR = 2
    """Usage, configuration or input error."""
    RUN_FAILED = 125
    """`run`: buoy itself could not start."""
    NOT_EXECUTABLE = 126
    """`run`: the command was found but cannot be executed."""
    NOT_FOUND = 127
    """`run`: the command was not found."""


def this_system() -> str:
    """What users call the system we run on.

    >>> this_system()
    'Linux'
    """
    return {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def need_linux(what: str) -> None:
    """Say in one sentence what does not work elsewhere; `what` is like `recording needs`."""
    if sys.platform != "linux":
        raise UsageError(f"{what} Linux, and this is {this_system()}",
                         hint="`buoy check`, `plan`, `why`, `report` and `ckpt` work here")  # fmt: skip


_reported: set[str] = set()


def trouble(where: str, error: BaseException) -> None:
    """Report an exception of buoy's own that is swallowed so that the training continues; to be called in its handler.

    It becomes an event in the flight log, once per place, which `buoy why` shows. `where` says what does not work
    now, as in `the live card`. With BUOY_TROUBLE=raise the exception is raised, for tests.
    """
    if os.environ.get("BUOY_TROUBLE") == "raise":
        raise error
    if where in _reported:
        return
    _reported.add(where)
    try:
        words = f"{where}: {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an exception that cannot be shown
        words = f"{where}: {type(error).__name__}"
    module = sys.modules.get("buoy.flight.recorder")
    current = getattr(module, "current", None)  # missing while it is being imported
    recorder = current() if current is not None else None
    if recorder is not None:
        recorder.event("trouble", what=words[:300], error=type(error).__name__)


def in_notebook() -> bool:
    """Whether a user reads this in a notebook: hints then name `%buoy` and `buoy.Run`, not a shell's commands.

    >>> in_notebook()
    False
    """
    return notebook_shell() is not None


def notebook_shell() -> Any:
    """The IPython shell that this process runs cells in; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


class BuoyError(Exception):
    """An error that is the user's to mend; printed without a traceback.

    >>> print(BuoyError("no such run", received="runs/cast", expected="a run folder", hint="`buoy why runs/cats`"))
    no such run
      received: runs/cast
      expected: a run folder
      hint: `buoy why runs/cats`
    """

    exit_code: int = ExitCode.ERROR

    def __init__(
        self,
        message: str,
        *,
        received: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
        details: Sequence[str] = (),
        exit_code: int | None = None,
    ) -> None:
        """`details`: what was received, in several lines."""
        super().__init__(message)
        self.message = message
        self.received = received
        self.expected = expected
        self.hint = hint
        self.details = list(details)
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        lines = [self.message]
        for label, text in (("received", self.received), ("expected", self.expected), ("hint", self.hint)):
            if text is not None:
                lines.append(f"  {label}: {text}")
            if label == "received":
                lines += [f"    {line}" for line in self.details]
        return joined(lines)


class UsageError(BuoyError):
    """The command line or an argument asks for something that cannot be done."""


class RunFolderError(BuoyError):
    """A run folder is missing, not one of ours, damaged, or cannot be written."""


class LaunchError(BuoyError):
    """`buoy run` could not start the command."""

    exit_code = ExitCode.RUN_FAILED
