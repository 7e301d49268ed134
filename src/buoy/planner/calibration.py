"""What this machine's GPU really keeps for itself: measured once by `buoy plan --calibrate`, used by `--on this`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from buoy.errors import BuoyError
from buoy.estimate.devices import Device, by_id, description
from buoy.machine import files, records

# Run in a process of its own: the context must be fresh, and must end with the measurement.
_MEASURE = """
import json, torch
before = torch.cuda.mem_get_info()[0]
a = torch.ones(64, 64, device="cuda", requires_grad=True)
torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda"))
(a @ a).sum().backward()
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
used = total - free - torch.cuda.memory_reserved()
card = torch.cuda.get_device_properties(0)
print(json.dumps({"name": card.name, "total": total, "beside": used, "before": total - before,
                  "capability": card.major * 10 + card.minor, "multiprocessors": card.multi_processor_count,
                  "threads": card.max_threads_per_multi_processor, "torch": torch.__version__}))
"""


def folder() -> str:
    """Where measurements are kept between sessions."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "buoy")


def applied(device: Device) -> Device:
    """The device with this machine's measured constants, where they were measured for this very device."""
    known = _read().get(device.id)
    if not known:
        return device
    beside = int(known["beside"])
    # Libraries load kernels as they are first used: more than at the measurement, up to what the data says.
    return replace(device, memory=int(known["total"]), context=(beside, max(beside, device.context[1])))


def learned(name: str) -> Device | None:
    """A GPU that no table knows, from its own measurement; None where there was none."""
    known = _read().get(name)
    if not known or "capability" not in known:
        return None
    size = [int(known[field]) for field in ("capability", "multiprocessors", "threads", "total")]
    beside = int(known["beside"])
    card = by_id(description(*size))
    return replace(
        card,
        name=name,
        memory=int(known["total"]),
        context=(beside, max(beside, card.context[1])),  # libraries load kernels as they are first used
        source="buoy plan --calibrate on this machine",
    )


def measure(card: str | None, device: Device | None) -> dict[str, object]:
    """Measure the GPU that is here and keep the result; raises BuoyError where there is none.

    `card` is what its driver calls it, `device` our data on it where there is any.
    """
    if card is None:
        raise BuoyError(
            "nothing to calibrate",
            received="no NVIDIA GPU on this machine",
            expected="a GPU that PyTorch can use",
            hint="run `buoy plan --calibrate` in the session with the GPU",
        )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BuoyError("the GPU could not be measured", received=last, expected="a working torch with CUDA")
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    keep(card if device is None else device.id, found)
    return found


def keep(name: str, found: dict[str, object]) -> None:
    """Remember a measurement."""
    kept = _read()
    kept[name] = found
    files.make_folder(folder())
    records.write_json(os.path.join(folder(), "devices.json"), kept)


def _read() -> dict[str, dict[str, Any]]:
    try:
        with open(os.path.join(folder(), "devices.json"), encoding="utf-8") as file:
            kept = json.load(file)
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
