"""Notebook kernels, and the server above them."""

from __future__ import annotations

import signal

from tests.deaths import acts
from tests.deaths.kind import Act, Expected, Kind, expect

_SERVER = "kernel_of_a_server.py"
_BUSY = "while True: pass"
_ORPHANED = expect(
    "parent-lost<=likely",
    old_kernel="parent-lost<=possible",
    notes_only="recorder-lost",
    at_least="likely",
    why="without the recorder nobody saw which of the two ended first",
)
_SUDDEN = expect(
    "exit-code", old_kernel="unknown", notes_only="recorder-lost", why="os._exit() leaves no note"
)
_BOTH_KILLED = expect(
    "killed",
    old_kernel="killed unknown parent-lost<=possible",
    notes_only="recorder-lost",
    why="without its status a kernel killed after its server looks like one that followed it",
)


def _kernel(name: str, how: str, cell: str, act: Act, expected: Expected) -> Kind:
    return Kind(
        f"{name}-watch", (_SERVER, how, cell), "watch", act, expected, needs=("ipykernel",), below=True
    )


KINDS = (
    _kernel("kernel-server-killed", "killed", "", acts.cue, _ORPHANED),
    _kernel("kernel-server-killed-while-a-cell-runs", "killed", _BUSY, acts.cue, _ORPHANED),
    _kernel("kernel-server-ended", "ends", "", acts.cue, _ORPHANED),
    _kernel(
        "kernel-os-exit-1", "stays", "import os, stage; stage.wait('go'); os._exit(1)", acts.cue, _SUDDEN
    ),
    _kernel("kernel-killed-after-its-server", "stays", "", acts.kill_server_then_main, _BOTH_KILLED),
    _kernel("kernel-sigkill", "stays", "", acts.send(signal.SIGKILL), _BOTH_KILLED),
)
