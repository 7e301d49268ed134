"""A folder in which a run can keep something, or an error before the training begins.

What fails later is said and survived. At the start it is the person's to mend: hours of training of which nothing
can be kept would be lost at the first death.
"""

from __future__ import annotations

import errno
import os

from buoy.errors import RunFolderError
from buoy.machine import disk, files
from buoy.supervisor.start import RESERVE_BYTES
from buoy.units import format_bytes

_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


def make_folder(folder: str) -> None:
    """Make the run's folder and see that it takes a file; `RunFolderError` if not, and then nothing is left behind."""
    if os.path.isdir(os.path.join(folder, "checkpoints")):
        return  # it took some before; on a full disk an older one can give way to the next
    made: list[str] = []
    probe = os.path.join(folder, f"probe-{os.getpid()}")
    try:
        for path in reversed(disk.folders_to_make(folder)):
            _make(path, 0o777 if len(path) < len(folder) else 0o700, made)
        files.write_new(probe, bytes(_PROBE_BYTES))
        os.unlink(probe)
    except OSError as error:
        _take_back(probe, made)
        raise _refused(error, folder) from error


def _make(path: str, mode: int, made: list[str]) -> None:
    """Make it, unless another training that starts at this moment has just made it."""
    try:
        os.mkdir(path, mode)
        made.insert(0, path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _take_back(probe: str, made: list[str]) -> None:
    try:
        os.unlink(probe)
    except OSError:
        pass
    for path in made:
        try:
            os.rmdir(path)
        except OSError:
            continue  # it was not made, or somebody else uses it already


def _refused(error: OSError, path: str) -> RunFolderError:
    reason = error.strerror or str(error)
    if error.errno not in _FULL:
        return RunFolderError(
            "cannot write checkpoints",
            received=f"{path}: {reason}",
            expected="a folder that can be written",
            hint="give the Run another folder",
        )
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    space = disk.space(path)
    free = f" ({format_bytes(space.free)} of {format_bytes(space.total)} free)" if space is not None else ""
    return RunFolderError(
        "cannot write checkpoints",
        received=f"{path}: {reason}{free}",
        expected=f"room for two checkpoints, and {format_bytes(RESERVE_BYTES)} for the recording",
        hint="free some space, or give the Run a folder on another disk",
    )
