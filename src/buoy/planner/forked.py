"""Work done in a forked child: it sees everything this process has, and nothing it does comes back but its files."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

from buoy.flight import recorder
from buoy.machine import helpers

_PAUSE = 0.02
_AT_ONCE = max(1, min(2, os.cpu_count() or 1))  # each may take half of the memory


def forked(
    works: Sequence[Callable[[], None]],
    said: str,
    timeout: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[int | None]:
    """Do each work in a child of its own, two at once, their words going to the file `said`.

    Returns the exit codes (-N for signal N), None for one that took longer than `timeout`. Each child has a session of
    its own, so that whatever it started ends with it.
    """
    codes: list[int | None] = [None] * len(works)
    waiting = list(enumerate(works))
    running: dict[int, tuple[int, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number, work = waiting.pop(0)
                running[_fork(work, said)] = (number, time.monotonic() + timeout)
            for pid, (number, end) in list(running.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[number] = os.waitstatus_to_exitcode(status)
                if found or time.monotonic() > end:
                    del running[pid]
                    _end(pid)
            meanwhile()
            time.sleep(_PAUSE if running else 0)
    finally:
        for pid in running:
            _end(pid)
    return codes


def _fork(work: Callable[[], None], said: str) -> int:
    recorded = recorder.current()
    with warnings.catch_warnings():
        # Python warns of threads that hold locks; the child runs our tracer only, and a timeout bounds it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        if recorded is not None:
            recorded.beacon.detach()  # a traced step is no step of the training
        _in_child(work, said)
    return pid


def _in_child(work: Callable[[], None], said: str) -> None:
    code = 70
    try:
        helpers.mark_this_process()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, number)
        # A notebook's streams write to its page, not to these numbers.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - nothing may unwind into the parent's frames
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(pid: int) -> None:
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
