"""The rhythm of saving: how fast steps are made, what a checkpoint costs them, and so when the next one is due."""

from __future__ import annotations

from math import inf

from buoy.checkpoint import schedule
from buoy.checkpoint.store import Receipt


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

    def cost(self, receipt: Receipt, now: float, step: int) -> schedule.Cost:
        """What the checkpoint cost that is now safe."""
        slowed = schedule.slowdown(now - self._at, step - self._step, self.usual)
        self.start(now, step)
        write = receipt.write_seconds or 0.0
        return schedule.Cost(self._stall, min(slowed, write), write)


class Interval:
    """The time between two checkpoints: as asked, or chosen from what they cost and told once."""

    _WITHOUT_COST = 120.0
    _SMOOTHING = 0.3

    def __init__(self, rule: schedule.Rule, mean_life: float) -> None:
        self._rule = rule
        self._mean_life = mean_life
        self._samples = 0
        self.cost: schedule.Cost | None = None
        self.seconds: float | None = rule.seconds

    def after(self, saved: float | None, began: float) -> float:
        """When the next one is due, on the monotonic clock."""
        if self._rule.steps is not None:
            return inf
        if self._rule.seconds is not None:
            return (began if saved is None else saved) + self._rule.seconds
        if saved is None:
            return began + schedule.FIRST_SECONDS
        return saved + (self.seconds if self.seconds is not None else self._WITHOUT_COST)

    def learn(self, cost: schedule.Cost) -> str | None:
        """Take in what one cost; the choice in words when it is the first that counts."""
        self._samples += 1
        # The first touches fresh memory and costs more than the rest.
        if self.cost is None or self._samples == 2:
            self.cost = cost
        else:
            share = self._SMOOTHING
            self.cost = schedule.Cost(
                *(
                    (1 - share) * getattr(self.cost, name) + share * getattr(cost, name)
                    for name in ("stall", "slowdown", "write")
                )
            )
        if self._rule.seconds is not None or self._rule.steps is not None:
            return None
        self.seconds = schedule.best_interval(self.cost, self._mean_life)
        if self._samples == 1:
            self.seconds = min(self.seconds, self._WITHOUT_COST)
            return None
        return schedule.in_words(self.cost, self.seconds) if self._samples == 2 else None
