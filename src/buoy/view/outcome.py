"""A run's plan beside what came: the peak, the host's memory, the micro-batch."""

from __future__ import annotations

import os
from typing import Any

from buoy.estimate import devices
from buoy.fields import count, mappings
from buoy.text import printable
from buoy.units import format_bytes
from buoy.view.history import History, Life, sizes, without_places

CPU = "cpu"


def comparison(history: History, folder: str | None = None) -> dict[str, Any] | None:
    """The newest plan in the log and what was measured since; None where there is no plan.

    `folder` is the run's, where a notebook's recording is elsewhere. `planned` is [lowest, highest] in bytes, or
    samples; `real` is None where nothing was measured.
    """
    found = _newest(history)
    if found is None:
        return None
    event, lives = found
    kept = folder if folder is not None else history.kept
    answer = _answer(event, lives[-1])
    rows: list[dict[str, Any]] = []
    if answer is not None and answer.get("device") != CPU:
        samples = answer.get("samples")
        with_these = f", {samples} samples at once" if isinstance(samples, int) else ""
        # TensorFlow takes the whole card beforehand: what the card tells is then no reading of the training's need.
        seen = None if event.get("framework") == "tensorflow" else _highest(lives, "gpu")
        rows.append(_row(f"device memory{with_these}", answer.get("peak"), seen))
    if answer is not None:
        rows.append(_row("host RAM", answer.get("host_ram"), _highest(lives, "process")))
    rows += _by_the_framework(event, lives)
    rows.append(_samples_at_once(event, lives, kept))
    return {
        "source": without_places(event.get("source"), lives[-1].about),
        "on": answer.get("on") if answer is not None else None,
        "asked": [item.get("on") for item in mappings(event.get("answers"))],
        "fits": event.get("fits"),
        "verdict": answer.get("verdict") if answer is not None else None,
        "cheapest": event.get("cheapest"),
        "rows": rows,
    }


def heading(told: dict[str, Any]) -> str:
    """One line about the plan."""
    if told["on"] is None:
        asked = ", ".join(printable(str(name), 40) for name in told["asked"])
        return f"planned for {asked}, which is not where it ran"
    text = f"planned for {printable(str(told['on']), 40)}: {printable(str(told['verdict']), 40)}"
    return text + (
        f"; the cheapest remedy: {printable(str(told['cheapest']), 120)}" if told["cheapest"] else ""
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A row for users: what, planned, measured."""
    return [row["what"], _said(row["planned"], row["unit"]), _real(row)]


def _real(row: dict[str, Any]) -> str:
    text = _said(row["real"], row["unit"])
    planned, real = row["planned"], row["real"]
    if row["unit"] != "bytes" or not isinstance(planned, list) or real is None:
        return text
    if real > planned[1]:
        return f"{text}: more than planned"
    return text if real >= planned[0] else f"{text}: less than planned"


def _said(value: Any, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "bytes":
        low, high = value if isinstance(value, list) else (value, value)
        return format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return str(value)


def _row(what: str, planned: Any, real: float | None) -> dict[str, Any]:
    valid = (
        isinstance(planned, list) and len(planned) == 2 and all(isinstance(x, int | float) for x in planned)
    )
    return {"what": what, "unit": "bytes", "planned": planned if valid else None, "real": real}


def _newest(history: History) -> tuple[dict[str, Any], list[Life]] | None:
    """The last plan, and the attempts that it was made for."""
    for index in range(len(history.lives) - 1, -1, -1):
        plans = [event for event in history.lives[index].events if event.get("kind") == "plan"]
        if plans:
            return plans[-1], history.lives[index:]
    return None


def _answer(event: dict[str, Any], life: Life) -> dict[str, Any] | None:
    """The place that the attempt ran at: a figure for another device is not to be compared."""
    here: str | None = CPU
    if life.gpus:
        used = devices.by_name(str(life.gpus[0].get("name")), count(life.gpus[0].get("total")) or 0)
        here = used.id if used is not None else None
    return next((item for item in mappings(event.get("answers")) if item.get("device") == here), None)


def _highest(lives: list[Life], series: str) -> float | None:
    return max((high for life in lives for _, _, high in life.series.get(series, ())), default=None)


def _by_the_framework(plan: dict[str, Any], lives: list[Life]) -> list[dict[str, Any]]:
    """What the framework's own counter said at the end of a run that came to its end."""
    events = [event for life in lives for event in life.events]
    since = events[events.index(plan) + 1 :]
    told = [event for event in since if event.get("kind") == "peak"][-1:]
    return [
        _row(f"{event['what']} by the framework", event.get("foreseen"), event["real"])
        for event in told
        if event.get("what") in ("reserved", "allocated") and isinstance(event.get("real"), int)
    ]


def _samples_at_once(event: dict[str, Any], lives: list[Life], kept: str) -> dict[str, Any]:
    used = [line["samples"] for line in sizes(kept) if "samples" in line]
    batch = _batch_seen(lives, kept)
    seen = _whole(batch) if batch is not None else None
    return {
        "what": "samples at once",
        "unit": "samples",
        "planned": event.get("micro_batch") or _whole(event.get("batch")),
        "real": used[-1] if used and used[-1] else seen,
    }


def _whole(batch: Any) -> str:
    return f"the whole batch ({batch})" if isinstance(batch, int) else "the whole batch"


def _batch_seen(lives: list[Life], kept: str) -> int | None:
    """The largest batch that this run really trained with; None where its own loop did not say."""
    name = os.path.basename(os.path.abspath(kept))
    for life in reversed(lives):
        for event in reversed(life.events):
            samples = event.get("samples")
            is_own = os.path.basename(str(event.get("path"))) == name
            if event.get("kind") == "batch" and is_own and isinstance(samples, int):
                return samples
    return None
