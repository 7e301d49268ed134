"""When whole and parts are compared again: counted for each kind of step, not over all of them."""

from __future__ import annotations

from collections.abc import Hashable

KINDS = 64
"""More kinds than this are counted together."""


class Asked:
    """Cut steps by what they compute; each kind is compared at its 1st, 2nd, 4th, 8th... step.

    A later step may show what the first did not: another loss, a layer that was thawed, a batch that is padded.

    >>> asked = Asked()
    >>> [asked.is_due("plain", done=True) for _ in range(4)], asked.is_due("padded")
    ([True, True, False, True], True)
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, int] = {}

    def is_due(self, kind: Hashable, *, done: bool = False) -> bool:
        """Whether the next cut step of this kind is to be compared; `done` counts it."""
        kind = self.known_as(kind)
        number = self._steps.get(kind, 0) + 1
        if done:
            self._steps[kind] = number
        return number & (number - 1) == 0

    def was_cut(self, kind: Hashable) -> bool:
        """Whether a step of this kind was."""
        return self.known_as(kind) in self._steps

    def doubt(self, kind: Hashable) -> str:
        """To be added to a refusal: steps that compute the same were cut, and what shows now was there perhaps unseen.

        A kind is a pair of what is computed and what the batch is like.

        >>> asked = Asked()
        >>> asked.count(("mean", "plain"))
        >>> asked.doubt(("mean", "padded")) != "", asked.doubt(("sum", "padded"))
        (True, '')
        """
        alike = [other for other in self._steps if other == kind or _computes(other) == _computes(kind)]
        steps = sum(self._steps[other] for other in alike)
        if not steps:
            return ""
        return (
            f"; steps like this one that were cut before it ({steps}) had perhaps another gradient: begin anew, or "
            "from the last checkpoint before them"
        )

    def count(self, kind: Hashable) -> None:
        """A step of this kind is cut."""
        self.is_due(kind, done=True)

    def known_as(self, kind: Hashable) -> Hashable:
        """The kind itself; None, which stands for all others, when there are too many of them."""
        if kind in self._steps or len(self._steps) < KINDS:
            return kind
        # What is computed stays apart even then: another loss was never compared with this one.
        rest = (_computes(kind), None) if isinstance(kind, tuple) else None
        return rest if rest in self._steps or len(self._steps) < 2 * KINDS else None


def _computes(kind: Hashable) -> Hashable:
    return kind[0] if isinstance(kind, tuple) else kind


def traits(least: float, largest: float, has_zero: bool) -> tuple[bool, ...]:
    """What of an array of integers, flags or a mask tells kinds of batches apart: padding, ignored labels, one class.

    >>> traits(-100, 9, True) == traits(-1, 7, True), traits(0, 9, True) == traits(1, 9, False)
    (True, False)
    """
    return least < 0, has_zero, least == largest, largest == 255  # 255: what segmentation ignores
