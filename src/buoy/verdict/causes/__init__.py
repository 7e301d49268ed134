"""The causes of death in families, one file each, and the order in which they are tried.

The first that has something to say wins, so the order is by strength of proof: the living, what a signal together with
a counter proves, what a child's death explains, plain signals, uncaught exceptions, exit codes, and at last what can be
said when nothing was recorded. Each judge returns a cause with its grade, or None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable

from buoy.verdict.causes import exits, limits, lost, memory, signals, stalls, workers
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Cause

IN_ORDER: tuple[Callable[[Evidence], Cause | None], ...] = (
    stalls.judge_hang,
    stalls.judge_thrashing,
    stalls.judge_still_running,
    workers.judge_relayed,
    memory.judge_kernel_oom,
    signals.judge_cpu_limit,
    limits.judge_time_limit,
    lost.judge_parent_lost,
    limits.judge_shm_full,
    exits.judge_child,
    workers.judge_worker_killed,
    signals.judge_interrupted,
    signals.judge_native_crash,
    limits.judge_disk_full,
    signals.judge_bus_error,
    limits.judge_file_size_limit,
    signals.judge_hangup,
    memory.judge_memory_error,
    memory.judge_gpu_oom,
    memory.judge_gpu_fault,
    limits.judge_open_files,
    limits.judge_process_limit,
    workers.judge_distributed,
    exits.judge_python_exception,
    signals.judge_terminated,
    signals.judge_other_signal,
    signals.judge_killed,
    exits.judge_clean_exit,
    exits.judge_exit_code,
    exits.judge_damaged,
    lost.judge_machine_lost,
    lost.judge_recorder_lost,
    exits.judge_unknown,
)
