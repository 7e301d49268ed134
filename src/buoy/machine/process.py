"""Processes beside a training, and what this one is: out of the way of others, buoy's own, a cell, a rehearsal.

The sidecar imports this file.
"""

from __future__ import annotations

import os
import signal
import time
from _thread import start_new_thread

from buoy.machine import procfs

_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.03
_PR_SET_PDEATHSIG = 1


def step_back(nice: int) -> None:
    """Run only when others do not, as far as the kernel lets us; never fails.

    A process in a session of its own is weighed by the kernel as a group against the trainer's whole session, and
    then its nice value means nothing outside that group: the group has one of its own.
    """
    try:
        os.nice(nice)
    except OSError:
        pass
    try:
        _set_group_nice(nice)
    except BlockingIOError:
        # From users without CAP_SYS_ADMIN the kernel takes one such write per 100 ms, for the whole machine: our turn
        # comes, but a training may wait for us.
        try:
            start_new_thread(_wait_for_our_turn, (nice,))
        except RuntimeError:
            pass  # no more threads
    except OSError:
        pass  # a kernel or container without such groups: the nice value above is what counts


def _wait_for_our_turn(nice: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        try:
            _set_group_nice(nice)
            return
        except BlockingIOError:
            continue
        except OSError:
            return


def _set_group_nice(nice: int) -> None:
    file = os.open("/proc/self/autogroup", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, b"%d" % nice)
    finally:
        os.close(file)


def leave_group(*, end_with_parent: bool) -> None:
    """In a worker: signals to the training's process group (Ctrl-C, `timeout`) are the training's alone to answer.

    A worker that the same signal ends takes the step that is under way with it. `end_with_parent`: it must have been
    forked by a thread that lives as long as the training; others see by themselves that their training is gone.
    """
    try:
        os.setpgid(0, 0)
    except OSError:
        return  # the leader of a session: it is in a group of its own already
    if end_with_parent:
        import ctypes

        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        except (OSError, AttributeError):
            pass


# Which processes are buoy's own is seen by three marks: a variable of the environment for a program that was started,
# the name of the process for a fork, and the file that Python was given for what lives beside the training.
VARIABLE = "BUOY_TRACING"
"""Set for the programs in which a plan is traced, and what these start: to 1, or to a folder that is removed later."""
ROLE = "buoy's own"
"""What they are called in the log."""
_NAME = "buoy-helper"
_NAMES = (b"buoy", _NAME.encode())
"""The command itself, as `!buoy top` in a notebook, and a fork of ours."""
_PROGRAMS = (
    b"/buoy/checkpoint/writer.py",
    b"/buoy/checkpoint/mirror/worker.py",
    b"/buoy/supervisor/sidecar.py",
)
"""Started by their path, and nobody's children: in a memory group they are seen like strangers."""


def mark_this_process() -> None:
    """In a fork of the training that is ours: everything forked from here has the same name."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(_NAME)
    except OSError:
        pass  # it is then counted as the training's, as before


def is_helper(pid: int) -> bool:
    """Whether this process is one of ours."""
    if procfs.read_bytes(f"/proc/{pid}/comm", 64).strip() in _NAMES:
        return True
    words = procfs.read_bytes(f"/proc/{pid}/cmdline", 4096).split(b"\0")
    if any(word.endswith(_PROGRAMS) for word in words[1:4]):
        return True
    return VARIABLE.encode() + b"=1" in procfs.read_bytes(f"/proc/{pid}/environ", 1 << 20).split(b"\0")


def running() -> int | None:
    """The number of the notebook's cell that runs; None in a script."""
    from buoy.errors import notebook_shell  # the writer and the sidecar need none of it

    shell = notebook_shell()
    return None if shell is None else len(shell.user_ns.get("In") or ())


def is_rehearsal() -> bool:
    """Whether the training is only run up to its first step."""
    return bool(os.environ.get(VARIABLE))


def scratch_folder() -> str:
    """A folder in place of the run's own."""
    given = os.environ.get(VARIABLE, "")
    import tempfile  # dear, and only a rehearsal needs it

    return tempfile.mkdtemp(prefix="buoy-rehearsal-", dir=given if os.path.isdir(given) else None)
