"""A bar on stderr for work that takes a while; silent where nobody watches a terminal."""

from __future__ import annotations

import os
import sys
import time

from buoy.units import format_share

_WIDTH = 28
_PERIOD = 0.1
_PATIENCE = 0.3
"""What is done sooner needs no bar."""


class Progress:
    """`advance` it by bytes; `close` takes the bar away again."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._due = time.monotonic() + _PATIENCE
        self._drawn = False
        self._shown = sys.stderr.isatty() and not os.environ.get("BUOY_NO_PROGRESS")

    def advance(self, count: int) -> None:
        """So many bytes more."""
        self.show(self._done + count, self._total)

    def show(self, done: int, total: int) -> None:
        """So many bytes of so many."""
        self._done, self._total = done, total
        if not self._shown or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _PERIOD
        self._drawn = True
        filled = _WIDTH * min(done, total) // max(1, total)
        bar = "#" * filled + "." * (_WIDTH - filled)
        sys.stderr.write(f"\r{self._label} [{bar}] {format_share(done, total)}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
