"""What is asked of a tracing child process, and how it answers: plain JSON both ways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from buoy.errors import BuoyError

LIVE = "buoy_planned"
"""The module under whose name a forked child finds the objects that a running process gave."""


class EstimateError(BuoyError):
    """A training step could not be traced; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One trace: where the model comes from, and what to change about the step."""

    framework: str
    """`torch` or `keras`."""
    source: dict[str, Any]
    """`{"build": "train.py:build"}`, `{"hf_config": "config.json", "seq": 512}` or `{"keras": "model.keras"}`."""
    device: str = "t4"
    batch: int | None = None
    """Samples per step; None keeps the sample batch as it is."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    autocast: str | None = None
    """`fp16` or `bf16` around the loss, beside whatever the code does itself."""
    optimizer: str | None = None
    """Another optimizer than the code's own: AdamW, Adam, SGD (with momentum), Adafactor, ..."""
    checkpointing: bool = False
    """Recompute activations in backward."""
    changes: tuple[str, ...] = ()
    """Remedies applied to the step, by their names in `trace_remedies`."""

    @property
    def is_of_live_objects(self) -> bool:
        """Whether there is no `build` of the person's: the objects are those of a notebook or a running script."""
        return str(self.source.get("build", "")).partition(":")[0] == LIVE

    def to_json(self) -> str:
        """As the child reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """As the child got it."""
        fields = json.loads(text)
        return cls(**{**fields, "changes": tuple(fields["changes"])})


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the child could not trace, in the words the person will read."""

    message: str
    received: str | None = None
    expected: str | None = None
    hint: str | None = None
    details: str = field(default="")
    """The traceback, for `-v`."""

    def error(self) -> EstimateError:
        """The same, to raise."""
        error = EstimateError(self.message, received=self.received, expected=self.expected, hint=self.hint)
        if self.details:
            error.add_note(self.details)
        return error
