"""Which processes below a training are buoy's own: they trace a plan or answer a question, and train nothing.

Three marks, since they differ in what can be seen of them: a variable of the environment for a program that was
started, the name of the process for a fork, and for what lives beside the training the file that Python was given.
The sidecar imports this file.
"""

from __future__ import annotations

from buoy.machine import procfs

VARIABLE = "BUOY_TRACING"
"""Set for the programs in which a plan is traced, and with them for whatever these start."""
ROLE = "buoy's own"
"""What they are called in the log."""
_NAME = "buoy-helper"
_NAMES = (b"buoy", _NAME.encode())
"""The command itself, as `!buoy top` in a notebook, and a fork of ours."""
_PROGRAMS = (
    b"/buoy/checkpoint/writer.py",
    b"/buoy/checkpoint/mirror_worker.py",
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
