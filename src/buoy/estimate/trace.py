"""What a traced step did to memory, in a form no framework owns: allocations, frees and marks, in order.

`("a", id, bytes)` asks for memory, `("f", id, 0)` gives it back, `("m", index, 0)` marks a place (`Trace.marks`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Event = tuple[str, int, int]

LOSS = "the loss"
"""In place of a module's name: what the step computes outside of the model's modules."""

OPTIMIZER = "optimizer"
"""The mark at which an optimizer begins its step."""

PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries", "workspace", "batch")
"""What memory can be for, in the order users read it."""


@dataclass(slots=True)
class Trace:
    """The events of a few training steps, and what each allocation was for.

    >>> Trace([("a", 0, 512), ("f", 0, 0)], labels=[("weights", "layer", "empty")], owner={0: 0}).label(0)
    ('weights', 'layer', 'empty')
    """

    events: list[Event]
    labels: list[tuple[str, str, str]] = field(default_factory=list)
    """Each distinct (part, module, operation)."""
    owner: dict[int, int] = field(default_factory=dict)
    """Which label an allocation has."""
    marks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What users must know about this trace: fall-backs, assumptions."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers of the tracer besides the events: parameters, batch, convolution inputs."""

    def label(self, identity: int) -> tuple[str, str, str]:
        """What an allocation was for."""
        return self.labels[self.owner[identity]] if identity in self.owner else ("temporaries", "", "")

    def save(self, path: str) -> None:
        """Write it down; `load` reads it back."""
        # Level 1: a child process writes this while a user waits.
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
            json.dump(asdict(self), file)

    @classmethod
    def load(cls, path: str) -> Trace:
        """Read what `save` wrote."""
        with gzip.open(path, "rt", encoding="utf-8") as file:
            record = json.load(file)
        record["events"] = normal(record["events"])
        record["labels"] = [(part, module, operation) for part, module, operation in record["labels"]]
        record["owner"] = {int(identity): label for identity, label in record["owner"].items()}
        return cls(**record)


def normal(events: Iterable[Sequence[Any]]) -> list[Event]:
    """Events as JSON keeps them, in our own shape.

    >>> normal([["a", 1, 512], ["f", 1]])
    [('a', 1, 512), ('f', 1, 0)]
    """
    return [(event[0], event[1], event[2] if len(event) > 2 else 0) for event in events]


def most_live(events: Sequence[Event], size_of: Callable[[int], int]) -> int:
    """The most bytes live at once, each request counted as an allocator sizes it."""
    live: dict[int, int] = {}
    now = most = 0
    for kind, identity, size in events:
        if kind == "a" and size:
            live[identity] = size_of(size)
            now += live[identity]
            most = max(most, now)
        elif kind == "f":
            now -= live.pop(identity, 0)
    return most
