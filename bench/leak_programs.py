"""Real processes that leak or warm up, and their RSS as the sidecar reads it: from /proc, five times a second.

The programs know nothing of the forecast. They do steps, hold memory and publish the step number in a mapped word, as
the beacon does. A leak lives until its RSS has reached the limit; a healthy one lives for about fifteen seconds.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

LIMIT = 400.0 * 2**20
RATE = 5.0
LEAKS = ("bytearrays", "small objects", "uneven", "after warm-up", "per epoch", "with garbage")
HEALTHY = ("random cache", "data first", "growing buffers", "first times", "garbage", "saturating")
_HEALTHY_SECONDS = 15.0
_LONGEST = 60.0
_MIB = 2**20

Sample = tuple[float, int | None, float]


def record_all(family: str, count: int, seed: int) -> list[list[Sample]]:
    """Run so many programs of the family, two at a time, and return what was seen of each."""
    kinds = LEAKS if family == "leak" else HEALTHY
    jobs = [(family, kinds[i % len(kinds)], seed + i) for i in range(count)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: record(*job), jobs))


def record(family: str, kind: str, seed: int) -> list[Sample]:
    """Start one program and sample it until it is done."""
    with tempfile.NamedTemporaryFile() as word:
        word.write(bytes(8))
        word.flush()
        child = subprocess.Popen([sys.executable, __file__, family, kind, str(seed), word.name])
        samples: list[Sample] = []
        begun = time.monotonic()
        page = os.sysconf("SC_PAGE_SIZE")
        try:
            with (
                mmap.mmap(word.fileno(), 8, access=mmap.ACCESS_READ) as shared,
                open(f"/proc/{child.pid}/statm", "rb") as statm,
            ):
                while child.poll() is None and time.monotonic() - begun < _LONGEST:
                    statm.seek(0)
                    fields = statm.read().split()
                    used = float(int(fields[1]) * page) if len(fields) > 1 else 0.0
                    if used:
                        (step,) = struct.unpack("<Q", shared[:8])
                        samples.append((time.monotonic() - begun, step, min(used, LIMIT)))
                    if family == "leak" and used >= LIMIT:
                        break
                    time.sleep(1 / RATE)
        finally:
            child.kill()
            child.wait()
    return samples


class _Steps:
    """Publishes steps of about this length, some of them spent computing."""

    def __init__(self, path: str, seconds: float, rng: random.Random, jitter: float = 0.2) -> None:
        with open(path, "r+b") as word:
            self._word = mmap.mmap(word.fileno(), 8)
        self._seconds, self._rng, self._jitter = seconds, rng, jitter
        self.done = 0

    def one(self) -> None:
        time.sleep(max(0.0, self._seconds * (1 + self._rng.uniform(-self._jitter, self._jitter))))
        self.done += 1
        self._word[:8] = struct.pack("<Q", self.done)


def _block(size: float) -> bytearray:
    """Memory that is really there: every page is written."""
    block = bytearray(int(size))
    block[::4096] = b"\1" * len(range(0, len(block), 4096))
    return block


def _leak(kind: str, rng: random.Random, word: str) -> None:
    seconds = rng.uniform(10, 18)  # from the first step to the limit
    step_seconds = rng.uniform(0.01, 0.08)
    base = _block(rng.uniform(40, 110) * _MIB)
    per_step = (LIMIT - len(base)) / (seconds / step_seconds)
    steps = _Steps(word, step_seconds, rng, jitter=0.9 if kind == "uneven" else 0.2)
    held: list[object] = [base]
    while True:
        steps.one()
        if kind == "small objects":
            held.append([float(i) for i in range(int(per_step / 32))])
        elif kind == "uneven":
            held.append(_block(per_step * rng.expovariate(1.0)))
        elif kind == "per epoch":
            if steps.done % max(2, int(seconds / step_seconds / 20)) == 0:
                held.append(_block(per_step * int(seconds / step_seconds / 20)))
        else:
            held.append(_block(per_step))
        if kind == "after warm-up" and steps.done < 1.5 / step_seconds:
            held.append(_block(40 * _MIB * step_seconds / 1.5))
        if kind == "with garbage" and steps.done % 20 < 10:
            held[0] = [base, _block(20 * _MIB)]
        elif kind == "with garbage":
            held[0] = base


def _healthy(kind: str, rng: random.Random, word: str) -> None:
    begun = time.monotonic()
    step_seconds = rng.uniform(0.01, 0.05)
    top = rng.uniform(0.55, 0.9) * LIMIT
    total = 10.0 / step_seconds
    base = _block(50 * _MIB)
    steps = _Steps(word, step_seconds, rng)
    held: list[object] = [base]
    if kind == "data first":
        for _ in range(40):
            time.sleep(0.1)
            held.append(_block((min(top, 0.8 * LIMIT) - len(base)) / 40))
    items = 400
    size = (top - len(base)) / items
    cache: dict[int, bytearray] = {}
    buffer = bytearray()
    while time.monotonic() - begun < _HEALTHY_SECONDS:
        steps.one()
        if kind == "random cache":
            # Every sample is kept once it was drawn: new ones get rare as the cache fills.
            for _ in range(max(1, int(items * 3 / total))):
                item = rng.randrange(items)
                if item not in cache:
                    cache[item] = _block(size)
        elif kind == "growing buffers":
            need = int((top - len(base)) * min(1.0, rng.betavariate(2, 6) * 1.3))
            if need > len(buffer):
                buffer = bytearray()
                buffer = _block(need)
        elif kind == "first times":
            if steps.done in (1, int(0.2 * total), int(0.55 * total)):
                held.append(_block((top - len(base)) / 3))
        elif kind == "garbage":
            held[1:] = [_block((top - len(base)) * (0.7 if steps.done % 30 < 15 else 1.0))]
        elif kind == "saturating":
            held.append(_block((top - len(base)) * 0.008 * 0.992**steps.done))


if __name__ == "__main__":
    family, kind, seed, word = sys.argv[1:5]
    {"leak": _leak, "healthy": _healthy}[family](kind, random.Random(int(seed)), word)
