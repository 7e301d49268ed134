"""What a kind of death tells about a run: how often it was tried, and what went wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from buoy.checkpoint.saver import Saver
from buoy.checkpoint.store import Checkpoint, Store
from tests.checkpoint.ground import about, as_tensor, contents, open_saver, state


@dataclass
class Tally:
    """The outcomes of one kind."""

    tried: int = 0
    unreadable: int = 0
    """Runs without a checkpoint that can be read, though one was committed."""
    lost: int = 0
    """Runs whose newest checkpoint is older than the last one that was promised."""
    unequal: int = 0
    """Checkpoints that were read, and were not what was saved; damage that was not noticed."""
    stuck: int = 0
    """Runs that could not go on saving."""
    skipped: str | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.unreadable or self.lost or self.unequal or self.stuck)

    def fail(self, what: str, words: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.failures.append(f"{what}: {words}")


def must_bite(found: Tally, what: str) -> Tally:
    """A replay of what lacks its fsyncs has to be caught: where it is not, the replay proves nothing."""
    tally = Tally(tried=found.tried)
    if found.good:
        tally.fail("unequal", f"{what} passed: the replay proves nothing")
    return tally


@dataclass(frozen=True)
class Kind:
    """A way to die. `run` gets a number (how thorough), chance, and a folder of its own."""

    name: str
    about: str
    run: Callable[[int, random.Random, Path], Tally]


def judge(tally: Tally, folder: Path, at_least: int, size: int, words: str) -> None:
    """Is the run readable, nothing promised lost, all equal, and can it go on?"""
    tally.tried += 1
    heard: list[str] = []
    found = Store(folder).newest(heard.append)
    if found is None:
        if at_least:
            tally.fail("unreadable", f"{words}: {heard}")
        return
    if found.step < at_least:
        tally.fail("lost", f"{words}: step {found.step} instead of {at_least}")
    if not equal(found, size):
        tally.fail("unequal", f"{words}: step {found.step} is not what was saved")
    if heard:
        tally.fail("unequal", f"{words}: a committed checkpoint is damaged: {heard}")


def go_on(tally: Tally, folder: Path, step: int, size: int, words: str) -> None:
    """The next attempt opens the run, saves, and leaves nothing half-way behind."""
    saver: Saver | None = None
    try:
        saver = open_saver(folder)
        receipt = saver.save(state(step, size), about(step), as_tensor, wait=True)
        left = [entry.name for entry in (folder / "checkpoints").iterdir() if entry.name.startswith(".")]
        if not receipt.committed or left:
            tally.fail("stuck", f"{words}: {receipt}, left {left}")
    except Exception as error:
        tally.fail("stuck", f"{words}: {error!r}")
    finally:
        if saver is not None:
            saver.close()


def equal(found: Checkpoint, size: int) -> bool:
    return contents(found) == state(found.step, size)
