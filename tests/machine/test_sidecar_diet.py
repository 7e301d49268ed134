"""What the sidecar imports stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import buoy

ALLOWED = {"__future__", "buoy", "errno", "fcntl", "_struct", "struct", "select"}


def test_the_sidecars_readers_import_only_cheap_modules() -> None:
    """`collections` alone would cost it half a megabyte, `dataclasses` 2.6."""
    source = str(Path(buoy.__file__).parent.parent)
    code = (
        f"import os, sys; before = set(sys.modules); sys.path.insert(0, {source!r})\n"
        "import json; before |= set(sys.modules)  # the log is JSON: it is there in any case\n"
        "from buoy.machine import procfs, cgroup, host, disk, gpu, kernel_log\n"
        "gpu.open_nvml(); cgroup.find(1); host.memory()\n"
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    imported = {name.split(".")[0] for name in done.stdout.split()}
    if Path("/dev/nvidiactl").exists():
        imported -= {"ctypes", "_ctypes", "_weakrefset", "weakref"}

    assert imported <= ALLOWED
