"""How many steps a training will have, as its epochs tell: nobody has to say it, however steps are counted."""

from __future__ import annotations

_WORTH_TELLING = 0.02


class Length:
    """Learns from each epoch that passed whole.

    >>> length = Length()
    >>> [length.epoch_begins(epoch, of=10, step=50 * epoch) for epoch in range(3)]
    [None, 500, None]
    """

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._told: int | None = None

    def epoch_begins(self, epoch: int, *, of: int | None, step: int, is_whole: bool = True) -> int | None:
        """The step that the training will end at, where that is news; `is_whole`: not gone on with in its middle."""
        before, self._before = self._before, (epoch, step) if is_whole else None
        if before is None or epoch != before[0] + 1 or of is None or of <= epoch or step <= before[1]:
            return None
        end = step + (of - epoch) * (step - before[1])
        if self._told is not None and abs(end - self._told) <= _WORTH_TELLING * end:
            return None
        self._told = end
        return end
