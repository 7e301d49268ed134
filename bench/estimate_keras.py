"""Keras estimates against TensorFlow on the CPU: its allocator's own peak, and resident memory, on 14 models.

Asked: a median error of at most 10 % against what was measured. The two constants of resident memory
(buoy.estimate.result.TOUCHED, PER_OPERATION) were fitted on one half of the models: every second one by the hash of its
name. The table marks that half; the figures are those of the other. `python -m bench.estimate_keras NAME` measures one.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from bench.measure import table
from buoy.estimate.child import Request, trace
from buoy.estimate.devices import by_id
from buoy.estimate.result import PER_OPERATION, TOUCHED, estimate

MIB = 1 << 20
STEPS = 4
BUILDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "estimate_keras_models.py")


def main() -> dict[str, Any]:
    """Print the table and return the figures."""
    rows = []
    for name in names():
        command = [sys.executable, "-m", "bench.estimate_keras", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        true = json.loads(done.stdout.splitlines()[-1])
        found = trace(Request("keras", {"build": f"{BUILDS}:{name}"}, device="cpu"))
        figure = estimate(found, by_id("cpu"))
        rows.append({
            **true, "name": name, "fitted": fitted(name), "operations": found.facts["operations"],
            "estimated": figure.replay.peak_allocated, "inside": true["allocator"] in figure.allocated,
            "estimated_resident": figure.total.likely, "resident_inside": true["resident"] in figure.total,
        })  # fmt: skip
        print(f"  {name}", file=sys.stderr)
    return report(rows)


def names() -> list[str]:
    """Every build function of the models' file, without loading Keras here."""
    import ast

    with open(BUILDS, encoding="utf-8") as file:
        return [node.name for node in ast.parse(file.read()).body
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]  # fmt: skip


def fitted(name: str) -> bool:
    """Whether a model is of the half on which constants were fitted."""
    by_hash = sorted(names(), key=lambda each: hashlib.sha256(each.encode()).digest())
    return by_hash.index(name) % 2 == 0


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table, and the figures of the half nothing was fitted on."""
    for row in rows:
        row["error"] = row["estimated"] / row["allocator"] - 1
        row["resident_error"] = row["estimated_resident"] / row["resident"] - 1
    shown = [
        (row["name"], "fitted" if row["fitted"] else "", f"{row['allocator'] / MIB:.0f}", f"{row['error']:+.1%}",
         "in" if row["inside"] else "out", f"{row['resident'] / MIB:.0f}", f"{row['resident_error']:+.1%}",
         "in" if row["resident_inside"] else "out")
        for row in rows
    ]  # fmt: skip
    print(
        table(
            ("model", "half", "allocator MiB", "error", "interval", "resident MiB", "error", "interval"),
            shown,
        )
    )
    held = [row for row in rows if not row["fitted"]]
    figures = {
        "models": len(rows),
        "held_out": len(held),
        "allocator_median_error": statistics.median(abs(row["error"]) for row in rows),
        "allocator_inside": sum(row["inside"] for row in rows),
        "resident_median_error": statistics.median(abs(row["resident_error"]) for row in held),
        "resident_inside": sum(row["resident_inside"] for row in held),
        "fit_of_this_run": _fit([row for row in rows if row["fitted"]]),
        "constants": [TOUCHED, PER_OPERATION],
    }
    print(json.dumps(figures, indent=1))
    met = figures["allocator_median_error"] <= 0.1 and figures["resident_median_error"] <= 0.1
    return {**figures, "rows": rows, "met": met}


def _fit(rows: list[dict[str, Any]]) -> list[float]:
    """The two constants by least squares of the relative error."""
    import numpy

    known = numpy.array([[row["estimated"], row["operations"]] for row in rows], dtype=float)
    true = numpy.array([row["resident"] for row in rows], dtype=float)
    found, *_ = numpy.linalg.lstsq(known / true[:, None], numpy.ones(len(rows)), rcond=None)
    return [round(float(value), 3) for value in found]


def measure(name: str) -> dict[str, int]:
    """Train for a few steps: the allocator's highest `bytes_in_use`, and how far resident memory grew."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import numpy as np
    import tensorflow as tf

    from bench import estimate_keras_models

    # What any first step loads is no part of a model.
    first = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
    first.compile("adam", "mse")
    first.train_on_batch(np.zeros((4, 8), "float32"), np.zeros((4, 4), "float32"))
    before = _status("VmRSS")
    model, (inputs, labels) = getattr(estimate_keras_models, name)()
    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(STEPS):
        model.train_on_batch(inputs, labels)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"allocator": int(peak), "resident": _status("VmHWM") - before}


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
