"""What makes it fit: each remedy tried on this very step, and the cheapest of them or of their combinations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from buoy.estimate.child import EstimateError, Request
from buoy.estimate.devices import Device
from buoy.estimate.result import Estimate, estimate
from buoy.planner.advice import Change, changes_for, popular
from buoy.planner.result import FITS, UNKNOWN, Answer, Need, Remedy, within, worst
from buoy.planner.session import Session, host_ram, with_moved
from buoy.planner.traces import Workshop
from buoy.units import format_bytes

_MOST_COMBINED = 4
_CALLS_LOSS = ("chunked-loss", "mixed-precision", "offload", "micro-batch")
# Less than this share of the peak is no remedy for it.
_NOTHING = 0.01
# How the tracer refuses a remedy that has nothing to change in this model.
NOT_APPLICABLE = {
    "nothing to checkpoint",
    "no linear layers to adapt",
    "no output layer over a vocabulary",
    "the inputs have no side or length",
    "the model cannot be built for smaller inputs",
    "no smaller sibling is known",
    "no layers to prune",
}
# The step itself ran before: what fails now fails by what the remedy did to it.
_OF_OUR_CHANGE = {"the code to be traced failed", "the step to be traced failed"}
_LATE = "left out, as trying took long: `--remedies` tries all"
# These make it another training altogether: the last resort.
_ANOTHER = {"smaller-model", "smaller-input"}


def find_remedies(
    workshop: Workshop,
    request: Request,
    answer: Answer,
    capacity: int | None,
    say: Callable[[str], None],
    counted: dict[str, float] | None = None,
    seconds: float | None = None,
    session: Session | None = None,
) -> tuple[tuple[Remedy, ...], Remedy | None]:
    """Every remedy's effect on this place, largest saving first, and the cheapest way to fit.

    `counted` are the bytes of the linear layers, where they were counted. After `seconds` no further one is begun and
    those left out are named; another training is then not tried where one fits that stays the same.
    """
    bench = _Bench(workshop, request, answer, capacity, session or Session())
    changes = changes_for(request, answer)
    tried: list[tuple[Change, Remedy]] = []
    end = time.monotonic() + seconds if seconds is not None else math.inf
    same = [change for change in changes if change.id not in _ANOTHER]
    others = [change for change in changes if change.id in _ANOTHER]
    for pair in [*_pairs(same), *_pairs(others)]:
        kept = any(remedy.exact and remedy.verdict == FITS for _, remedy in tried)
        if kept and seconds is not None and pair[0].id in _ANOTHER:
            break
        late = time.monotonic() > end
        if not late:
            say(f"trying {' and '.join(change.title for change in pair)}")
            bench.prepare(pair)
        for change in pair:
            remedy = _untried((change,), _LATE) if late else bench.tried((change,))
            if remedy is not None:
                tried.append((change, remedy))
    now = answer.peak
    helping = [
        (change, remedy)
        for change, remedy in tried
        if remedy.advisable and (remedy.saving(now) or 0) > _NOTHING
    ]
    cheapest = None
    if answer.memory_verdict != FITS:
        say("seeking the cheapest combination")
        cheapest = bench.cheapest(helping)
    found = [remedy for _, remedy in tried] + popular(answer, request, counted or {})
    found.sort(key=lambda remedy: -(remedy.saving(now) or 0))
    return tuple(found), cheapest


def allocator_of(request: Request, device: Device) -> str | None:
    """TensorFlow has its own allocator on a GPU; None is the framework's usual one."""
    return "bfc" if request.framework == "keras" and device.capability else None


class _Bench:
    """Tries changes on one step and one place."""

    def __init__(
        self, workshop: Workshop, request: Request, answer: Answer, capacity: int | None, session: Session
    ) -> None:
        self._workshop = workshop
        self._request = request
        self._answer = answer
        self._capacity = capacity
        self._session = session

    def prepare(self, changes: list[Change]) -> None:
        """Have the traces of these changes made together, each alone on the step."""
        self._workshop.prepare([self._changed((change,))[0] for change in changes])

    def tried(self, changes: tuple[Change, ...]) -> Remedy | None:
        """The changes together; None where they cannot be applied to this model."""
        try:
            figure = self._figure(changes)
        except EstimateError as error:
            if error.message in NOT_APPLICABLE:
                return None
            if error.message in _OF_OUR_CHANGE:
                return _untried(changes, "cannot be tried on this model")
            return _untried(changes, f"could not be tried: {error.received or error.message}")
        alone = figure.verdict(self._capacity)
        host = self._host(figure)
        verdict = alone if host is None else UNKNOWN if host.limit is None else worst([alone, host.verdict])
        # What was found out while applying it, such as the smaller sibling's name.
        learned = [note for note in figure.notes if note not in self._answer.estimate.notes]
        traced = any(change.request or change.inside for change in changes)
        return Remedy(
            id="+".join(change.id for change in changes),
            title=", ".join(change.title for change in changes),
            exact=all(change.exact for change in changes),
            basis="traced" if traced else "replayed",
            peak=within(figure.total, alone, self._answer.target.memory),
            verdict=verdict,
            time=_product([change.time for change in changes]),
            time_basis="; ".join(dict.fromkeys(change.time_basis for change in changes)),
            code=_written(changes, figure.trace.facts.get("code", {})),
            note="; ".join([*learned, *(change.note for change in changes if change.note), *_moves(host)]),
            needed=self._needed(figure),
            host=host,
            advisable=(host is None or host.verdict == FITS) and figure.trace.facts.get("pretrained", True),
        )

    def _needed(self, figure: Estimate) -> int | None:
        """The bytes that decided, of the whole device: on a CPU with what the process itself takes."""
        memory = self._answer.target.memory
        if self._capacity is None or memory is None:
            return None
        found = figure.needed(self._capacity)
        return None if found is None else found + memory - self._capacity

    def _host(self, figure: Estimate) -> Need | None:
        """The host's RAM, where these changes move bytes there."""
        moved = figure.trace.facts.get("moved_to_host")
        if moved is None:
            return None
        around = host_ram(self._session, self._answer.target, figure.trace, figure.reserved)
        return with_moved(around, *moved)

    def cheapest(self, helping: list[tuple[Change, Remedy]]) -> Remedy | None:
        """The one that fits at the least cost; else the best of each kind together until they do."""
        alone = [remedy for _, remedy in helping if remedy.verdict == FITS]
        if alone:
            return min(alone, key=_cost)
        now = self._answer.peak
        for least in range(3):
            usable = [pair for pair in helping if _kind(pair[1]) <= least]
            usable.sort(key=lambda pair: -(pair[1].saving(now) or 0))
            chosen: tuple[Change, ...] = ()
            for change, _ in usable:
                if any(_exclude(change, other) for other in chosen):
                    continue
                chosen = (*chosen, change)
                if len(chosen) > _MOST_COMBINED:
                    break
                together = self.tried(chosen) if len(chosen) > 1 else None
                if together is not None and together.verdict == FITS:
                    return together
        return None

    def _figure(self, changes: tuple[Change, ...]) -> Estimate:
        request, allocator = self._changed(changes)
        return estimate(self._workshop.trace(request), self._answer.target.device, allocator=allocator)

    def _changed(self, changes: tuple[Change, ...]) -> tuple[Request, str | None]:
        """The request and the allocator with these changes."""
        request = self._request
        allocator = allocator_of(request, self._answer.target.device)
        for change in changes:
            request = replace(request, **(change.request or {}))  # type: ignore[arg-type]
            if change.inside:
                request = replace(request, changes=(*request.changes, change.inside))
            allocator = change.allocator or allocator
        return request, allocator


def _moves(host: Need | None) -> list[str]:
    """What the host must hold, against what it has."""
    if host is None:
        return []
    need = f"{format_bytes(host.low)} to {format_bytes(host.high)}"
    if host.limit is None:
        return [f"host RAM then takes {need}: how much this place has is not known"]
    return [f"host RAM then takes {need} of {format_bytes(host.limit)}: {host.verdict}"]


def _pairs(changes: list[Change]) -> list[list[Change]]:
    """Two at a time, as they are traced."""
    return [changes[start : start + 2] for start in range(0, len(changes), 2)]


def _untried(changes: tuple[Change, ...], why: str) -> Remedy:
    """What could not be tried is named, with the reason; nothing is claimed about it."""
    return Remedy(
        id="+".join(change.id for change in changes),
        title=", ".join(change.title for change in changes),
        exact=all(change.exact for change in changes),
        basis="not tried",
        peak=None,
        verdict=UNKNOWN,
        time=None,
        time_basis="",
        code=_written(changes, {}),
        note=why,
    )


def _exclude(one: Change, other: Change) -> bool:
    """Whether two changes cannot be had together.

    Two optimizers; or with a step inside backward: accumulation, gradients that a scaler has yet to divide, and the
    8-bit optimizer, whose step is compiled for all of them.
    """
    ids = {one.id, other.id}
    if all(name.startswith("optimizer-") for name in ids) or ids == {"checkpointing", "offload"}:
        return True
    scaled = any((change.request or {}).get("autocast") == "fp16" for change in (one, other))
    return "in-backward" in ids and (bool(ids & {"micro-batch", "optimizer-8bit"}) or scaled)


def _written(changes: tuple[Change, ...], codes: dict[str, str]) -> str:
    """The code of all of them; where it depends on the model, that of what was really done to it.

    What calls the loss comes after what defines or prepares it.
    """
    ordered = sorted(
        changes, key=lambda change: _CALLS_LOSS.index(change.id) if change.id in _CALLS_LOSS else -1
    )
    return "\n".join(filter(None, (codes.get(change.id, change.code) for change in ordered)))


def _product(times: list[tuple[float, float] | None]) -> tuple[float, float] | None:
    low = high = 1.0
    for factor in times:
        if factor is None:
            return None
        low, high = low * factor[0], high * factor[1]
    return low, high


def _cost(remedy: Remedy) -> tuple[int, float]:
    """Exact ones first, then the less time the better."""
    return (_kind(remedy), sum(remedy.time) if remedy.time else 2.5)


def _kind(remedy: Remedy) -> int:
    """0 leaves the training the same, 1 changes its arithmetic, 2 makes it another one."""
    return 0 if remedy.exact else 2 if _ANOTHER & set(remedy.id.split("+")) else 1
