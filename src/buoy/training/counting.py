"""Which optimizers' steps are the steps of the run."""

from __future__ import annotations

from collections.abc import Iterable


class Counting:
    """The first optimizer that is named counts; so does one that trains where that one does not.

    One that is named after the training has begun is a stage of its own (a head first, then all layers), and so is one
    that went through a whole loop alone. Within a batch only one of them counts: the first that steps.
    """

    def __init__(self, saved: Iterable[str]) -> None:
        self._counts = set(saved)
        self._named = False
        self._in_loop: set[str] = set()
        self._of_batch: str | None = None
        self._in_batch = False

    def name(self, optimizer: str, *, late: bool) -> None:
        """An optimizer is tracked; `late`: loops were begun before."""
        if late or not self._named:
            self._counts.add(optimizer)
        self._named = True

    def stepped(self, optimizer: str) -> bool:
        """It has stepped: whether that is a step of the run."""
        self._in_loop.add(optimizer)
        if optimizer not in self._counts:
            return False
        if self._in_batch and self._of_batch is None:
            self._of_batch = optimizer
        return not self._in_batch or self._of_batch == optimizer

    def batch_begins(self) -> None:
        """A batch is handed out for training or evaluation, outside of any other's body."""
        self._of_batch, self._in_batch = None, True

    def loop_ends(self) -> None:
        """Such a loop is over."""
        if not self._in_loop & self._counts:
            self._counts |= self._in_loop
        self._in_loop.clear()
        self._in_batch = False

    def state(self) -> list[str]:
        """For the checkpoint."""
        return sorted(self._counts)
