"""When a checkpoint is due: what the user asked for, or an interval that costs least over all.

Young's rule: with a cost C per checkpoint and a failure every M seconds on average, saving every
sqrt(2 * C * M) seconds loses least to saving and to work done twice. Both are measured where they can be.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import sqrt

from buoy.errors import UsageError
from buoy.flight.attempt import attempt_numbers
from buoy.machine.records import read_json
from buoy.units import format_duration, parse_duration

FIRST_SECONDS = 20.0
"""The first checkpoint comes early: it shows that saving works, and what it costs."""
SHORTEST, LONGEST = 15.0, 1800.0
_MOST_SHARE = 0.01
"""Saving may take this share of the time."""
_WRITE_SHARE = 0.1
"""The writer may be busy for this share of the time: it takes cores and the disk from the training."""
_UNKNOWN_MEAN_LIFE = 4 * 3600.0
_LIFE_OF_LIMIT = 1 / 3
"""A session that may live 12 h is taken to die after 4 on average, until the run's own attempts say more."""
_ATTEMPTS_MOST = 50


@dataclass(frozen=True, slots=True)
class Rule:
    """What was asked for: so many seconds, so many steps, or (neither) what costs least."""

    seconds: float | None = None
    steps: int | None = None


def parse_rule(save: str | int | None) -> Rule:
    """The user's `save=`: `"10min"`, `500` or `"500 steps"`, None to let buoy choose.

    >>> parse_rule("10min"), parse_rule(500), parse_rule("500 steps")
    (Rule(seconds=600.0, steps=None), Rule(seconds=None, steps=500), Rule(seconds=None, steps=500))
    """
    if save is None:
        return Rule()
    steps: int | None = save if isinstance(save, int) and not isinstance(save, bool) else None
    if isinstance(save, str):
        number, _, word = save.strip().partition(" ")
        if word.strip() in ("step", "steps") and number.isdigit():
            steps = int(number)
        elif (seconds := parse_duration(save)) > 0:
            return Rule(seconds=seconds)
    if steps is None or steps <= 0:
        raise UsageError(
            "cannot read when to save",
            received=f"save={save!r}",
            expected="a time or a number of steps, more than 0",
            hint='`save="10min"` or `save=500`; leave it out and buoy chooses from the measured cost',
        )
    return Rule(steps=steps)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one checkpoint was measured to cost."""

    stall: float
    """Seconds the training waited."""
    slowdown: float
    """Seconds by which the steps during the write took longer in all."""
    write: float
    """Seconds until it was safe on disk."""

    @property
    def seconds(self) -> float:
        """What the training loses with each checkpoint."""
        return self.stall + self.slowdown


def best_interval(cost: Cost, mean_life: float) -> float:
    """Seconds between two checkpoints.

    >>> round(best_interval(Cost(stall=0.1, slowdown=0.1, write=1.0), mean_life=4 * 3600))
    76
    """
    cheapest = sqrt(2 * cost.seconds * mean_life)
    bearable = max(cheapest, cost.seconds / _MOST_SHARE, cost.write / _WRITE_SHARE)
    return min(LONGEST, max(SHORTEST, bearable))


def in_words(cost: Cost, interval: float) -> str:
    """The choice, for the person who did not make it.

    >>> in_words(Cost(0.12, 0.01, 0.9), 120.0)
    'a checkpoint costs 0.13 s and takes 0.9 s to write; saving every 2 min: 0.1 % of the time, at most 2 min lost'
    """
    share = 100 * cost.seconds / interval
    every = format_duration(round(interval))
    percent = "less than 0.1 %" if share < 0.05 else f"{share:.1f} %"
    return (
        f"a checkpoint costs {format_duration(cost.seconds)} and takes {format_duration(cost.write)} to write; "
        f"saving every {every}: {percent} of the time, at most {every} lost"
    )


def slowdown(seconds: float, steps: int, usual_step: float | None) -> float:
    """How much longer than usual these steps took in all; 0 when it cannot be told."""
    return max(0.0, seconds - steps * usual_step) if usual_step is not None and steps > 0 else 0.0


def mean_life(time_limit: float | None, lives: list[tuple[float, bool]]) -> float:
    """Seconds between two deaths: a guess from the session's limit that counts as one death, then what was seen.

    `lives` are the attempts of this run before this one: how long each lived, and whether it died early.

    >>> mean_life(12 * 3600, []), mean_life(12 * 3600, [(600.0, True), (600.0, True), (600.0, True)])
    (14400.0, 4050.0)
    """
    guess = time_limit * _LIFE_OF_LIMIT if time_limit is not None else _UNKNOWN_MEAN_LIFE
    lived = sum(seconds for seconds, _ in lives)
    return (guess + lived) / (1 + sum(died for _, died in lives))


def lives_of(run_folder: str, but: str | None = None) -> list[tuple[float, bool]]:
    """How long each attempt of a run lived and whether it died, leaving out the attempt folder `but`."""
    lives = []
    for number in attempt_numbers(run_folder)[-_ATTEMPTS_MOST:]:
        folder = os.path.join(run_folder, "attempts", f"{number:04d}")
        if but is not None and os.path.realpath(folder) == os.path.realpath(but):
            continue
        began = (read_json(os.path.join(folder, "attempt.json")) or {}).get("wall")
        death = read_json(os.path.join(folder, "death.json"))
        ended = death.get("wall") if death is not None else _last_written(folder)
        if not isinstance(began, int | float) or not isinstance(ended, int | float):
            continue
        status = (death.get("status") or {}).get("raw") if death is not None else None
        lives.append((max(0.0, ended - began), status != 0))
    return lives


def _last_written(folder: str) -> float | None:
    """When anything was last written there: the end of an attempt whose machine went with it."""
    try:
        return max((entry.stat().st_mtime for entry in os.scandir(folder)), default=None)
    except OSError:
        return None
