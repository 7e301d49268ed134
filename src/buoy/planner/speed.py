"""How long a step takes, from the operations it does: rough, and said so. A measured step time always comes first."""

from __future__ import annotations

from buoy.estimate.devices import Device

# Peak rates from the vendors' data sheets, in 1e12 operations a second: (float32, half precision on tensor cores).
# Float32 without TF32, as PyTorch multiplies matrices unless told otherwise.
_RATES = {
    "t4": (8.1, 65), "p100": (9.3, 18.7), "v100": (14, 112), "l4": (30.3, 121), "a10g": (31.2, 70),
    "a100-40": (19.5, 312), "a100-80": (19.5, 312), "h100": (67, 989), "rtx-2080-ti": (13.4, 54),
    "rtx-3060": (12.7, 51), "rtx-3090": (35.6, 71), "rtx-4060": (15.1, 60), "rtx-4070-ti-super": (44, 88),
    "rtx-4090": (82.6, 165), "rtx-5090": (105, 210),
}  # fmt: skip
# The share of the peak that trainings reach. Wide, as nothing here was measured on the person's step.
_REACHED = (0.15, 0.6)
# Below this, launching the kernels and feeding them takes longer than what they compute.
_SHORT = 0.01


def step_seconds(
    device: Device, flops: dict[str, float] | None, autocast: str | None
) -> tuple[tuple[float, float] | None, str]:
    """Seconds of one step from and to, and where they come from; None for devices without a data sheet."""
    rates = _RATES.get(device.id)
    if rates is None or not flops or not flops.get("step"):
        return None, "unknown: measure a step and give step_time"
    half = autocast is not None or bool(flops.get("half"))
    peak = rates[1 if half else 0] * 1e12
    low, high = flops["step"] / (peak * _REACHED[1]), flops["step"] / (peak * _REACHED[0])
    if high < _SHORT:
        return None, "too short a step to tell from its operations: measure it and give step_time"
    return (low, high), "from the step's operations and the card's data sheet; possible, not measured"


def half_precision(device: Device) -> tuple[tuple[float, float] | None, str]:
    """What mixed precision does to the step's time on this device, from and to, and why."""
    if not device.capability:
        return (1.0, 12.0), "12 times slower was measured on a CPU without bfloat16 units"
    if device.capability < 70:
        return (0.7, 1.1), "no tensor cores on this card"
    return (0.3, 0.9), "tensor cores; how much depends on how the step is bound"
