"""What the forecast says of series whose end we know. The many shapes and real processes are in bench/leaks.py."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest

from buoy.flight.alarms.forecast import Deadline, Forecast, Outlook, sentence

LIMIT = 16.0 * 2**30


def watch(
    level: Callable[[float], float],
    *,
    seconds: float,
    steps_per_second: float | None = 4.0,
    noise: float = 0.002,
    until: float = 1.0,
    forecast: Forecast | None = None,
) -> tuple[Forecast, list[tuple[float, Outlook]]]:
    """Feed a training whose memory is `level(t)` (share of the limit) and collect the outlook at each sample."""
    rng = random.Random(7)
    forecast = forecast or Forecast("RAM", LIMIT)
    seen = []
    t = 0.0
    while t < seconds:
        share = level(t) + rng.gauss(0, noise)
        if share >= until:
            break
        forecast.feed(t, None if steps_per_second is None else 1 + int(t * steps_per_second), share * LIMIT)
        outlook = forecast.exhaustion()
        assert outlook is not None
        seen.append((t, outlook))
        t += 0.5
    return forecast, seen


def alarms(seen: list[tuple[float, Outlook]]) -> list[float]:
    return [t for t, outlook in seen if outlook.alarm]


@pytest.mark.parametrize("seconds", [20.0, 300.0, 7200.0])
def test_a_leak_is_foretold_within_a_quarter_at_sixty_percent_whatever_its_pace(seconds: float) -> None:
    _, seen = watch(lambda t: 0.2 + 0.8 * t / seconds, seconds=seconds)

    t, outlook = next((t, outlook) for t, outlook in seen if outlook.share >= 0.6)
    assert outlook.seconds == pytest.approx(seconds - t, rel=0.25)
    assert outlook.at_step == pytest.approx(4 * seconds, rel=0.25)
    assert outlook.per_step == pytest.approx(0.8 * LIMIT / (4 * seconds), rel=0.25)


def test_a_leak_gives_an_alarm_before_it_kills() -> None:
    _, seen = watch(lambda t: 0.2 + 0.8 * t / 600, seconds=600)

    assert 0.5 * 600 * 0.6 < alarms(seen)[0] < 500


def test_growth_that_warms_up_and_settles_gives_no_alarm() -> None:
    for plateau in (0.6, 0.75, 0.9):
        for tau in (5.0, 40.0, 200.0):

            def level(t: float, plateau: float = plateau, tau: float = tau) -> float:
                return 0.1 + (plateau - 0.1) * (1 - math.exp(-t / tau))

            _, seen = watch(level, seconds=6 * tau)

            assert alarms(seen) == [], (plateau, tau)


def test_data_loaded_before_the_first_step_gives_no_alarm() -> None:
    forecast = Forecast("RAM", LIMIT)
    for i in range(200):
        forecast.feed(i * 0.5, 0, LIMIT * 0.8 * i / 200)

        outlook = forecast.exhaustion()
        assert outlook is not None and not outlook.alarm


def test_memory_that_is_given_back_is_no_leak() -> None:
    """A sawtooth: after its first teeth, a rise to where it has been before says nothing."""
    _, seen = watch(lambda t: 0.5 + 0.2 * (t / 4 % 1.0), seconds=600)

    assert alarms(seen) == []


def test_a_leak_under_a_sawtooth_is_told() -> None:
    _, seen = watch(lambda t: 0.2 + 0.75 * t / 600 + 0.05 * (t / 9 % 1.0), seconds=600)

    assert alarms(seen)


def test_a_few_jumps_are_no_leak_and_a_staircase_is() -> None:
    _, jumps = watch(lambda t: 0.2 + 0.25 * (t > 30) + 0.2 * (t > 200), seconds=600)
    _, stairs = watch(lambda t: 0.2 + 0.8 * math.floor(t / 30) / 20, seconds=600)

    assert alarms(jumps) == []
    assert alarms(stairs)


def test_a_leak_that_begins_late_is_seen_from_where_it_began() -> None:
    _, seen = watch(lambda t: 0.35 + max(0.0, t - 3000) * 0.65 / 600, seconds=3600)

    t, outlook = next((t, outlook) for t, outlook in seen if outlook.share >= 0.6)
    assert outlook.seconds == pytest.approx(3600 - t, rel=0.25)
    assert 3000 < alarms(seen)[0] < 3550


def test_an_alarm_ends_when_the_growth_stops() -> None:
    """A cache that fills in a straight line cannot be told from a leak, until it stops."""
    _, seen = watch(lambda t: min(0.7, 0.2 + 0.7 * t / 300), seconds=600)

    assert alarms(seen)
    assert alarms(seen)[-1] < 400


def test_without_counted_steps_the_growth_is_fitted_over_time() -> None:
    _, seen = watch(lambda t: 0.2 + 0.8 * t / 300, seconds=300, steps_per_second=None)

    t, outlook = next((t, outlook) for t, outlook in seen if outlook.share >= 0.6)
    assert outlook.seconds == pytest.approx(300 - t, rel=0.25)
    assert outlook.per_step is None and outlook.at_step is None
    assert 0.85 < dict(seen)[alarms(seen)[0]].share < 0.95


@pytest.mark.parametrize(
    ("own_part", "whose"), [(0.0, "others"), (0.2, "others"), (0.8, "training"), (1.0, "training")]
)
def test_growth_is_the_trainings_only_as_far_as_its_own_processes_grow(own_part: float, whose: str) -> None:
    """0.8 GiB a minute in all; the rest of it belongs to another program in the same session."""
    forecast, rng = Forecast("RAM", LIMIT), random.Random(7)
    for i in range(1200):
        used = LIMIT * (0.2 + 0.8 * i / 1200 + rng.gauss(0, 0.002))
        own = LIMIT * (0.1 + own_part * 0.8 * i / 1200 + rng.gauss(0, 0.002))
        forecast.feed(i * 0.5, 1 + 2 * i, used, own)
        outlook = forecast.news()
        if outlook is not None:
            break

    assert outlook is not None and outlook.whose == whose
    line = sentence(outlook)
    each = own_part * 0.8 * LIMIT / 2400
    if whose == "training":
        assert outlook.per_step == pytest.approx(each, rel=0.1)
        assert "per step" in line
    else:
        assert outlook.per_step is None and outlook.at_step is None
        assert "per step" not in line and "Other programs are growing" in line
    assert len(line) <= 200


def test_exhaustion_after_the_session_has_ended_is_no_alarm() -> None:
    forecast = Forecast("RAM", LIMIT)
    forecast.horizon = 10.0
    _, seen = watch(lambda t: 0.2 + 0.8 * t / 300, seconds=250, forecast=forecast)

    assert alarms(seen) == []


def test_without_a_limit_or_a_reading_nothing_is_said() -> None:
    unlimited = Forecast("VRAM", None)
    unlimited.feed(0.0, 1, 5.0)
    unread = Forecast("VRAM", LIMIT)
    unread.feed(0.0, 1, None)

    assert unlimited.exhaustion() is None and unlimited.news() is None
    assert unread.exhaustion() is None and unread.news() is None


def test_a_limit_that_is_raised_moves_the_end() -> None:
    forecast, seen = watch(lambda t: 0.2 + 0.8 * t / 300, seconds=200)
    before = seen[-1][1].seconds
    forecast.limit = 2 * LIMIT
    forecast.feed(202.0, 809, 0.74 * LIMIT)

    outlook = forecast.exhaustion()
    assert outlook is not None and before is not None and outlook.seconds is not None
    assert outlook.seconds > 2 * before


def test_the_same_alarm_is_told_again_only_when_its_time_has_halved() -> None:
    forecast = Forecast("RAM", LIMIT)
    told = []
    for i in range(2400):
        forecast.feed(i * 0.5, 1 + 2 * i, LIMIT * (0.2 + 0.8 * i / 2400))
        outlook = forecast.news()
        if outlook is not None:
            told.append(outlook.seconds)

    assert 2 <= len(told) <= 5
    assert all(later <= 0.5 * earlier for earlier, later in pairwise(told))


def test_the_history_stays_small_over_a_day() -> None:
    forecast = Forecast("RAM", LIMIT)
    for i in range(2 * 86400):
        forecast.feed(i * 0.5, i, 0.4 * LIMIT)

    points = forecast._history.points()
    assert len(points) < 300
    assert points[0][0] < 3 * 3600 and [p[0] for p in points] == sorted(p[0] for p in points)


def test_the_sessions_end_is_announced_in_time_and_not_before() -> None:
    deadline = Deadline(12 * 3600.0)
    deadline.feed(6 * 3600.0, 1000, 2.0)
    early = deadline.news()
    deadline.feed(11.6 * 3600.0, 20000, 2.0)
    late = deadline.news()

    assert early is None
    assert late is not None and late.seconds == pytest.approx(0.4 * 3600) and late.at_step == 20720
    assert sentence(late) == (
        "Session time 11 h 36 min of 12 h (97 %) is used: it ends in about 24 min (step ~20720). "
        "Save a checkpoint before then."
    )
    assert Deadline(None).news() is None


@pytest.mark.parametrize("name", ["RAM", "VRAM", "disk", "shm", "time", "something else"])
def test_the_line_shows_value_limit_and_percent_and_is_short(name: str) -> None:
    outlook = Outlook(name, 1023.4 * 2**30, 1234.5 * 2**30, 1799.0, 1023.9 * 2**20, 1e9, 123_456_789, True)

    line = sentence(outlook)
    assert len(line) <= 200
    assert "(83 %)" in line and "step ~123456789" in line and line.endswith(".")


def test_the_alarms_load_nothing_that_the_sidecar_cannot_afford() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "import buoy.flight.alarms.forecast, buoy.flight.alarms.stall, buoy.flight.alarms.slowdown; "
        "print(sorted({'dataclasses', 'typing', 'json', 're', 'enum', 'statistics', 'pathlib'} & set(sys.modules)))"
    )
    source = __import__("buoy").__path__[0] + "/.."

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, source], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
