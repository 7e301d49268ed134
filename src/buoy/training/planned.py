"""A plan beside what came: in the flight log for the report, and in words when the run ends."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from buoy.planner.rehearsal import is_rehearsal
from buoy.units import format_bytes

if TYPE_CHECKING:
    from buoy.estimate.result import Interval
    from buoy.planner.model import Answer, Plan

_FITS = "fits"  # as planner.model has it, which would load the whole estimate at the start of every run


def record(plan: Plan | None, event: Callable[..., object]) -> None:
    """Write the plan down as one event; does nothing without a plan, and never raises."""
    if plan is None:
        return
    try:
        event(
            "plan",
            source=plan.source,
            framework="tensorflow" if "tensorflow" in plan.facts else "torch",
            batch=plan.batch,
            micro_batch=plan.micro_batch,
            fits=plan.fits,
            cheapest=plan.cheapest.title if plan.cheapest is not None else None,
            answers=[_answer(plan, answer) for answer in plan.answers],
        )
    except Exception:  # noqa: BLE001 - a note for the report is worth no training
        return


def compare(
    plan: Plan | None, event: Callable[..., object], say: Callable[[str], None], framework: str = "torch"
) -> None:
    """Say, and write down as one event, what the run really took on the GPU."""
    if plan is None or is_rehearsal():
        return
    try:
        # TensorFlow's allocator takes the whole card beforehand: there what was allocated in it counts.
        measure = "reserved" if framework == "torch" else "allocated"
        reading = import_module(f"buoy.{framework}.real_peak").read()
        foreseen = _foreseen(plan, reading, measure) if reading is not None else None
        if reading is None or foreseen is None:
            return
        (low, high), real = foreseen, int(reading[measure])
        event("peak", what=measure, foreseen=[low, high], real=real)
        say(
            f"the peak was {format_bytes(real)}; the plan foresaw {format_bytes(low)} to {format_bytes(high)}"
            + ("" if low <= real <= high else ": outside of it")
        )
    except Exception as error:  # noqa: BLE001 - a comparison never takes a training down
        say(f"the plan could not be compared with the run: {error}")


def _foreseen(plan: Plan, reading: dict[str, Any], measure: str) -> tuple[int, int] | None:
    """The foreseen peak of the framework's allocator; None where the plan says nothing about the device in use."""
    from buoy.estimate.devices import by_name

    used = by_name(str(reading["name"]), int(reading["total"]))
    answer = next((a for a in plan.answers if used is not None and a.target.device.id == used.id), None)
    if answer is None:
        return None
    if answer.memory_verdict == _FITS:
        found: Interval = getattr(answer.estimate, measure)
        return found.low, found.high
    peak, _ = _peak(plan, answer)
    if peak is None or measure != "reserved":
        return None
    least, most = answer.target.device.context
    return peak.low - least, peak.high - most


def _answer(plan: Plan, answer: Answer) -> dict[str, Any]:
    ram = next((need for need in answer.needs if need.name == "host RAM"), None)
    peak, samples = _peak(plan, answer)
    on_host = ram if answer.memory_verdict == _FITS or not answer.target.is_cpu else None
    return {
        "on": answer.target.id,
        "device": answer.target.device.id,
        "verdict": answer.verdict,
        "memory": answer.target.memory,
        "peak": [peak.low, peak.high] if peak is not None else None,
        "samples": samples,
        "host_ram": [on_host.low, on_host.high] if on_host is not None else None,
        "micro_batch": answer.micro_batch,
    }


def _peak(plan: Plan, answer: Answer) -> tuple[Interval | None, int | None]:
    """The peak of the training as the plan would have it run, and with how many samples at once that is."""
    if answer.memory_verdict == _FITS:
        return answer.peak, plan.batch
    split = next((remedy for remedy in plan.remedies if remedy.id == "micro-batch"), None)
    if split is None or plan.remedies_for != answer.target.id:
        return None, None  # as a whole it does not fit, so it will not run so
    return split.peak, answer.micro_batch
