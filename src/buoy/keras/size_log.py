"""The micro-batches of a run, step by step: written when they change, so that a resumed run splits as it had split."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from buoy.flight.log import read_lines

NAME = "micro-batches.jsonl"
"""The same file, in the same form, as that of `buoy.Run`."""


class SizeLog:
    """Follows a transaction's sizes."""

    def __init__(self, folder: str, transaction: Any, name: str = NAME) -> None:
        self._path = os.path.join(folder, name)
        self._transaction = transaction
        transaction.on_change(self._write)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; the log knows of steps that were made after it and lost."""
        self._transaction.load_state_dict(saved)
        lines = read_lines(self._path) if os.path.exists(self._path) else []
        self._transaction.replay([line for line in lines if isinstance(line, dict) and "sizer" in line])

    def begin(self) -> None:
        """A run without a checkpoint begins anew: what an attempt before it did is not to be repeated."""
        with suppress(OSError):
            os.unlink(self._path)

    def _write(self, entry: dict[str, Any]) -> None:
        """At the end of the step, before anybody hears of it: whoever kills the training then finds it logged."""
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError:
            pass  # a full disk: the checkpoint knows the size at its own step
