"""The causes of death, one file each. The first that has something to say wins, so the order is by strength of proof:

the living, what a signal together with a counter proves, what a child's death explains, plain signals, uncaught
exceptions, exit codes, and at last what can be said when nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Callable

from buoy.verdict.causes import (
    bus_error,
    clean_exit,
    cpu_limit,
    disk_full,
    distributed,
    exit_code,
    file_size_limit,
    gpu_fault,
    gpu_oom,
    hang,
    hangup,
    interrupted,
    kernel_oom,
    killed,
    machine_lost,
    memory_error,
    native_crash,
    open_files,
    other_signal,
    parent_lost,
    process_limit,
    python_exception,
    recorder_lost,
    shm_full,
    still_running,
    terminated,
    thrashing,
    time_limit,
    unknown,
    worker_killed,
)
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause

IN_ORDER: tuple[Callable[[Evidence], Cause | None], ...] = (
    hang.judge,
    thrashing.judge,
    still_running.judge,
    worker_killed.judge_relayed,
    kernel_oom.judge,
    cpu_limit.judge,
    time_limit.judge,
    parent_lost.judge,
    shm_full.judge,
    exit_code.judge_child,
    worker_killed.judge,
    interrupted.judge,
    native_crash.judge,
    disk_full.judge,
    bus_error.judge,
    file_size_limit.judge,
    hangup.judge,
    memory_error.judge,
    gpu_oom.judge,
    gpu_fault.judge,
    open_files.judge,
    process_limit.judge,
    distributed.judge,
    python_exception.judge,
    terminated.judge,
    other_signal.judge,
    killed.judge,
    clean_exit.judge,
    exit_code.judge,
    unknown.judge_damaged,
    machine_lost.judge,
    recorder_lost.judge,
    unknown.judge,
)
