"""What buoy changed about a training while it ran, in words: from the flight log and the log of micro-batches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from buoy.machine.records import read_lines
from buoy.text import printable
from buoy.view.history import History
from buoy.view.places import without_places

_SWITCHES = {
    "amp": "mixed precision",
    "checkpointing": "activation checkpointing",
    "expandable_segments": "expandable segments",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One adaptation: when, at which step, and what."""

    attempt: int
    at: float | None
    """Seconds since the attempt began."""
    step: int | None
    text: str


def words(event: dict[str, Any]) -> str | None:
    """What an event says was adapted; None when it tells of nothing of the kind.

    >>> words({"kind": "retry", "what": "oom", "samples": 64, "smaller": 32})
    'out of memory with 64 samples at once: done again, 32 at a time'
    """
    kind, what = event.get("kind"), printable(str(event.get("what", "")), 60)
    samples = event.get("samples")
    if kind == "retry" and what == "oom":
        smaller = event.get("smaller")
        again = "done again as it was" if smaller == samples else f"done again, {smaller} at a time"
        return f"out of memory with {samples} samples at once: {again}"
    if kind == "retry":
        return f"out of memory in the {what}: undone and done again"
    if kind == "sized" and samples != event.get("of"):
        return f"batches of {event.get('of')} are computed {samples} samples at a time"
    if kind == "remedy":
        name = str(event.get("name"))
        blocks = event.get("blocks")
        where = f" in {blocks} blocks" if isinstance(blocks, int) and blocks > 0 else ""
        return f"{_SWITCHES.get(name, printable(name, 60))} switched on{where}"
    if kind == "retention":
        return printable(str(event.get("text", "")), 200)
    return None


def changes(history: History) -> list[Change]:
    """Every adaptation of the run, in order."""
    found = []
    for life in history.lives:
        for event in life.events:
            text = words(event)
            if text is not None:
                step = event.get("step")
                found.append(
                    Change(
                        life.number,
                        life.since_start(event),
                        step if isinstance(step, int) else None,
                        without_places(text, life.about),
                    )
                )
    return found


def sizes(folder: str) -> list[dict[str, Any]]:
    """Samples at once from which step on; None is the whole batch. `parts` hold for their step only."""
    found: list[dict[str, Any]] = []
    for line in read_lines(os.path.join(folder, "micro-batches.jsonl")):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        if isinstance(line.get("parts"), list):
            found.append({"step": line["step"], "parts": line["parts"]})
            continue
        samples = line.get("samples", line.get("size")) or None
        if not found or "parts" in found[-1] or found[-1]["samples"] != samples:
            found.append({"step": line["step"], "samples": samples})
    return found
