"""A plan in the flight log, so that the report can put it beside what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buoy.planner.model import Answer, Plan


def record(plan: Plan | None, event: Callable[..., object]) -> None:
    """Write the plan down as one event; does nothing without a plan, and never raises."""
    if plan is None:
        return
    try:
        event(
            "plan",
            source=plan.source,
            batch=plan.batch,
            micro_batch=plan.micro_batch,
            fits=plan.fits,
            cheapest=plan.cheapest.title if plan.cheapest is not None else None,
            answers=[_answer(answer) for answer in plan.answers],
        )
    except Exception:  # noqa: BLE001 - a note for the report is worth no training
        return


def _answer(answer: Answer) -> dict[str, Any]:
    ram = next((need for need in answer.needs if need.name == "host RAM"), None)
    return {
        "on": answer.target.id,
        "device": answer.target.device.id,
        "verdict": answer.verdict,
        "memory": answer.target.memory,
        "peak": [answer.peak.low, answer.peak.high],
        "host_ram": [ram.low, ram.high] if ram is not None else None,
        "micro_batch": answer.micro_batch,
    }
