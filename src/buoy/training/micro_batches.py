"""The micro-batches of a run: `run.backward`, and the log by which a resumed run splits as it had split before."""

from __future__ import annotations

import json
import os
from typing import Any

from buoy.flight.log import read_lines

LOG = "micro-batches.jsonl"


class MicroBatches:
    """Holds the transaction around each training step, from the first `backward` on."""

    def __init__(
        self,
        folder: str | None,
        saved: dict[str, Any] | None,
        settings: dict[str, Any],
    ) -> None:
        self._log = os.path.join(folder, LOG) if folder is not None else None
        self._saved = saved
        self._settings = settings
        self._transaction: Any = None
        self._logged = 0
        self._objects: dict[str, object] = {}

    def track(self, objects: dict[str, object]) -> None:
        """These are trained; the optimizers' steps become atomic once `backward` is used."""
        self._objects = objects
        if self._transaction is not None:
            self._hand_over()

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Forward and backward as a transaction."""
        if self._transaction is None:
            self._begin()
        loss = self._transaction.backward(*arguments, **options)
        if len(self._transaction.sizes) != self._logged:
            self._write_log()
        return loss

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint; None where `backward` was never used."""
        if self._transaction is None:
            return self._saved
        return {"state": self._transaction.state_dict(), "sizes": [list(s) for s in self._transaction.sizes]}

    def _begin(self) -> None:
        from buoy.torch.transaction import Transaction

        self._transaction = Transaction(**self._settings)
        self._hand_over()
        if self._saved is not None:
            self._transaction.load_state_dict(self._saved["state"])
            self._transaction.replay(self._known_sizes())
        self._logged = len(self._transaction.sizes)

    def _hand_over(self) -> None:
        from buoy.torch.state import parts

        modules, optimizers, scalers = parts(self._objects.values())
        self._transaction.track(modules, optimizers, scalers)

    def _known_sizes(self) -> list[tuple[int, int]]:
        """The sequence as it was: the log knows of steps that were made after the checkpoint and lost."""
        lines = read_lines(self._log) if self._log is not None and os.path.exists(self._log) else []
        logged = {
            line["step"]: line["size"] for line in lines if isinstance(line, dict) and "step" in line
        }
        saved = {int(step): int(size) for step, size in (self._saved or {}).get("sizes", [])}
        return sorted({**logged, **saved}.items())

    def _write_log(self) -> None:
        new, self._logged = self._transaction.sizes[self._logged :], len(self._transaction.sizes)
        if self._log is None:
            return
        try:
            with open(self._log, "a", encoding="utf-8") as file:
                for step, size in new:
                    file.write(json.dumps({"step": step, "size": size}) + "\n")
        except OSError:
            pass  # a full disk: the checkpoint has the sequence up to itself
