"""The tables of a campaign, and the same as plain values for bench/results/deaths.json."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tests.deaths.judging import Score
from tests.deaths.kind import MODES
from tests.deaths.trial import Outcome

PROMPT = 0.2
"""Seconds within which a verdict must be on disk."""
RIGHT_AT_LEAST = 0.99


def tally(scores: Sequence[Score]) -> dict[str, Any]:
    """Right, wrong, wrong though certain, and no verdict, of some scores."""
    right = sum(score.right for score in scores)
    no_verdict = sum(score.no_verdict for score in scores)
    return {
        "trials": len(scores),
        "right": right,
        "wrong": len(scores) - right - no_verdict,
        "wrong_certain": sum(score.wrong_certain for score in scores),
        "no_verdict": no_verdict,
    }


def promptness(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Time from death to the verdict on disk."""
    delays = sorted(outcome.delay for outcome in outcomes if outcome.delay is not None)
    if not delays:
        return {"trials": 0, "median_ms": None, "p99_ms": None, "max_ms": None, "within_200_ms": None}
    return {
        "trials": len(delays),
        "median_ms": round(statistics.median(delays) * 1e3, 1),
        "p99_ms": round(delays[min(len(delays) - 1, int(len(delays) * 0.99))] * 1e3, 1),
        "max_ms": round(delays[-1] * 1e3, 1),
        "within_200_ms": round(sum(delay <= PROMPT for delay in delays) / len(delays), 4),
    }


def said(outcome: Outcome) -> list[Score]:
    """What was said at the time: after the death and, of a hang, while it lasted."""
    return [score for score in (outcome.scores.get("full"), outcome.alive) if score is not None]


def summarise(outcomes: Sequence[Outcome], skipped: dict[str, str], seed: int) -> dict[str, Any]:
    """The campaign as plain values."""
    kinds: dict[str, Any] = {}
    for name in sorted({outcome.kind for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.kind == name]
        kinds[name] = {
            **tally([score for outcome in own for score in said(outcome)]),
            "delay": promptness(own),
            "said": sorted({f"{score.cause} ({score.grade})" for outcome in own for score in said(outcome)}),
            **{mode: tally([o.scores[mode] for o in own if mode in o.scores]) for mode in MODES[1:]},
        }
    return {
        "schema": "buoy.deaths/1",
        "seed": seed,
        "kinds": kinds,
        "skipped": skipped,
        "total": {
            "full": tally([score for outcome in outcomes for score in said(outcome)]),
            **{mode: tally([o.scores[mode] for o in outcomes if mode in o.scores]) for mode in MODES[1:]},
        },
        "delay": promptness(outcomes),
        "verdict_on_disk": sum(outcome.on_disk for outcome in outcomes),
        "not_staged": sum(not outcome.scores for outcome in outcomes),
    }


def passed(summary: dict[str, Any]) -> bool:
    """No wrong "certain" in any mode, at least 99 % right in each, and hardly a death that failed to happen."""
    staged = summary["total"]["notes-only"]["trials"]
    return summary["not_staged"] <= (1 - RIGHT_AT_LEAST) * (staged + summary["not_staged"]) and all(
        not counts["wrong_certain"] and counts["right"] >= RIGHT_AT_LEAST * max(counts["trials"], 1)
        for counts in summary["total"].values()
    )


def tables(summary: dict[str, Any]) -> str:
    """The campaign for people."""
    columns = ("trials", "right", "wrong", "wrong_certain", "no_verdict")
    width = max([len(name) for name in summary["kinds"]] + [24])
    head = f"{'trials':>6} {'right':>6} {'wrong':>6} {'though certain':>14} {'no verdict':>10}"
    lines = [f"{'kind':{width}} {head}   median ms  said"]

    def row(name: str, counts: dict[str, Any]) -> str:
        cells = [f"{counts[column]:>{size}}" for column, size in zip(columns, (6, 6, 6, 14, 10), strict=True)]
        return f"{name:{width}} {' '.join(cells)}"

    for name, found in summary["kinds"].items():
        median = found["delay"]["median_ms"]
        lines.append(
            f"{row(name, found)}   {'n/a' if median is None else median:>9}  {', '.join(found['said'])}"
        )
    lines += ["", f"{'evidence':{width}} {head}"]
    lines += [row(mode, counts) for mode, counts in summary["total"].items()]
    delay = summary["delay"]
    if delay["trials"]:
        lines += [
            "",
            f"death to verdict on disk, {delay['trials']} deaths: median {delay['median_ms']} ms, "
            f"99th percentile {delay['p99_ms']} ms, longest {delay['max_ms']} ms, "
            f"{delay['within_200_ms']:.1%} within 200 ms",
        ]
    for reason in sorted(set(summary["skipped"].values())):
        names = [name for name, why in summary["skipped"].items() if why == reason]
        lines += ["", f"skipped, {reason}: {', '.join(names)}"]
    if summary["not_staged"]:
        lines += ["", f"{summary['not_staged']} deaths could not be staged and are not counted"]
    return "\n".join(lines)
