"""Allocator models: the recorded traces of the real allocator bit for bit, and the rules the others follow."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from buoy.estimate.allocators import BY_NAME, Allocator, Fits, Replay, bfc, expandable, host, native
from buoy.estimate.trace import Event, normal

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json.gz"))
MIB = 1 << 20


def recorded(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def random_events(seed: int, count: int = 600) -> list[Event]:
    """Allocations of every size class, freed in no order."""
    random_ = random.Random(seed)
    live: list[int] = []
    events: list[Event] = []
    for identity in range(count):
        size = int(2 ** random_.uniform(3, 26))
        events.append(("a", identity, size))
        live.append(identity)
        while live and random_.random() < 0.45:
            events.append(("f", live.pop(random_.randrange(len(live))), 0))
    return events


def test_all_recorded_traces_are_here() -> None:
    assert len(GOLDEN) == 24


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_peaks_equal_the_real_allocators_bit_for_bit(path: Path) -> None:
    trace = recorded(path)

    replay = native.replay(normal(trace["events"]))

    assert replay.peak_allocated == trace["peak_allocated"]
    assert replay.peak_reserved == trace["peak_reserved"]
    assert replay.end_allocated == trace["end_allocated"]


def test_fits_equals_brute_force_at_two_hundred_capacities() -> None:
    """The bounds that spare a replay never change the answer."""
    events = normal(recorded(next(path for path in GOLDEN if path.name.startswith("gpt2_ckpt.Ad")))["events"])
    fits = Fits(events, native)
    low, high = int(fits.floor * 0.97), int(fits.unlimited.peak_reserved * 1.03)
    capacities = [low + (high - low) * step // 199 for step in range(200)]

    answers = [fits.within(capacity) for capacity in capacities]

    assert answers == [native.replay(events, capacity).fits for capacity in capacities]
    assert True in answers
    assert False in answers


def test_a_full_device_takes_cached_blocks_back_before_it_refuses() -> None:
    events: list[Event] = [("a", 1, 30 * MIB), ("f", 1, 0), ("a", 2, 40 * MIB)]

    replay = native.replay(events, capacity=50 * MIB)

    assert replay.fits
    assert replay.retries == 1
    assert replay.peak_reserved == 40 * MIB


@pytest.mark.parametrize("model", BY_NAME.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("seed", range(4))
def test_every_model_keeps_its_accounts(model: Allocator, seed: int) -> None:
    """Nothing is lost or counted twice: what is freed is gone, reserved covers allocated, a tight limit refuses."""
    events = random_events(seed)
    live = dict.fromkeys(identity for kind, identity, _ in events if kind == "a")
    for kind, identity, _ in events:
        if kind == "f":
            del live[identity]

    replay = model.replay(events + [("f", identity, 0) for identity in live])

    assert replay.end_allocated == 0
    assert model.floor(events) <= replay.peak_allocated <= replay.peak_reserved
    assert model.replay(events, replay.peak_reserved).fits
    assert not model.replay(events, model.floor(events) - 1).fits


@pytest.mark.parametrize("seed", range(4))
def test_expandable_segments_never_reserve_less_than_they_hand_out(seed: int) -> None:
    events = random_events(seed, 1500)
    peak = expandable.replay(events).peak_reserved

    for share in (0.99, 0.9, 0.8, 0.7):
        capacity = int(peak * share)
        replay = expandable.replay(events, capacity)
        assert replay.peak_reserved <= capacity
        assert replay.peak_allocated <= capacity


def test_expandable_segments_need_less_where_the_native_allocator_fragments() -> None:
    """Growing blocks leave holes in native segments; the expandable range is mapped only where it is used."""
    events: list[Event] = []
    for step in range(20):
        events.append(("a", step, (20 + 3 * step) * MIB))
        if step:
            events.append(("f", step - 1, 0))

    def waste(replay: Replay) -> int:
        return replay.peak_reserved - replay.peak_allocated

    assert waste(expandable.replay(events)) < waste(native.replay(events))


def test_bfc_keeps_a_chunk_whole_rather_than_leave_a_small_rest() -> None:
    """A request gets the whole chunk when less than half of it, and less than 128 MiB, would be left."""
    events: list[Event] = [("a", 1, 64 * MIB), ("a", 2, 64 * MIB), ("f", 1, 0), ("a", 3, 40 * MIB)]

    assert bfc.replay(events, capacity=512 * MIB).end_allocated == 128 * MIB


def test_bfc_refuses_when_its_one_region_is_fragmented() -> None:
    """Enough bytes are free, but not in one piece."""
    events: list[Event] = [("a", index, 10 * MIB) for index in range(8)]
    events += [("f", index, 0) for index in range(0, 8, 2)]
    events.append(("a", 9, 20 * MIB))

    replay = bfc.replay(events, capacity=80 * MIB)

    assert not replay.fits
    assert replay.end_allocated == 40 * MIB


def test_the_host_keeps_the_heap_below_a_live_block() -> None:
    """Freed heap memory under a live block stays with the process; a mapped block goes back at once."""
    small: list[Event] = [("a", index, 100_000) for index in range(100)]
    freed = [("f", index, 0) for index in range(99)]
    again: list[Event] = [("a", 200, 64 * MIB)]

    kept = host.replay([*small, *freed, *again])

    assert kept.peak_allocated == 64 * MIB + 100_000
    assert kept.peak_reserved > 64 * MIB + 99 * 100_000
