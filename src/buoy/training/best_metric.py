"""Whether the metric by which the best checkpoint is kept comes at all; told once where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from buoy.checkpoint.retention import Keep


class BestMetric:
    """The name in `Keep(best=...)`, compared with the names that are reported.

    A training may report several, one after the other, so that one without that name means little. An epoch that
    ended without it, or another name that comes around again, does.
    """

    def __init__(self, keep: Keep | int | None, say: Callable[[str], None]) -> None:
        self._say = say
        self._awaited = keep.metric[0] if isinstance(keep, Keep) and keep.best else None
        self._others: set[str] = set()

    def came(self, names: Iterable[str], *, in_batch: bool = False) -> None:
        """These were reported; `in_batch`: with every batch perhaps, so that they come around before any epoch ends."""
        names = set(names)
        if self._awaited is None:
            return
        if self._awaited in names:
            self._awaited = None
        elif self._others & names and not in_batch:
            self._tell()
        elif not in_batch:
            self._others |= names

    def epoch_ends(self) -> None:
        """What an epoch reports has been reported."""
        if self._awaited is not None and self._others:
            self._tell()

    def _tell(self) -> None:
        self._say(
            f"no metric is called {self._awaited!r} (`Keep(best=...)`): reported so far are "
            f"{', '.join(sorted(self._others))}; until it comes no best checkpoint is kept"
        )
        self._awaited = None
