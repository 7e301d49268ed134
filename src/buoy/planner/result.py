"""What a plan says: per place an answer, the session around it, and the remedies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from buoy.estimate.result import Estimate, Interval
from buoy.planner.targets import Target

FITS, TIGHT, NOT, UNKNOWN = "fits", "tight", "does not fit", "unknown"
_ORDER = (FITS, UNKNOWN, TIGHT, NOT)


def worst(verdicts: list[str]) -> str:
    """The verdict of several needs at once: what is unknown spoils nothing that fits for certain.

    >>> worst(["fits", "tight", "unknown"])
    'tight'
    """
    known = [verdict for verdict in verdicts if verdict != UNKNOWN]
    return max(known, key=_ORDER.index) if known else UNKNOWN


def within(peak: Interval, verdict: str, memory: int | None) -> Interval:
    """The peak where it fits: an allocator that runs short gives its cache back, and so takes no more than there is.

    >>> within(Interval(1, 5, 9), "fits", 6)
    Interval(low=1, likely=5, high=6)
    """
    if memory is None or verdict not in (FITS, TIGHT):
        return peak
    return Interval(min(peak.low, memory), min(peak.likely, memory), min(peak.high, memory))


@dataclass(frozen=True, slots=True)
class Need:
    """Something else of the session that a training uses up: host RAM, disk, /dev/shm, time."""

    name: str
    low: float
    high: float
    limit: float | None
    unit: str
    """`bytes` or `seconds`."""
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""
    why: dict[str, str] = field(default_factory=dict)
    """For each part where its number comes from."""

    @property
    def verdict(self) -> str:
        """As for device memory: tight when only the lower figure fits."""
        if self.limit is None:
            return UNKNOWN
        return FITS if self.high <= self.limit else TIGHT if self.low <= self.limit else NOT


@dataclass(frozen=True, slots=True)
class Answer:
    """One place's answer."""

    target: Target
    estimate: Estimate
    memory_verdict: str
    """Of the device's memory alone."""
    largest: int | None
    """The largest batch that surely fits in one piece; None when it was not sought or cannot vary."""
    micro_batch: int | None
    """Samples at once with which the batch as given surely fits; 0 when not even one does."""
    needs: tuple[Need, ...]
    step_seconds: tuple[float, float] | None
    step_basis: str
    batch_basis: str = ""
    """Why no largest batch is known, where it was sought in vain."""
    needed: int | None = None
    """Bytes by which the verdict was decided, where the memory lies inside of the peak's interval."""

    @property
    def peak(self) -> Interval:
        """Bytes of the device at the peak, what CUDA keeps for itself included; on a CPU what the process grows by.

        The upper end may be beyond the card where it fits: an allocator that runs short gives its cache back.
        """
        return self.estimate.total

    @property
    def verdict(self) -> str:
        """The worst of device memory and the session's other needs."""
        return worst([self.memory_verdict, *(need.verdict for need in self.needs)])


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that lowers the peak (or is said to), with its effect on this very step."""

    id: str
    title: str
    exact: bool | None
    """Whether the training stays the same; None when it is no matter (nothing changes)."""
    basis: str
    """`traced`, `replayed`, `known` or `not tried`."""
    peak: Interval | None
    """Bytes of the device with it; None where it could not be found."""
    verdict: str
    time: tuple[float, float] | None
    """The step's time against now, from and to; None when unknown."""
    time_basis: str
    code: str
    note: str = ""
    needed: int | None = None
    """As of an answer."""
    host: Need | None = None
    """The host's RAM with it, where it moves bytes there; `verdict` is then of both."""
    advisable: bool = True
    """Whether it may be called the cheapest: not where it need not fit the host, nor LoRA on a model from scratch."""

    def saving(self, now: Interval) -> float | None:
        """The share of the peak it takes away; negative when it adds."""
        return None if self.peak is None else 1 - self.peak.likely / now.likely


@dataclass(frozen=True, slots=True)
class Plan:
    """What `buoy.plan` answers; prints itself, as text or in a notebook."""

    source: str
    batch: int | None
    answers: tuple[Answer, ...]
    remedies: tuple[Remedy, ...] = ()
    cheapest: Remedy | None = None
    """The cheapest remedy, or combination of them, with which the first place that needs one fits."""
    remedies_for: str | None = None
    """The place the remedies were tried for."""
    next_tier: Answer | None = None
    """What the next dearer machine of the same platform would give, where the price is known."""
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether it fits every place asked for; a tight one does not count."""
        return all(answer.verdict == FITS for answer in self.answers)

    @property
    def micro_batch(self) -> int | None:
        """What to give `buoy.Run(micro_batch=...)`: the least over the places; None when the whole batch fits."""
        sizes = [answer.micro_batch for answer in self.answers if answer.micro_batch is not None]
        return min(sizes) if sizes and (self.batch is None or min(sizes) < self.batch) else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, with a schema."""
        from buoy.view.plan import as_values

        return as_values(self)

    def __str__(self) -> str:
        from buoy.view.plan import full

        return full(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from buoy.view.plan import html

        return html(self)
