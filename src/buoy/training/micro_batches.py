"""The micro-batches of a run: `run.backward`, and the log by which a resumed run splits as it had split before."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from buoy.microbatch.sizing import SizeLog

LOG = "micro-batches.jsonl"


class MicroBatches:
    """Holds the transaction around each training step, from the first `backward` on."""

    def __init__(
        self, folder: str | None, saved: dict[str, Any] | None, settings: dict[str, Any], rank: int = 0
    ) -> None:
        name = LOG if not rank else f"micro-batches.{rank}.jsonl"
        self._log = SizeLog(os.path.join(folder, name)) if folder is not None else None
        self._saved = saved
        # A notebook's kernel trains several runs under one recorder.
        self._settings = {**settings, "event": partial(settings["event"], path=folder), "log": self._log}
        self._transaction: Any = None
        self._is_checked = False
        self._new: list[object] = []

    def begin_early(self) -> None:
        """What is switched on for the whole run is switched on now, and not with the first `backward`."""
        if self._settings.get("remedies") or self._settings.get("memory_cap") is not None:
            self._begin()

    def track(self, *objects: object) -> None:
        """These are trained; the optimizers' steps become atomic once `backward` is used."""
        self._new += objects
        if self._transaction is not None:
            self._hand_over()
        elif any(map(_calls_backward_itself, objects)):
            self._begin()  # the first `backward` will come from inside its first step

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Forward and backward as a transaction; from the first one on this name is the transaction's own."""
        __tracebackhide__ = True
        if self._transaction is None:
            self._begin()
        self.backward = self._transaction.backward  # type: ignore[method-assign]
        return self.backward(*arguments, **options)

    def is_finite(self) -> bool | None:
        """Whether the last loss is a finite number; None where `backward` was never used."""
        from buoy.torch.memory.holders import is_finite

        return is_finite(self._transaction.last_loss if self._transaction is not None else None)

    def stepped(self) -> None:
        """An optimizer has stepped: say so once if what was asked for could not act on that step."""
        if self._is_checked:
            return
        self._is_checked = True
        if "amp" in self._remedies() and not self._transaction.steps:
            self._settings["say"](
                'remedies="amp" acts inside `run.backward(batch, loss_fn)`; this loop calls `.backward()` itself, so '
                "nothing is in mixed precision"
            )

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint; None where `backward` was never used."""
        if self._transaction is None:
            return self._saved
        return {**self._transaction.state_dict(), "remedies": self._remedies()}

    def _remedies(self) -> list[str]:
        given = self._settings.get("remedies") or ()
        return [given] if isinstance(given, str) else list(given)

    def _begin(self) -> None:
        from buoy.torch.step.transaction import Transaction

        self._resume(Transaction(**self._settings))

    def _resume(self, transaction: Any) -> None:
        self._transaction = transaction
        self._hand_over()
        if self._saved is not None:
            then, now = self._saved.get("remedies", []), self._remedies()
            if then != now:
                self._settings["say"](
                    f"remedies are {', '.join(now) or 'none'}; until here they were {', '.join(then) or 'none'}, "
                    "so the numbers differ from those of an uninterrupted run"
                )
            transaction.load_state_dict(self._saved)
            if self._log is not None:
                transaction.replay(*self._log.read())
        elif self._log is not None:
            self._log.clear()

    def _hand_over(self) -> None:
        from buoy.torch.state.state_dict import parts

        new, self._new = self._new, []
        self._transaction.track(*parts(new))


def _calls_backward_itself(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.LBFGS)
