"""How well leaks are foretold, and whether warm-ups are left in peace: `python -m bench.leaks`.

Every series is given to `buoy.flight.alarms.forecast.Forecast` as the sidecar would give it (time, step, bytes; two
readings a second when simulated, five when real), and beside it to a naive peer: the slope over the last eight
seconds, no gate on warm-up.
- simulated: many shapes of leaks and of healthy runs, seeded (`leak_shapes.py`);
- real: processes that hold real memory, their RSS read from /proc while they run (`leak_programs.py`).

The error is that of the predicted time to exhaustion when 60 % of the limit is first reached; no prediction counts as
a miss. Shapes that nobody can tell from a leak before they stop are counted apart: there an alarm is what we want.
The seeds are not those on which the thresholds were chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench import leak_programs, leak_shapes
from buoy.flight.alarms.forecast import Forecast

AT = 0.6
_SIMULATED_LEAKS = 220
_SIMULATED_HEALTHY = 200
_SIMULATED_UNDECIDABLE = 60
_REAL_LEAKS = 12
_REAL_HEALTHY = 12
_SEED = 90_000

Sample = tuple[float, int | None, float]


class Naive:
    """The peer: the median slope over the last eight seconds; an alarm like ours, without any gate on its shape."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.recent: list[tuple[float, float]] = []
        self.seconds: float | None = None
        self.alarm = False

    def feed(self, t: float, step: int | None, used: float) -> None:
        self.recent = [point for point in self.recent if t - point[0] <= 8] + [(t, used)]
        points = self.recent
        slopes = sorted(
            (late[1] - early[1]) / (late[0] - early[0])
            for i, early in enumerate(points)
            for late in points[i + 1 :]
        )
        slope = slopes[len(slopes) // 2] if slopes and t - points[0][0] >= 6 else 0.0
        self.seconds = (self.limit - used) / slope if slope > 0 else None
        growing = slope * 8 >= 0.005 * self.limit
        self.alarm = (
            growing and used >= 0.5 * self.limit and self.seconds is not None and self.seconds <= 1800
        )


class Ours:
    """The forecast as the sidecar calls it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.forecast = Forecast("RAM", limit)
        self.seconds: float | None = None
        self.alarm = False

    def feed(self, t: float, step: int | None, used: float) -> None:
        self.forecast.feed(t, step, used)
        outlook = self.forecast.exhaustion()
        self.seconds = outlook.seconds if outlook else None
        self.alarm = bool(outlook and outlook.alarm)


class Watched:
    """What one forecaster made of one series."""

    def __init__(self, samples: Iterable[Sample], forecaster: Ours | Naive) -> None:
        at = predicted = alarm_t = None
        self.alarm_share: float | None = None
        t = 0.0
        for t, step, used in samples:
            forecaster.feed(t, step, used)
            share = (
                used / forecaster.limit if isinstance(forecaster, Naive) else used / forecaster.forecast.limit
            )
            if at is None and share >= AT:
                at, predicted = t, forecaster.seconds
            if alarm_t is None and forecaster.alarm:
                alarm_t, self.alarm_share = t, share
        self.alarmed = alarm_t is not None
        left = t - at if at is not None else 0.0
        self.error = abs(predicted - left) / left if predicted is not None and left > 0 else None
        """Of the time left at 60 %; meaningful for leaks, whose last sample is at the limit."""


def leak_row(name: str, watched: list[Watched]) -> dict[str, object]:
    """How exact the predictions were, and when the alarms came."""
    errors = sorted(float("inf") if run.error is None else run.error for run in watched)
    shares = sorted(run.alarm_share for run in watched if run.alarm_share is not None)
    return {
        "what": name,
        "runs": len(watched),
        "within_25_percent": sum(error <= 0.25 for error in errors) / len(errors),
        "median_error": _finite(errors[len(errors) // 2]),
        "p90_error": _finite(errors[int(0.9 * (len(errors) - 1))]),
        "no_prediction": sum(run.error is None for run in watched),
        "alarms": sum(run.alarmed for run in watched),
        "median_share_at_alarm": shares[len(shares) // 2] if shares else None,
    }


def quiet_row(name: str, watched: list[Watched]) -> dict[str, object]:
    """How many runs that did not exhaust anything were alarmed about."""
    return {"what": name, "runs": len(watched), "alarms": sum(run.alarmed for run in watched)}


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def _judge(
    name: str,
    all_samples: list[list[Sample]],
    limit: float,
    row: Callable[[str, list[Watched]], dict[str, object]],
) -> list[dict[str, object]]:
    return [
        row(f"{name}, buoy", [Watched(samples, Ours(limit)) for samples in all_samples]),
        row(f"{name}, last 8 s", [Watched(samples, Naive(limit)) for samples in all_samples]),
    ]


def _simulated(
    make: Callable[[str, int], list[Sample]], kinds: tuple[str, ...], count: int
) -> list[list[Sample]]:
    return [make(kinds[i % len(kinds)], _SEED + i) for i in range(count)]


def main() -> dict[str, object]:
    """Run all of it, print the table, return its rows."""
    shapes = leak_shapes
    rows = [
        *_judge(
            "simulated leaks", _simulated(shapes.leak, shapes.LEAKS, _SIMULATED_LEAKS), shapes.LIMIT, leak_row
        ),
        *_judge(
            "simulated warm-ups",
            _simulated(shapes.healthy, shapes.HEALTHY, _SIMULATED_HEALTHY),
            shapes.LIMIT,
            quiet_row,
        ),
        *_judge(
            "simulated, straight until it stops",
            _simulated(shapes.undecidable, shapes.UNDECIDABLE, _SIMULATED_UNDECIDABLE),
            shapes.LIMIT,
            quiet_row,
        ),
        *_judge(
            "real leaks", leak_programs.record_all("leak", _REAL_LEAKS, _SEED), leak_programs.LIMIT, leak_row
        ),
        *_judge(
            "real warm-ups",
            leak_programs.record_all("healthy", _REAL_HEALTHY, _SEED),
            leak_programs.LIMIT,
            quiet_row,
        ),
    ]
    _print(rows)
    return {"schema": "buoy.bench.leaks/1", "at_share": AT, "rows": rows}


def _print(rows: list[dict[str, object]]) -> None:
    print(f"{'':44}{'runs':>6}{'within 25 %':>13}{'median':>9}{'p90':>9}{'alarms':>8}{'at share':>10}")
    for row in rows:
        print(
            f"{row['what']:44}{row['runs']:>6}{_percent(row, 'within_25_percent'):>13}"
            f"{_percent(row, 'median_error'):>9}{_percent(row, 'p90_error'):>9}"
            f"{row['alarms']:>8}{_percent(row, 'median_share_at_alarm'):>10}"
        )


def _percent(row: dict[str, object], key: str) -> str:
    value = row.get(key, "")
    if isinstance(value, float):
        return f"{100 * value:.1f} %"
    return "n/a" if value is None else ""


if __name__ == "__main__":
    main()
    sys.exit(0)
