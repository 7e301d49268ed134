"""When a checkpoint is made: this file decides it, from what the user asked for, what saving costs and what is coming.

Asked between two steps, `SavePolicy.reason` answers with the first of these that holds:

- `deadline`: the session ends soon. A checkpoint before it, then more of them, until the platform pulls the plug.
- what could not be saved before, now that there is room for it.
- `steps`: so many were made as `save=500` says.
- `alarm`: the sidecar foresees that memory or disk runs out.
- `interval`: the time that `save="10min"` says has passed, or the one that costs least over all. That is Young's rule:
  with a cost C per checkpoint and a death every M seconds on average, saving every sqrt(2 * C * M) seconds loses least
  to saving and to work done twice. Both are measured where they can be.

A signal (`sigterm`, `interrupt`), the user's own `save()` (`user`), the end of an epoch with its metric (`epoch`), of
the training (`finished`) and of the process (`exit`) are reasons that others bring; `REASONS` orders them all.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

from buoy.errors import UsageError
from buoy.machine.files import read_bounded, read_json
from buoy.training.messages import say
from buoy.units import format_duration, parse_duration

if TYPE_CHECKING:
    from buoy.checkpoint.saver import Receipt
    from buoy.flight.attempt import Attempt
    from buoy.flight.recorder import Recorder

REASONS = (
    "",
    "interval",
    "steps",
    "user",
    "epoch",
    "exit",
    "finished",
    "alarm",
    "deadline",
    "interrupt",
    "sigterm",
)
"""From the least urgent to the most: the ranks agree on the most urgent that any of them has."""
ENDING = ("interrupt", "sigterm")
"""After these the process ends."""
FIRST_SECONDS = 20.0
"""The first checkpoint comes early: it shows that saving works, and what it costs."""
SHORTEST, LONGEST = 15.0, 1800.0
_LOOK_SECONDS = 2.0
_LOOK_WHILE_WRITING = 0.05
_RETRY_SECONDS = 60.0
_RETRY_MOST = 900.0
_MOST_SHARE = 0.01
"""Saving may take this share of the time."""
_WRITE_SHARE = 0.1
"""The writer may be busy for this share of the time: it takes cores and the disk from the training."""
_UNKNOWN_MEAN_LIFE = 4 * 3600.0
_LIFE_OF_LIMIT = 1 / 3
"""A session that may live 12 h is taken to die after 4 on average, until the run's own attempts say more."""
_ATTEMPTS_MOST = 50
_LEAST_MARGIN = 30.0
_LEAST_PAUSE = 10.0
_EXHAUSTION = {"ram", "ram-level", "vram", "disk", "shm"}
_DEADLY = _EXHAUSTION - {"disk", "ram-level"}
"""What ends the process when it is full, at a forecast time; on a disk that fills, more checkpoints are no help."""
_MOST_BYTES = 256 << 10
_PAUSE = 60.0
"""A leak is warned of again and again; one checkpoint a minute is enough for a warning."""
_LEAST_AFTER = 60.0
"""Seconds after the forecast end in which it may still come; at least as long again as it was forecast before."""
_ALARMS_LEAST_PAUSE, _UNKNOWN_PAUSE = 2.0, 10.0


class SavePolicy:
    """When one run is saved; hears what became of each save. Times are on the monotonic clock."""

    def __init__(self, rule: Rule, time_limit: float | None, recorder: Recorder, run_folder: str) -> None:
        attempt = recorder.attempt
        self._rule = rule
        self._deadline = find_deadline(attempt, time_limit)
        self._alarms = Alarms(recorder)
        self._pace = Pace()
        lives = lives_of(run_folder, attempt.folder if attempt is not None else None)
        limit = self._deadline.limit if self._deadline is not None else None
        self._interval = Interval(rule, mean_life(limit, lives))
        self._step_due: float = inf if rule.steps is None else 0
        self._look = 0.0
        self._began: float | None = None
        self._saved: float | None = None
        self._not_before = 0.0
        self.failures = 0
        """So many saves failed in a row."""
        self._last: tuple[str, str | None] = ("interval", None)  # the last save's reason, and its pin
        self._is_repeated = self._is_alarmed = self._said_deadline = False

    def is_early(self, step: int) -> bool:
        """Whether nothing can be due yet: one comparison and one look at the clock."""
        return step < self._step_due and time.monotonic() < self._look

    def look_again(self, *, later: bool = False) -> None:
        """Whatever was decided, look again at once; `later`: looking has failed."""
        self._look = time.monotonic() + _RETRY_SECONDS if later else 0.0

    def begin(self, now: float, step: int) -> None:
        """A step may follow: count from the first of these calls."""
        if self._began is None:
            self._began = now
            self._pace.start(now, step)
            self._count_steps(step)

    def reason(self, now: float, step: int, *, busy: bool, mirror_seconds: float) -> str | None:
        """Why to save now, or None. `busy`: a write is under way; `mirror_seconds`: what a copy to the mirror takes."""
        assert self._began is not None
        self._look = now + (_LOOK_WHILE_WRITING if busy else _LOOK_SECONDS)
        if not busy and self._ends_soon(now, mirror_seconds):
            return "deadline"  # even after failures: there is no later
        if self._is_repeated and not busy:
            return self._last[0]
        if now < self._not_before:
            return None
        if step >= self._step_due:
            return "steps"
        if busy:
            return None  # the next one would have to wait for it
        self._is_alarmed = self._is_alarmed or self._alarms.due(now, self._saved, self._interval.cost)
        if self._is_alarmed:  # until it is answered: this may not have been a moment at which one can save
            return "alarm"
        next_save = self._interval.after(self._saved, self._began)
        if now >= next_save:
            return "interval"
        self._look = min(self._look, next_save)
        return None

    def _ends_soon(self, now: float, mirror_seconds: float) -> bool:
        cost = self._interval.cost
        if self._deadline is None or not self._deadline.due(
            now, self._saved, cost, mirror_seconds, self._pace.usual or 0.0
        ):
            return False
        if not self._said_deadline:
            self._said_deadline = True
            say(
                f"the session ends in {format_duration(self._deadline.left(now))}: saving now and then every "
                f"{format_duration(deadline_pause(cost))}; training continues until the session ends"
            )
        return True

    # -- what became of it ------------------------------------------------------------------------------------

    def pin(self, reason: str, pin: str | None) -> str | None:
        """The name to pin a save under: the one that is repeated keeps its own."""
        pin = pin or (self._last[1] if self._is_repeated else None)
        self._last = (reason, pin)
        return pin

    def tried(self, now: float, step: int) -> None:
        """A save was made, or failed: the next is counted from here."""
        self._saved, self._is_alarmed, self._is_repeated = now, False, False
        self._count_steps(step)
        self._look = 0.0

    def handed_over(self, began: float, now: float, step: int) -> None:
        """The checkpoint was copied, and is being written beside the training."""
        self._pace.saved(began, now, step)

    def safe(self, receipt: Receipt, now: float, step: int) -> str | None:
        """It is on disk; the interval chosen from what it cost, for the user, when that is news."""
        self.failures, self._not_before = 0, 0.0
        return self._interval.learn(self._pace.cost(receipt, now, step))

    def failed(self, now: float) -> float:
        """Seconds until it is tried again."""
        self.failures += 1
        pause: float = min(_RETRY_MOST, _RETRY_SECONDS * 2 ** (self.failures - 1))
        self._not_before = now + pause
        return pause

    def repeat(self) -> None:
        """The disk was full under the last write, and room was made since."""
        self._is_repeated, self._look = True, 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the session ends; None where nobody knows."""
        return self._deadline.left(time.monotonic()) if self._deadline is not None else None

    def _count_steps(self, step: int) -> None:
        if self._rule.steps is not None:
            self._step_due = (step // self._rule.steps + 1) * self._rule.steps


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
            "cannot read how often to save",
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
    """The choice, for the user who did not make it.

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
    """How much longer than usual these steps took in all; 0 when it is not known."""
    return max(0.0, seconds - steps * usual_step) if usual_step is not None and steps > 0 else 0.0


class Pace:
    """How fast steps are made, to tell by how much a checkpoint slows them."""

    def __init__(self) -> None:
        self.usual: float | None = None
        """Seconds for a step while nothing is written, the loop's own pauses included."""
        self._at, self._step = 0.0, 0
        self._stall = 0.0

    def start(self, now: float, step: int) -> None:
        """Count from here."""
        self._at, self._step = now, step

    def saved(self, began: float, now: float, step: int) -> None:
        """A checkpoint was handed over: what was before is the usual pace, what follows is slowed."""
        if step > self._step:
            self.usual = (began - self._at) / (step - self._step)
        self._stall = now - began
        self.start(now, step)

    def cost(self, receipt: Receipt, now: float, step: int) -> Cost:
        """What the checkpoint cost that is now safe."""
        slowed = slowdown(now - self._at, step - self._step, self.usual)
        self.start(now, step)
        write = receipt.write_seconds or 0.0
        return Cost(self._stall, min(slowed, write), write)


class Interval:
    """The time between two checkpoints: as asked, or chosen from what they cost and said once."""

    _WITHOUT_COST = 120.0
    _SMOOTHING = 0.3

    def __init__(self, rule: Rule, mean_life: float) -> None:
        self._rule = rule
        self._mean_life = mean_life
        self._samples = 0
        self.cost: Cost | None = None
        self.seconds: float | None = rule.seconds

    def after(self, saved: float | None, began: float) -> float:
        """When the next one is due, on the monotonic clock."""
        if self._rule.steps is not None:
            return inf
        if self._rule.seconds is not None:
            return (began if saved is None else saved) + self._rule.seconds
        if saved is None:
            return began + FIRST_SECONDS
        return saved + (self.seconds if self.seconds is not None else self._WITHOUT_COST)

    def learn(self, cost: Cost) -> str | None:
        """Take in what one cost; the choice in words when it is the first that counts."""
        self._samples += 1
        # The first touches fresh memory and costs more than the rest.
        if self.cost is None or self._samples == 2:
            self.cost = cost
        else:
            share = self._SMOOTHING
            self.cost = Cost(
                *(
                    (1 - share) * getattr(self.cost, name) + share * getattr(cost, name)
                    for name in ("stall", "slowdown", "write")
                )
            )
        if self._rule.seconds is not None or self._rule.steps is not None:
            return None
        self.seconds = best_interval(self.cost, self._mean_life)
        if self._samples == 1:
            self.seconds = min(self.seconds, self._WITHOUT_COST)
            return None
        return in_words(self.cost, self.seconds) if self._samples == 2 else None


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the session ends, on the monotonic clock."""

    at: float
    limit: float
    """Seconds the session may live in all."""

    def left(self, now: float) -> float:
        """Seconds to go; negative when the session outlived its limit."""
        return self.at - now

    def due(self, now: float, saved: float | None, cost: Cost | None, mirror: float, step: float) -> bool:
        """Whether to save now, having last saved at `saved`.

        `mirror` is how long a copy to the mirror takes, `step` what a step takes: both are part of the margin.
        """
        begins = self.at - margin(cost, mirror, step)
        if not begins <= now < self.at:
            return False
        return saved is None or saved < begins or now - saved >= deadline_pause(cost)


def margin(cost: Cost | None, mirror: float, step: float) -> float:
    """Seconds before the end from which it is time to save.

    >>> margin(Cost(0.1, 0.1, 4.0), mirror=10.0, step=0.5)
    48.3
    """
    save = cost.stall + cost.write if cost is not None else 0.0
    return max(_LEAST_MARGIN, 15.0 + 3 * save + 2 * mirror + 2 * step)


def deadline_pause(cost: Cost | None) -> float:
    """Seconds between the checkpoints before the end: more work is saved than is spent on saving it."""
    return max(_LEAST_PAUSE, 10 * cost.seconds, 3 * cost.write) if cost is not None else _LEAST_PAUSE


def find_deadline(attempt: Attempt | None, given: float | None) -> Deadline | None:
    """The session's end: as given, counted from the attempt's start, or what the attempt knows of its platform."""
    known = (read_json(f"{attempt.folder}/attempt.json") if attempt is not None else None) or {}
    limit, began = known.get("time_limit"), known.get("session_started")
    if given is not None:
        # On a platform the session began with its machine; a limit that a user gives begins with the run.
        limit, began = given, began if known.get("time_limit_source") == "given" else known.get("wall")
    if not isinstance(limit, int | float):
        return None
    lived = max(0.0, time.time() - began) if isinstance(began, int | float) else 0.0
    return Deadline(time.monotonic() + limit - lived, float(limit))


def alarm_pause(cost: Cost | None) -> float:
    """Seconds between two checkpoints before a foretold end: saving may take a tenth of the time, for a short while.

    >>> alarm_pause(Cost(stall=0.01, slowdown=0.0, write=0.2)), alarm_pause(Cost(0.5, 0.5, 4.0)), alarm_pause(None)
    (2.0, 12.0, 10.0)
    """
    return max(_ALARMS_LEAST_PAUSE, 10 * cost.seconds, 3 * cost.write) if cost is not None else _UNKNOWN_PAUSE


class Alarms:
    """Reads on in the attempt's events, a few bytes every few seconds."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attempt: Attempt | None = None
        self._offset = 0
        self._told = -_PAUSE
        self._end = self._over = -inf
        """When something that ends the process will be full, and when that is no longer to be expected."""

    def due(self, now: float, saved: float | None, cost: Cost | None) -> bool:
        """Whether to save for what was foretold, having last saved at `saved`.

        At the first warning, and again whenever the time that is left has halved: the nearer the end, the less is lost.
        The measured cost sets the shortest pause. After the foretold end the pauses grow again, and then it is over.
        """
        told = [found for line in self._new_lines() if (found := _exhaustion(line)) is not None]
        for alarm, seconds in told:
            if alarm in _DEADLY and seconds is not None:
                self._end, self._over = now + seconds, now + seconds + max(_LEAST_AFTER, seconds)
        if told and now - self._told >= _PAUSE:
            self._told = now
            return True
        if now >= self._over or saved is None:
            return False
        return now - saved >= max(abs(self._end - now), alarm_pause(cost))

    def _new_lines(self) -> list[bytes]:
        attempt = self._recorder.attempt
        if attempt != self._attempt:  # the recording was started again
            self._attempt, self._offset = attempt, 0
        if attempt is None:
            return []
        try:
            data = read_bounded(os.path.join(attempt.folder, "events.jsonl"), _MOST_BYTES, at=self._offset)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole) or (len(data) if len(data) == _MOST_BYTES else 0)
        return whole.splitlines()


def _exhaustion(line: bytes) -> tuple[str, float | None] | None:
    """What this line of the events says will be full, and in how many seconds; None where it says no such thing."""
    if b'"warning"' not in line:
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("kind") != "warning" or event.get("alarm") not in _EXHAUSTION:
        return None
    values = event.get("values")
    seconds = values.get("seconds") if isinstance(values, dict) else None
    return event["alarm"], float(seconds) if isinstance(seconds, int | float) else None


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
    from buoy.flight.attempt import attempt_numbers

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
