"""Plans compared with what came: at the end of a run the real peak beside the foreseen one, kept for the next plan."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from buoy.estimate import devices
from buoy.estimate.result import Interval
from buoy.machine.files import append, make_folder
from buoy.planner import calibration
from buoy.planner.model import FITS, Plan
from buoy.units import format_bytes


def keep(
    plan: Plan, reading: dict[str, Any], run: str | None, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Compare and write it down; None where the plan says nothing about the device that was used.

    `reading` is what the framework tells at the end: `{"name", "total", "reserved"}`, or `allocated` from TensorFlow,
    whose allocator takes the whole card beforehand.
    """
    name = str(reading["name"])
    used = devices.by_name(name, int(reading["total"])) or calibration.learned(name)
    measure = "reserved" if "reserved" in reading else "allocated"
    foreseen = _foreseen(plan, used, measure)
    if used is None or foreseen is None:
        return None
    real = int(reading[measure])
    record = {
        "time": time.time(),
        "source": plan.source,
        "device": used.id,
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        measure: real,
        "foreseen": [foreseen.low, foreseen.likely, foreseen.high],
        "error": foreseen.likely / real - 1 if real else None,
        "inside": real in foreseen,
    }
    for folder in filter(None, (calibration.folder(), run)):
        try:
            make_folder(folder)
            append(os.path.join(folder, "plans.jsonl"), json.dumps(record) + "\n")
        except OSError:
            continue  # a full or read-only home is no reason to disturb the end of a training
    say(
        f"the peak was {format_bytes(real)}; the plan foresaw {format_bytes(foreseen.low)} to "
        f"{format_bytes(foreseen.high)}" + ("" if record["inside"] else ": outside of it")
    )
    return record


def known(folder: str | None = None) -> list[dict[str, Any]]:
    """The comparisons kept so far, oldest first."""
    try:
        with open(os.path.join(folder or calibration.folder(), "plans.jsonl"), encoding="utf-8") as file:
            return list(_records(file))
    except OSError:
        return []


def _records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # a line that was cut off when the session died


def _foreseen(plan: Plan, used: devices.Device | None, measure: str) -> Interval | None:
    """The foreseen peak of the framework's allocator on this device, with the micro-batch the run was given."""
    answer = next((a for a in plan.answers if used is not None and a.target.device.id == used.id), None)
    if answer is None:
        return None
    if answer.memory_verdict == FITS:
        found: Interval = getattr(answer.estimate, measure)
        return found
    split = next((remedy for remedy in plan.remedies if remedy.id == "micro-batch"), None)
    if split is None or split.peak is None or plan.remedies_for != answer.target.id or measure != "reserved":
        return None
    least, most = answer.target.device.context
    peak = split.peak
    return Interval(peak.low - least, peak.likely - (least + most) // 2, peak.high - most)
