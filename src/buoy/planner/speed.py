"""How long a step takes, from the operations it does: rough, and said so. A measured step time always comes first."""

from __future__ import annotations

import csv
import functools
from importlib import resources

from buoy.estimate.devices import Device

# The share of the peak that trainings reach. Wide, as nothing here was measured on the person's step.
_REACHED = (0.15, 0.6)
# Below this, launching the kernels and feeding them takes longer than what they compute.
_SHORT = 0.01


@functools.cache
def rates() -> dict[str, tuple[float, float]]:
    """Published peak rates by device, in 1e12 operations a second: float32, and half precision on tensor cores.

    Float32 is without TF32, as PyTorch multiplies matrices unless told otherwise. Who published what is in rates.csv.

    >>> rates()["t4"]
    (8.1, 65.0)
    """
    text = resources.files("buoy.planner").joinpath("rates.csv").read_text(encoding="utf-8")
    return {
        row["id"]: (float(row["float32"]), float(row["half"])) for row in csv.DictReader(text.splitlines())
    }


def step_seconds(
    device: Device, flops: dict[str, float] | None, autocast: str | None
) -> tuple[tuple[float, float] | None, str]:
    """Seconds of one step from and to, and where they come from; None for devices without a data sheet."""
    peaks = rates().get(device.id)
    if peaks is None:
        return (
            None,
            "no data sheet of this device here: measure a step and say it (`--step-time`, `step_time=`)",
        )
    if not flops or not flops.get("step"):
        return (
            None,
            "the step's operations could not be counted: measure it and say it (`--step-time`, `step_time=`)",
        )
    half = autocast is not None or bool(flops.get("half"))
    peak = peaks[1 if half else 0] * 1e12
    low, high = flops["step"] / (peak * _REACHED[1]), flops["step"] / (peak * _REACHED[0])
    if high < _SHORT:
        return (
            None,
            "step too short to estimate from its operations: measure it and pass `--step-time` or `step_time=`",
        )
    return (low, high), "from the step's operations and the card's data sheet; possible, not measured"


def half_precision(device: Device) -> tuple[tuple[float, float] | None, str]:
    """What mixed precision does to the step's time on this device, from and to, and why."""
    if not device.capability:
        return (1.0, 12.0), "12 times slower was measured on a CPU without bfloat16 units"
    if device.capability < 70:
        return (0.7, 1.1), "no tensor cores on this card"
    return (0.3, 0.9), "tensor cores; how much depends on how the step is bound"
