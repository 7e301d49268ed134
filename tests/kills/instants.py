"""SIGKILL at random instants of a training that saves: of the trainer alone, and of the trainer with its writer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import time
from pathlib import Path

from tests.checkpoint.ground import about, as_tensor, open_saver, state, writers
from tests.kills.kind import Tally, go_on, judge

SIZE = 400_000
_STEPS = 6


def killed_trainer(number: int, chance: random.Random, folder: Path) -> Tally:
    """Once `save` has returned, the trainer's death loses nothing: the writer finishes."""
    return _campaign(number, chance, folder, with_writer=False)


def killed_all(number: int, chance: random.Random, folder: Path) -> Tally:
    """The writer dies in the same moment: what was committed stays, whole."""
    return _campaign(number, chance, folder, with_writer=True)


def killed_at_once(number: int, chance: random.Random, folder: Path) -> Tally:
    """The trainer kills itself as the first thing after `save` returned."""
    tally = Tally()
    for trial in range(number):
        run = folder / f"once-{trial}"
        pid = os.fork()
        if pid == 0:
            saver = open_saver(run)
            saver.save(state(1, SIZE), about(1), as_tensor)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        _wait_for_writer(run)
        judge(tally, run, 1, SIZE, f"trial {trial}")
        shutil.rmtree(run)
    return tally


def _campaign(number: int, chance: random.Random, folder: Path, *, with_writer: bool) -> Tally:
    tally = Tally()
    usual = _time_one(folder / "usual")
    for trial in range(number):
        run = folder / f"run-{trial}"
        delay = chance.uniform(0, usual)
        returned, committed = _train_and_kill(run, delay, with_writer)
        if not (run / "checkpoints").exists():
            tally.tried += 1  # it died before it began
            continue
        if not with_writer:
            _wait_for_writer(run)
        words = f"trial {trial}, killed after {delay:.4f} s, {returned} returned, {committed} committed"
        judge(tally, run, committed if with_writer else returned, SIZE, words)
        if trial % 4 == 0:
            go_on(tally, run, 99, SIZE, words)
        shutil.rmtree(run)
    return tally


def _train_and_kill(run: Path, delay: float, with_writer: bool) -> tuple[int, int]:
    """The last step whose save had returned, and the last one that the writer had told as committed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _train(run, writing)
    os.close(writing)
    time.sleep(delay)
    hit = [*(writers(run) if with_writer else []), pid]
    for victim in hit:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os.waitpid(pid, 0)
    if with_writer:
        for late in writers(run):  # started in between
            os.kill(late, signal.SIGKILL)
        while writers(run):
            time.sleep(0.001)
    with os.fdopen(reading, "rb") as told:
        numbers = list(struct.iter_unpack("<ii", told.read()))
    return max((a for a, _ in numbers), default=0), max((b for _, b in numbers), default=0)


def _train(run: Path, told: int) -> None:
    """In the fork: save step after step, saying what is promised only after it is."""
    try:
        saver = open_saver(run)
        for step in range(1, _STEPS + 1):
            saver.save(state(step, SIZE), about(step), as_tensor)
            last = saver.last()
            os.write(told, struct.pack("<ii", step, last.step if last and last.committed else 0))
        saver.close()
        os.write(told, struct.pack("<ii", _STEPS, _STEPS))
        time.sleep(60)
    finally:
        os._exit(0)


def _time_one(run: Path) -> float:
    started = time.monotonic()
    saver = open_saver(run)
    for step in range(1, _STEPS + 1):
        saver.save(state(step, SIZE), about(step), as_tensor)
    saver.close()
    return time.monotonic() - started


def _wait_for_writer(run: Path) -> None:
    """The lock is held until the writer has finished."""
    open_saver(run).close()
