"""Estimates against the GPU memory published for timm's models, where timm is installed; a campaign, not a test.

bench/gpu_measured_timm.csv is GPUMemNet's sheet: an A100, nvidia-smi's figure (the context of CUDA included), SGD and
fp32 assumed, convolution algorithms chosen by trying. Left out are models whose figure does not grow from 8 to 16 to 32
images (their runs had failed) and rows of a full card. One row of each model, in the order of a hash. Two constants
(context, convolution workspace) are fitted on one half of the models, by another hash; every figure is of the other.

Beside ours: the sheet's own plain FakeTensor figure with the same context added. xMem's published median is 3.59 % on
its own 25 models, FakeTensor's without a context 45.8 % over the whole sheet.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.measure import table
from buoy.estimate.devices import by_id
from buoy.estimate.result import DOUBT

MEASURED = Path(__file__).parent / "gpu_measured_timm.csv"
DEVICE = "a100-40"
MIB = 1 << 20
ROWS = 60
BATCHES = (8, 32, 64)
FULL = 39_000


def main() -> dict[str, Any]:
    """Print the table and return the figures, or say why there are none."""
    missing = [name for name in ("timm", "torchvision") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"skipped: {' and '.join(missing)} not installed (pip install timm torchvision, in another environment)"
        )
        return {"skipped": missing}
    from bench.estimate_models import let_torchvision_load

    let_torchvision_load()
    found = []
    for name, batch, true, fake in sample():
        try:
            reserved, convolution = traced(name, batch)
        except Exception as error:  # noqa: BLE001 - a model that cannot be traced is a row of the table
            print(f"  {name}: not traced, {type(error).__name__}: {str(error)[:100]}")
            continue
        found.append({"model": name, "batch": batch, "true": true, "fake": fake, "reserved": reserved,
                      "convolution": convolution})  # fmt: skip
        print(f"  {name} {batch}", file=sys.stderr, flush=True)
    return report(found)


def sample() -> list[tuple[str, int, float, float]]:
    """(model, batch, measured MiB, FakeTensor's MiB), one row of each model, in the order of a hash."""
    by_model: dict[str, dict[int, tuple[float, float]]] = {}
    with open(MEASURED, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            figures = float(row["max_gpu_memory_mib"]), float(row["faketensor_peak"])
            by_model.setdefault(row["timm_model"], {})[int(row["batch"])] = figures
    chosen = []
    for name in sorted(by_model, key=_hash):
        rows = by_model[name]
        batch = BATCHES[_hash(name + "b") % len(BATCHES)]
        if rows[8][0] < rows[16][0] < rows[32][0] and rows[batch][0] < FULL:
            chosen.append((name, batch, *rows[batch]))
    return chosen[:ROWS]


def traced(name: str, batch: int) -> tuple[float, float]:
    """Our reserved bytes and the largest convolution's, in MiB."""
    import timm
    import torch
    from torch.nn.functional import cross_entropy

    from buoy.estimate.allocators import native
    from buoy.estimate.tracing.steps import Job, trace_steps

    device = by_id(DEVICE)
    model = timm.create_model(name).train().to("meta")
    images = torch.empty(batch, *model.default_cfg["input_size"], device="meta")
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    found = trace_steps(
        Job(model, (images, labels), lambda model, given: cross_entropy(model(given[0]), given[1]),
            lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)),
        device,
    )  # fmt: skip
    return native.replay(found.events).peak_reserved / MIB, found.facts.get("convolution", 0) / MIB


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit on one half, report on the other."""
    fitted = [row for row in rows if _hash(row["model"] + "half") % 2]
    held = [row for row in rows if not _hash(row["model"] + "half") % 2]
    plain = [row["true"] - row["reserved"] for row in fitted if row["convolution"] < 0.02 * row["reserved"]]
    context = statistics.median(plain)
    shares = sorted(
        (row["true"] - row["reserved"] - context) / row["convolution"]
        for row in fitted
        if row["convolution"] > 50
    )
    share, most = max(0.0, statistics.median(shares)), shares[int(0.9 * (len(shares) - 1))]
    doubt = DOUBT["fake"][1]
    shown, errors, fake_errors, widths, inside, below = [], [], [], [], 0, 0
    for row in held:
        likely = row["reserved"] + share * row["convolution"] + context
        low = row["reserved"] / (1 + doubt) + min(plain)
        high = row["reserved"] * (1 + doubt) + most * row["convolution"] + max(plain)
        errors.append(likely / row["true"] - 1)
        fake_errors.append((row["fake"] + context) / row["true"] - 1)
        inside += low <= row["true"] <= high
        below += row["true"] > high
        widths.append((high - low) / likely)
        where = "in" if low <= row["true"] <= high else "below" if row["true"] > high else "above"
        shown.append((row["model"], row["batch"], f"{row['true']:.0f}", f"{errors[-1]:+.1%}", where,
                      f"{fake_errors[-1]:+.1%}"))  # fmt: skip
    print(table(("model", "batch", "measured MiB", "buoy", "interval", "FakeTensor + context"), shown))
    figures = {
        "rows": len(rows), "held_out": len(held),
        "median_error": statistics.median(map(abs, errors)),
        "inside": inside / len(held), "under": below / len(held), "median_width": statistics.median(widths),
        "faketensor_median_error": statistics.median(map(abs, fake_errors)),
        "fitted": {"context_mib": round(context), "convolution": round(share, 2), "convolution_most": round(most, 2)},
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    return figures


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


if __name__ == "__main__":
    main()
