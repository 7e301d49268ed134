"""Other batch sizes: allocation by allocation along the line through two traces, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable

from buoy.estimate.trace import OPTIMIZER, Event, Trace

START = (2, 4)
"""The sizes through which the line goes, unless one was traced already."""


MOST = 1 << 16
_LARGE = 1 << 18
# How many hundredths above an answer that a trace has checked are looked at.
_LOOKS = 16


def starting_sizes(traced: int | None) -> tuple[int, int]:
    """Two sizes for the line, one of them traced already where it is known.

    >>> starting_sizes(64), starting_sizes(3), starting_sizes(1)
    ((16, 64), (2, 3), (2, 4))
    """
    return (max(START[0], traced // 4), traced) if traced is not None and traced > START[0] else START


def at_size(first: Trace, small: int, second: Trace, large: int, size: int) -> Trace:
    """The trace at another batch size: every allocation on the line through its two sizes.

    Where the two runs did different things, all of the larger one is scaled that comes from its samples.
    """
    if _shape(first) == _shape(second):
        before = {identity: size for kind, identity, size in first.events if kind == "a"}
        order = [identity for kind, identity, _ in first.events if kind == "a"]
        now = [identity for kind, identity, _ in second.events if kind == "a"]
        pairs = dict(zip(now, (before[identity] for identity in order), strict=True))

        def along(identity: int, bytes_: int) -> int:
            slope = (bytes_ - pairs[identity]) / (large - small)
            return max(0, round(bytes_ + slope * (size - large)))
    else:
        fixed = _of_no_sample(first, second)

        def along(identity: int, bytes_: int) -> int:
            return bytes_ if identity in fixed else round(bytes_ * size / large)

    events: list[Event] = [
        (kind, identity, along(identity, bytes_) if kind == "a" else bytes_)
        for kind, identity, bytes_ in second.events
    ]
    facts = dict(second.facts)
    if "convolution" in facts:
        facts["convolution"] = round(facts["convolution"] * size / large)
    return Trace(events, second.labels, second.owner, second.marks, list(second.notes), facts)


def largest_batch(
    trace_at: Callable[[int], Trace], fits: Callable[[Trace], bool], *, start: tuple[int, int] = START
) -> int:
    """The largest batch that fits: two traces, a search by replay between them, and a trace that checks the answer.

    Where the check disagrees, the size is brought down until a real trace fits; 0 when not even one sample does.
    """
    small, large = start
    first, second = trace_at(small), trace_at(large)
    known = {small: first, large: second}

    def guess(size: int) -> bool:
        return fits(at_size(first, small, second, large, size))

    low, high = 0, 1
    while high <= MOST and guess(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if guess(middle) else (low, middle)
    while low > 0:
        checked = known.get(low) or trace_at(low)
        if fits(checked):
            break
        low = low - max(1, low // 32)
    else:
        return 0
    # The line may have been drawn far from the answer: through the trace of the answer itself it is a better one.
    near = min((small, large), key=lambda size: abs(size - low))
    if near != low and low < MOST:
        higher, further = low, max(1, low // 100)
        for _ in range(_LOOKS):
            if not fits(at_size(known[near], near, checked, low, higher + further)):
                break
            higher += further
        if higher - low >= 2 * further and fits(trace_at(higher)):
            low = higher
    return low


def _of_no_sample(first: Trace, second: Trace) -> set[int]:
    """The allocations of the second trace that other samples do not change.

    Weights and what belongs to them, all that an optimizer's step takes, and what is in both as large as a weight of
    some size or as its copy in half precision: a small one may be as large as a sample by chance.
    """
    sizes = [size for kind, i, size in second.events if kind == "a" and second.label(i)[0] == "weights"]
    weights = {part for size in sizes if size >= _LARGE for part in (size, size // 2)}
    before = {(first.label(i)[2], size) for kind, i, size in first.events if kind == "a"}
    fixed, in_optimizer = set[int](), False
    for kind, identity, size in second.events:
        if kind == "m":
            in_optimizer = second.marks[identity] == OPTIMIZER
        elif kind == "a":
            label = second.label(identity)
            as_weights = size in weights and (label[2], size) in before
            if in_optimizer or as_weights or label[0] in ("weights", "gradients", "optimizer", "workspace"):
                fixed.add(identity)
    return fixed


def _shape(trace: Trace) -> list[str]:
    """The kinds of events in order: equal when both runs did the same things."""
    return [kind + (trace.label(identity)[2] if kind == "a" else "") for kind, identity, _ in trace.events]
