"""Where the kernel puts processes beside a training: ours behind it, its own workers out of the way of its signals."""

from __future__ import annotations

import os
import signal
import time
from _thread import start_new_thread

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
