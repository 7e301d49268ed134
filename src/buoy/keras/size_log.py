"""The micro-batches of a run, step by step: written when they change, so that a resumed run splits as it had split."""

from __future__ import annotations

import json
import os
from typing import Any

from buoy.flight.log import read_lines

NAME = "micro-batches.jsonl"
"""The same file, in the same form, as that of `buoy.Run`."""


class SizeLog:
    """Follows a transaction's sizes."""

    def __init__(self, folder: str, transaction: Any) -> None:
        self._path = os.path.join(folder, NAME)
        self._transaction = transaction
        self._written = 0

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; the log knows of steps that were made after it and lost."""
        self._transaction.load_state_dict(saved)
        lines = read_lines(self._path) if os.path.exists(self._path) else []
        logged = {line["step"]: line["size"] for line in lines if isinstance(line, dict) and "step" in line}
        known = {int(step): int(size) for step, size in saved.get("sizes", [])}
        self._transaction.replay(sorted({**logged, **known}.items()))
        self._written = len(self._transaction.sizes)

    def follow(self) -> None:
        """Between two steps: write what is new, which is hardly ever anything."""
        sizes = self._transaction.sizes
        if len(sizes) == self._written:
            return
        new, self._written = sizes[self._written :], len(sizes)
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                for step, size in new:
                    file.write(json.dumps({"step": step, "size": size}) + "\n")
        except OSError:
            pass  # a full disk: the checkpoint has the sequence up to itself
