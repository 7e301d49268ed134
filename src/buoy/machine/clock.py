"""When this session began: sessions die of old age, so their age is a reading like memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from buoy.machine import host
from buoy.machine.procfs import parse_stat, read_bytes
from buoy.machine.system import TICKS


def session_started(root: str = "/", environ: Mapping[str, str] | None = None) -> float | None:
    """Our best guess, in seconds since 1970, at when this session began; None when nothing tells.

    Under SLURM the job says so. On a platform that gives each session its own machine or container PID 1
    began with it. Elsewhere a session is this process.
    """
    from buoy.machine import platforms

    surroundings = os.environ if environ is None else environ
    platform = platforms.detect(surroundings, root)
    if platform is not None and platform.platform == "slurm":
        return platforms.epoch(surroundings, "SLURM_JOB_START_TIME") or _process_started("self", root)
    return _process_started("self" if platform is None else "1", root)


def elapsed(root: str = "/", environ: Mapping[str, str] | None = None) -> float | None:
    """Seconds since the session began."""
    started = session_started(root, environ)
    return None if started is None else max(0.0, time.time() - started)


def _process_started(pid: str, root: str) -> float | None:
    stat = parse_stat(read_bytes(f"{root.rstrip('/')}/proc/{pid}/stat", 1024))
    boot = host.boot_time(root)
    return None if stat is None or boot is None else boot + stat.start_ticks / TICKS
