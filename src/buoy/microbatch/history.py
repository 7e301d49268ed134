"""Which sizes a run has used, so that a resumed run can use the same ones and come out the same to the last bit."""

from __future__ import annotations

from typing import Any

from buoy.microbatch.split import even


class History:
    """A log of changes: {"step": 12, "samples": 8} from step 12 on, {"step": 3, "parts": [4, 8, 20]} only then."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._samples: int | None = None
        self._replay: list[dict[str, Any]] = []

    def note(self, step: int, total: int, parts: list[int]) -> None:
        """These parts were used."""
        if parts == ([total] if self._samples is None else even(total, self._samples)):
            return
        if parts == even(total, parts[0]):
            self._samples = parts[0] if len(parts) > 1 else None
            self.entries.append({"step": step, "samples": self._samples})
        else:
            self.entries.append({"step": step, "parts": parts})

    def replay(self, entries: list[dict[str, Any]]) -> None:
        """Use the sizes of an earlier attempt again, as far as it came."""
        self._replay = []
        for entry in entries:  # a later attempt began again at an earlier step: what it did counts
            while self._replay and self._replay[-1]["step"] >= entry["step"]:
                self._replay.pop()
            self._replay.append(entry)

    def parts(self, step: int, total: int) -> list[int] | None:
        """What that attempt used at this step; None beyond its last entry, and where the batch is another."""
        if not self._replay or step > self._replay[-1]["step"]:
            return None
        samples = self._samples
        for entry in self._replay:
            if entry["step"] > step:
                break
            if "parts" not in entry:
                samples = entry["samples"]
            elif entry["step"] == step and sum(entry["parts"]) == total:
                return list(entry["parts"])
        return even(total, samples or total)

    def state_dict(self) -> dict[str, Any]:
        """What holds at a checkpoint."""
        return {"samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._samples = state["samples"]
