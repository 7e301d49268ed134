"""The log of sizes: an attempt that is begun again uses those of the one before, and goes on as that one would have."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from buoy.microbatch.batch import even
from buoy.microbatch.sizing import History, Sizer

TOTAL = 64
AMPLE = 10 * TOTAL


class Attempt:
    """Steps on a device on which so many samples fit, a number for each step."""

    def __init__(self, fits: list[int], log: list[str]) -> None:
        self.fits = fits
        self.log = log
        self.sizer, self.history = Sizer(), History()
        self.sizes: dict[int, list[int]] = {}
        self.failures = 0

    def resume(self, checkpoint: dict[str, Any], first: int) -> None:
        self.sizer.load_state_dict(checkpoint["sizer"])
        self.history.load_state_dict(checkpoint["history"])
        self.history.replay([json.loads(line) for line in self.log], first)

    def state(self) -> dict[str, Any]:
        return {"sizer": self.sizer.state_dict(), "history": self.history.state_dict()}

    def step(self, step: int) -> None:
        parts = self.history.parts(step, TOTAL) or even(TOTAL, self.sizer.samples(TOTAL, 1.0, None)[0])
        while max(parts) > self.fits[step]:
            self.failures += 1
            self.history.leave()
            parts = even(TOTAL, self.sizer.oom(max(parts), 1.0))
        self.sizer.done(max(parts), 1.0, held_back=len(parts) > 1)
        written = len(self.history.entries)
        self.history.note(step, TOTAL, parts, self.sizer)
        self.log += [json.dumps(entry) for entry in self.history.entries[written:]]
        self.sizes[step] = parts


@pytest.mark.parametrize("seed", range(20))
def test_steps_done_again_have_the_sizes_they_had_and_so_have_the_steps_after_them(seed: int) -> None:
    """Memory is short now and then; when the lost steps are done again there is plenty of it."""
    chance = random.Random(seed)
    fits = [chance.choice([5, 9, 20, 33]) if chance.random() < 0.05 else AMPLE for _ in range(300)]
    whole = Attempt(fits, [])
    checkpoints = {}
    for step in range(300):
        checkpoints[step] = whole.state()
        whole.step(step)
    assert len(whole.log) > 3, "nothing happened in this training"

    sizes: dict[int, list[int]] = {}
    log: list[str] = []
    done = first = 0
    for killed in [*sorted(chance.sample(range(1, 300), 4)), 300]:
        attempt = Attempt([AMPLE if step < done else fits[step] for step in range(300)], log)
        attempt.resume(checkpoints[first], first)
        for step in range(first, killed):
            attempt.step(step)
            assert sizes.setdefault(step, attempt.sizes[step]) == attempt.sizes[step], f"step {step}"
            assert attempt.state() == checkpoints.get(step + 1, attempt.state()), f"after step {step}"
        done, first = killed, chance.randrange(killed)
    assert sizes == whole.sizes


def test_a_log_that_asks_for_more_than_fits_now_is_left() -> None:
    """Resumed on a smaller device: one failure, not one at every step that the log knows."""
    before = Attempt([AMPLE if step < 5 or step > 30 else 33 for step in range(200)], [])
    checkpoint = before.state()
    for step in range(200):
        before.step(step)
    assert before.sizes[199] == [TOTAL]

    after = Attempt([20] * 200, before.log)
    after.resume(checkpoint, 0)
    for step in range(200):
        after.step(step)

    assert max(map(max, after.sizes.values())) <= 20
    assert after.failures < 8


def test_the_log_of_sizes_is_short() -> None:
    history, sizer = History(), Sizer()
    used = [[64], [64], [4, 4, 8, 16, 32], [22, 21, 21], [22, 21, 21], [5], [32, 32], [64]]
    for step, parts in enumerate(used):
        history.note(step, sum(parts), parts, sizer)

    assert len(history.entries) == 4
    again = History()
    again.replay(history.entries)
    for step, parts in enumerate(used[:-1]):
        assert again.parts(step, sum(parts)) == parts
        again.note(step, sum(parts), parts, sizer)
    assert again.parts(7, 64) == [64]
    again.note(7, 64, [64], sizer)
    assert again.parts(8, 64) is None
    assert again.entries == []


def test_what_a_later_attempt_did_counts() -> None:
    history, sizer = History(), Sizer()
    known = Sizer().state_dict()
    history.replay([{"step": step, "samples": n, "sizer": known} for step, n in ((3, 8), (9, 4), (5, 2))])

    sizes = []
    for step in range(3, 7):
        parts = history.parts(step, 8)
        sizes.append(parts)
        history.note(step, 8, parts or [8], sizer)
    assert sizes == [[8], [8], [2, 2, 2, 2], None]
