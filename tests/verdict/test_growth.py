"""What is said about how memory grew: only what the later samples agree on, and never steps that nobody counted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from folders import DIED_T, DIED_WALL, GIB, Attempt

from buoy.flight.log import FIELDS, SampleLog
from buoy.verdict.memory import bytes_per_second, bytes_per_step

MIB = 1 << 20
LIMIT = 2 * GIB


def grows(attempt: Attempt, used: Callable[[int], float], steps: bool = True, rows: int = 60) -> None:
    """Ten samples a second, one step each, with so many MiB in use."""
    attempt.samples = [
        {**attempt.samples[0], "t": DIED_T - (rows - n) / 10, "wall": DIED_WALL - (rows - n) / 10,
         "step": n + 1 if steps else 0, "tree_rss": int(used(n) * MIB)}
        for n in range(rows)
    ]  # fmt: skip


def test_warm_up_is_left_out_of_the_growth(attempt: Attempt) -> None:
    """100 MiB in the first fifteen steps, then 4 MiB a step."""
    grows(attempt, lambda n: 300 + min(n, 15) * 20 + 4 * n)

    assert bytes_per_step(attempt.evidence(), LIMIT) == pytest.approx(4 * MIB, rel=0.05)


def test_lumps_of_an_allocator_do_not_hide_the_growth(attempt: Attempt) -> None:
    grows(attempt, lambda n: 300 + 16 * (n * 4 // 16))

    assert bytes_per_step(attempt.evidence(), LIMIT) == pytest.approx(4 * MIB, rel=0.15)


@pytest.mark.parametrize("used", [lambda n: 300.0, lambda n: 300 + (n > 50) * 900, lambda n: 300 + n**4 / 1e4,
                                  lambda n: 900 - n * 4, lambda n: 300 + n * 0.1])  # fmt: skip
def test_no_growth_is_named_where_there_is_none_in_common(
    attempt: Attempt, used: Callable[[int], float]
) -> None:
    grows(attempt, used)

    assert bytes_per_step(attempt.evidence(), LIMIT) is None


def test_without_steps_growth_is_told_by_the_second(attempt: Attempt) -> None:
    grows(attempt, lambda n: 300 + 4 * n, steps=False)
    attempt.oom_killed()
    verdict = attempt.verdict()

    assert bytes_per_second(attempt.evidence(), LIMIT) == pytest.approx(40 * MIB, rel=0.05)
    assert "about 40.0 MiB a second" in verdict.cause.next[0]
    assert "never released" not in str(verdict)  # an import, or one array that is filled, looks the same
    assert not any("first step" in step for step in verdict.cause.next)


def test_who_no_longer_grew_did_not_die_of_growing(attempt: Attempt) -> None:
    """Imports fill memory for a while, and then nothing moves for a minute."""
    grows(attempt, lambda n: 100 + 10 * min(n, 40), steps=False, rows=100)

    assert bytes_per_second(attempt.evidence(), LIMIT) is None


def test_where_no_steps_were_counted_none_is_spoken_of(attempt: Attempt) -> None:
    for row in attempt.samples:
        row["step"] = 0
    attempt.oom_killed()
    advice = " | ".join(attempt.verdict().cause.next)

    assert "no steps were counted" in advice
    assert "before the first step" not in advice


def test_growth_by_the_step_is_said_to_be_about_so_much(attempt: Attempt) -> None:
    grows(attempt, lambda n: 300 + 4 * n)
    attempt.oom_killed()

    assert "about 4.0 MiB with each step" in attempt.verdict().cause.next[0]


def test_holders_beyond_the_limit_explain_themselves(attempt: Attempt) -> None:
    attempt.oom_killed()
    assert "shared" not in (attempt.verdict().holders[0].detail or "")

    attempt.death["processes"][0]["rss"] = 3 * GIB
    assert "shared and file pages that the limit does not count" in (
        attempt.verdict().holders[0].detail or ""
    )
    assert "does not count" in str(attempt.verdict())


def warns(attempt: Attempt, before: float, seconds: float, alarm: str = "ram") -> None:
    values = {"name": alarm.upper(), "used": GIB, "limit": LIMIT, "seconds": seconds, "per_step": 8 * MIB,
              "per_second": 64 * MIB, "at_step": 303, "share": 0.5, "alarm": True}  # fmt: skip
    attempt.event("warning", before, alarm=alarm, text="RAM is filling", values=values)


def test_a_leak_that_was_warned_of_is_evidence_and_the_first_advice(attempt: Attempt) -> None:
    """It began late: the last samples agree on no growth, the forecast did."""
    grows(attempt, lambda n: 300 + (n > 50) * 900)
    warns(attempt, before=2.5, seconds=3.0)
    attempt.oom_killed()
    cause = attempt.verdict().cause

    assert "memory grew about 8.0 MiB with each step" in cause.next[0]
    assert any(
        reading.text.startswith("warned 2.5 s before: 1.0 GiB of 2.0 GiB") for reading in cause.claim.evidence
    )
    assert not any("halve" in step for step in cause.next)


def test_a_warning_of_long_ago_explains_no_end(attempt: Attempt) -> None:
    warns(attempt, before=500.0, seconds=60.0)
    attempt.oom_killed()
    cause = attempt.verdict().cause

    assert not any("never released" in step for step in cause.next)
    assert not any("warned" in reading.text for reading in cause.claim.evidence)


def test_a_leak_on_the_gpu_that_was_warned_of_comes_before_smaller_batches(attempt: Attempt) -> None:
    attempt.raises("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
    warns(attempt, before=2.5, seconds=3.0, alarm="vram")
    cause = attempt.verdict().cause

    assert cause.id == "gpu-oom" and "grew about 8.0 MiB with each step" in cause.next[0]
    assert not any("halve" in step for step in cause.next)


def test_a_leak_that_began_late_is_seen_from_where_it_began(attempt: Attempt) -> None:
    grows(attempt, lambda n: 300 + max(0, n - 44) * 60)

    assert bytes_per_step(attempt.evidence(), LIMIT) == pytest.approx(60 * MIB, rel=0.1)


@pytest.mark.parametrize("used", [lambda n: 300 + (n > 50) * 60 * min(n - 50, 4), lambda n: 20 * 1.08**n,
                                  lambda n: 300 + max(0, n - 44) * 8])  # fmt: skip
def test_a_short_end_must_grow_much_and_evenly(attempt: Attempt, used: Callable[[int], float]) -> None:
    """A burst that stopped, a growth that itself grows, and one too small to fill anything."""
    grows(attempt, used)

    assert bytes_per_step(attempt.evidence(), LIMIT) is None


def recorded(attempt: Attempt, used: Callable[[float], float], seconds: float, pace: float) -> None:
    """The whole attempt as the recorder writes it: minutes, and the last ten at full rate. MiB held, steps a second."""
    attempt.write()
    for path in attempt.folder.glob("samples-*"):
        path.unlink()
    log = SampleLog(str(attempt.folder))
    for n in range(int(5 * seconds)):
        t = DIED_T - seconds + 0.1 + n / 5
        row = {
            **attempt.samples[0],
            "t": t,
            "wall": t,
            "step": 1 + int(pace * n / 5),
            "tree_rss": int(used(n / 5) * MIB),
        }
        log.add([row.get(name) for name in FIELDS])
    log.flush()
    attempt.samples = []


@pytest.mark.parametrize("seconds", [60.0, 560.0, 3600.0])
@pytest.mark.parametrize("breath", [0.0, 300.0])
def test_a_leak_by_the_step_is_seen_at_any_pace_and_under_what_a_step_takes_and_gives_back(
    attempt: Attempt, seconds: float, breath: float
) -> None:
    """0.8 MiB a step until 2 GiB are full; the readings fall anywhere within a step."""
    pace = 1500 / 0.8 / seconds
    chance = random.Random(7)
    recorded(attempt, lambda t: 250 + 0.8 * pace * t + breath * chance.random(), seconds, pace)
    attempt.oom_killed()

    assert bytes_per_step(attempt.evidence(), LIMIT) == pytest.approx(0.8 * MIB, rel=0.1)
    advice = " ".join(attempt.verdict().cause.next)
    assert "never released" in advice and "halve" not in advice


def test_what_only_breathes_does_not_leak(attempt: Attempt) -> None:
    chance = random.Random(7)
    recorded(attempt, lambda t: 1200 + 600 * chance.random(), 600.0, 4.0)

    assert bytes_per_step(attempt.evidence(), LIMIT) is None


def test_other_programs_that_grew_are_not_the_training(attempt: Attempt) -> None:
    warns(attempt, before=2.5, seconds=3.0)
    attempt.events[-1]["values"].update(whose="others", per_step=None, per_second=6 * MIB)
    attempt.oom_killed()
    advice = " ".join(attempt.verdict().cause.next)

    assert "other programs grew, about 6.0 MiB a second, and not the training" in advice
    assert "never released" not in advice
