"""A whole PyTorch training, started anew in a process of its own after each SIGKILL at a random instant."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.kills.kind import Tally
from tests.processes import events

_ROOT = Path(__file__).parents[2]
_PATIENCE = 180.0


def killed_training(number: int, chance: random.Random, folder: Path) -> Tally:
    """One start of torch for each twenty of `number`; the rest of the campaign forks."""
    tally = Tally()
    whole = _Training(folder / "whole")
    whole.live(None, 0.0)
    expected = whole.steps()
    starts, trial = max(2, number // 20), 0
    while tally.tried < starts:
        training = _Training(folder / f"cut{trial}")
        trial += 1
        while tally.tried < starts and chance.random() < 0.8:  # then it may end
            tally.tried += 1
            training.live(chance.randrange(1, len(expected) - 1), chance.uniform(0.0, 0.03))
            training.judge(tally)
        training.live(None, 0.0)
        training.judge(tally)
        if training.steps() != expected:
            tally.fail("unequal", f"{training.folder}: not the steps of the uninterrupted training")
    return tally


class _Training:
    """`everything` of tests/training/trainings.py, in as many lives as it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = Path(f"{folder}.log")
        self._words = Path(f"{folder}.stderr")
        self._lives = 0
        self._promised = 0

    def live(self, after: int | None, wait: float) -> None:
        """One life; killed a moment after its log shows so many more steps (it may end before that)."""
        self._lives += 1
        already = self._lines()
        self._words.write_text("")
        with self._words.open("w") as words:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.training.life", "everything", str(self.folder)],
                cwd=_ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=words,
            )
            deadline = time.monotonic() + _PATIENCE
            while process.poll() is None:
                if time.monotonic() > deadline or (after is not None and self._lines() - already >= after):
                    time.sleep(wait)
                    process.kill()
                time.sleep(0.001)

    def judge(self, tally: Tally) -> None:
        """Did this life begin at what the ones before were promised, and did every step give the same again?"""
        found = re.search(r"(?:resumed from|is finished at) step (\d+)", self._words.read_text())
        came_from = int(found[1]) if found else 0
        if came_from < self._promised:
            tally.fail("lost", f"{self.folder}: went on from {came_from} instead of {self._promised}")
        if "Traceback" in self._words.read_text():
            tally.fail("stuck", f"{self.folder}: {self._words.read_text()[-300:]}")
        saved = [event["step"] for event in events(self.folder, self._lives) if event["kind"] == "save"]
        self._promised = max([self._promised, came_from, *saved])
        unlike = _unlike(self._log)
        if unlike:
            tally.fail("unequal", f"{self.folder}: steps {unlike} gave something else when done again")

    def steps(self) -> dict[str, str]:
        return dict(line.split(" ", 1) for line in self._text().splitlines())

    def _lines(self) -> int:
        return self._text().count("\n")

    def _text(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def _unlike(log: Path) -> list[str]:
    seen: dict[str, str] = {}
    unlike = []
    for line in log.read_text().splitlines() if log.exists() else []:
        step, _, words = line.partition(" ")
        if seen.setdefault(step, words) != words:
            unlike.append(step)
    return unlike
