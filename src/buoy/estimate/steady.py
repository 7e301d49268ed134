"""A further training step without running it: once the optimizer has its state, each does what the last one did."""

from __future__ import annotations

from buoy.estimate.events import Event, Trace


def another_step(trace: Trace) -> Trace | None:
    """The trace with its last step once more; None where that step did not leave behind what it had found.

    What the last step freed of the one before (old gradients, the old batch) the further one frees of the last.
    """
    starts = [
        index
        for index, (kind, mark, _) in enumerate(trace.events)
        if kind == "m" and trace.marks[mark].startswith("step ")
    ]
    if len(starts) < 2:
        return None
    before, last = trace.events[: starts[-1]], trace.events[starts[-1] :]
    sizes = {identity: size for kind, identity, size in trace.events if kind == "a"}
    made = [identity for kind, identity, _ in last if kind == "a"]
    freed = {identity for kind, identity, _ in last if kind == "f"}
    left = [identity for identity in made if identity not in freed]
    fresh = set(made)
    found = [identity for kind, identity, _ in before if kind == "a" and identity in freed - fresh]
    alike = [(sizes[identity], trace.owner.get(identity)) for identity in found]
    if alike != [(sizes[identity], trace.owner.get(identity)) for identity in left]:
        return None
    beyond = max(sizes) + 1
    now = dict(zip(found, left, strict=True))
    now |= {identity: beyond + number for number, identity in enumerate(made)}
    events: list[Event] = [(kind, now[one] if kind != "m" else one, size) for kind, one, size in last]
    events[0] = ("m", len(trace.marks), 0)
    owner = {now[identity]: trace.owner[identity] for identity in made if identity in trace.owner}
    return Trace(
        trace.events + events, trace.labels, trace.owner | owner, [*trace.marks, f"step {len(starts) + 1}"],
        trace.notes, trace.facts,
    )  # fmt: skip
