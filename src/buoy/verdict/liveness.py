"""What can be seen now of an attempt's machine and process: is it the same boot, does the process still live?"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NamedTuple

from buoy.fields import count, number, text

_SLACK = 5.0


class Now(NamedTuple):
    """The present, compared with what attempt.json says. None: cannot be compared."""

    wall: float
    same_boot: bool | None
    same_host: bool | None
    same_container: bool | None
    """Whether PID 1 is still the one that was there: a restarted container has another on the same boot."""
    alive: bool
    sees_inside: bool
    """Whether it ran in a container that we look into from outside: then we would see it."""
    stopped: bool = False
    """Whether it lives but is stopped (state T): by Ctrl-Z, SIGSTOP or a debugger."""

    @property
    def same_machine(self) -> bool | None:
        """False if anything shows that this is another machine or another life of it; None if nothing can be said."""
        answers = (self.same_boot, self.same_host, self.same_container)
        if False in answers:
            return False
        return True if self.same_boot else None


def observe(attempt: dict[str, Any]) -> Now:
    """Look at this machine in the light of attempt.json."""
    from buoy.machine import host

    same_boot = _same(text(attempt.get("boot_id")), host.boot_id())
    same_host = _same(text(attempt.get("hostname")), host.hostname())
    start, start_now = count(attempt.get("pid1_start")), host.pid1_start()
    same_container = None if start is None or start_now is None else start == start_now
    here = same_boot is not False and same_host is not False and same_container is not False
    if here or not same_boot or not host.initial_pid_namespace():
        alive = here and _lives(attempt)
        stopped = alive and _state(attempt) in ("T", "t")
        return Now(time.time(), same_boot, same_host, same_container, alive, False, stopped)
    # From outside a container its processes can be seen, under other pids.
    return Now(time.time(), same_boot, same_host, same_container, _lives_in_container(attempt), True)


def _lives(attempt: dict[str, Any]) -> bool:
    """Whether this pid is still the same process: running, and at least as old as the attempt."""
    from buoy.machine import procfs

    pid, began = count(attempt.get("pid")), number(attempt.get("t"))
    if not pid:
        return False
    stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{pid}/stat"))
    if stat is None or stat.state in ("Z", "X"):
        return False
    start = count(attempt.get("start_ticks"))
    if start is not None:
        return bool(stat.start_ticks == start)
    if began is None:
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return bool(age >= time.monotonic() - began - _SLACK)


def _state(attempt: dict[str, Any]) -> str | None:
    from buoy.machine import procfs

    stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{count(attempt.get('pid'))}/stat"))
    return stat.state if stat is not None else None


def _lives_in_container(attempt: dict[str, Any]) -> bool:
    """Whether a process of the same inner pid and the same start exists in a PID namespace below ours."""
    from buoy.machine import procfs

    pid, start = count(attempt.get("pid")), count(attempt.get("start_ticks"))
    if not pid or start is None:
        return False
    if not os.path.isdir("/proc"):
        return False  # a Mac, Windows: nothing of that run is here
    for name in os.listdir("/proc"):
        stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{name}/stat")) if name.isdigit() else None
        if stat is None or stat.start_ticks != start or stat.state in ("Z", "X"):
            continue
        for line in procfs.read_bytes(f"/proc/{name}/status").split(b"\n"):
            if line.startswith(b"NSpid:") and line.split()[-1] == b"%d" % pid:
                return True
    return False


def waits_for_us(pid: int | None) -> bool:
    """Whether this process is asked from within that one: a notebook's `!buoy why` about its own kernel."""
    from buoy.machine import procfs

    above = os.getppid()
    while pid and above > 1:
        if above == pid:
            return True
        stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{above}/stat"))
        above = stat.ppid if stat is not None else 0
    return False


def is_asked_by_itself(pid: int | None) -> bool:
    """Whether this very process is asked about while no loop of a run is under way in it: by a cell of its own."""
    there = sys.modules.get("buoy.flight.recorder")
    recorder = there.current() if there is not None and pid == os.getpid() else None
    return recorder is not None and not recorder.is_training


def _same(then: str | None, now: str | None) -> bool | None:
    return None if then is None or now is None else then == now
