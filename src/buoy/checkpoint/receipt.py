"""What a save answers with: the trainer goes on long before it is known how the write went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one save."""

    step: int
    folder: str
    """Where it is, or will be once it is committed."""
    bytes: int
    """What it takes on disk, or would; 0 when nothing was tried."""
    stall_seconds: float
    """How long the training waited."""
    write_seconds: float | None
    """None while it is being written."""
    error: str | None = None
    """Why there is no checkpoint; the training goes on."""
    errno: int | None = None

    @property
    def committed(self) -> bool:
        """Whether it is on disk, whole."""
        return self.error is None and self.write_seconds is not None
