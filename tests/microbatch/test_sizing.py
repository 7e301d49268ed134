"""Sizes: what is tried after a failure, when it grows back, what a measured line allows."""

from __future__ import annotations

import math

import pytest

from buoy.microbatch.sizing import Fit, Ramp, Sizer


def train(sizer: Sizer, fits: int, steps: int, total: int = 64, each: float = 1.0) -> tuple[list[int], int]:
    """Steps on a device that `fits` so many samples; the size of each step, and how often it failed."""
    sizes, failures = [], 0
    for _ in range(steps):
        size, _ = sizer.samples(total, each, None)
        while size * each > fits:
            failures += 1
            size = sizer.oom(size, each)
        sizer.done(size, each, held_back=size < total)
        sizes.append(size)
    return sizes, failures


def test_nothing_is_cut_before_something_failed() -> None:
    assert train(Sizer(), fits=64, steps=50) == ([64] * 50, 0)


def test_a_failure_halves_and_growth_comes_near_to_what_fits() -> None:
    sizes, failures = train(Sizer(), fits=50, steps=400)

    assert sizes[0] == 32
    assert max(sizes) in range(46, 51)
    assert failures <= 12


def test_failed_growth_is_tried_ever_more_seldom() -> None:
    sizer = Sizer()
    _, early = train(sizer, fits=33, steps=400)
    _, late = train(sizer, fits=33, steps=400)

    assert late < early
    assert late <= 2


def test_more_room_is_found_when_something_else_let_it_go() -> None:
    sizer = Sizer()
    train(sizer, fits=20, steps=100)
    sizes, _ = train(sizer, fits=64, steps=4000)

    assert sizes[-1] == 64


def test_a_rare_long_batch_does_not_make_the_short_ones_small() -> None:
    sizer = Sizer()
    train(sizer, fits=64, steps=10, each=1.0)
    long, failures = train(sizer, fits=64, steps=1, each=4.0)
    short, _ = train(sizer, fits=64, steps=1, each=1.0)

    assert long == [16]
    assert failures == 1
    assert short == [64]


def test_the_size_ends_at_one() -> None:
    sizer = Sizer()
    size = 100
    for _ in range(20):
        size = sizer.oom(size, 1.0)

    assert size == 1


def test_a_persons_own_bound_is_kept() -> None:
    assert train(Sizer(most=10), fits=1000, steps=100)[0] == [10] * 100


def test_a_batch_that_is_known_to_be_too_large_is_cut_before_it_fails() -> None:
    sizer = Sizer(fit=Fit(slope=100.0, intercept=500.0, each=1.0))

    assert sizer.samples(64, 1.0, free=100_000.0) == (64, False)
    assert sizer.samples(64, 1.0, free=3700.0) == (31, False)
    assert sizer.samples(64, 1.0, free=10.0) == (1, False)


def test_a_rough_bound_only_says_that_something_surely_fits() -> None:
    sizer = Sizer(fit=Fit(slope=100.0, intercept=0.0, each=1.0, rough=True))

    assert sizer.samples(64, 1.0, free=6400.0) == (64, False)
    assert sizer.samples(64, 1.0, free=6300.0) == (64, True)


def test_much_longer_samples_are_measured_anew() -> None:
    sizer = Sizer(fit=Fit(slope=100.0, intercept=0.0, each=1.0))

    assert sizer.samples(64, 2.0, free=12_800.0) == (64, True)


def test_other_ranks_follow_the_one_that_failed() -> None:
    sizer = Sizer()
    sizer.follow(8, 64, 1.0)

    assert sizer.samples(64, 1.0, None) == (8, False)


def test_state_survives_a_checkpoint() -> None:
    sizer = Sizer()
    train(sizer, fits=40, steps=30)
    sizer.fit = Fit(1.5, 2.0, 3.0)
    other = Sizer()
    other.load_state_dict(sizer.state_dict())

    assert other == sizer
    fresh = Sizer()
    fresh.load_state_dict(Sizer().state_dict())
    assert fresh == Sizer()
    assert math.inf not in sizer.state_dict().values()


def device(sample: float, gradients: float) -> tuple[Ramp, float]:
    """A ramp on a device of 1000 bytes; activations and gradients peak at different times, as they do."""
    ramp, left, largest = Ramp(4), 4096, 0
    first = True
    while left:
        size = ramp.next(left)
        left -= size
        need = max(sample * size, 0.4 * sample * size + gradients)
        assert need <= 1000, "the ramp itself must never fail"
        if first:
            ramp.free, first = 1000.0, False
        else:
            ramp.measured(size, need)
        largest = size
    ramp.finish()
    return ramp, largest


@pytest.mark.parametrize("gradients", [0.0, 5.0, 50.0, 150.0])
def test_a_ramp_finds_what_fits_without_failing(gradients: float) -> None:
    """Small parts lie on the line of the gradients: the slope must be steady before it is believed."""
    ramp, _ = device(2.0, gradients)
    true = 500

    assert ramp.samples is not None
    assert 0.95 * true <= ramp.samples <= true
