"""Which sizes a run has used, so that a resumed run can use the same ones and come out the same to the last bit."""

from __future__ import annotations

from typing import Any

from buoy.microbatch.sizing import Sizer
from buoy.microbatch.split import even


class History:
    """A log of changes: {"step": 12, "samples": 8} from step 12 on, {"step": 3, "parts": [4, 8, 20]} only then.

    Beside the size stands what the step had taught the sizer (an OOM, a measured line): when the step is done again
    that may not happen a second time, and the sizes of all later steps depend on it.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._samples: int | None = None
        self._replay: list[dict[str, Any]] = []
        self._taught = 0

    def note(self, step: int, total: int, parts: list[int], sizer: Sizer) -> None:
        """These parts were used, and this is what the sizer makes of it."""
        if self._replay:
            self._follow(step, sizer)
            return  # it is in the log already, and what follows it there still counts
        changed = parts != ([total] if self._samples is None else even(total, self._samples))
        if not changed and sizer.lessons == self._taught:
            return
        self._taught = sizer.lessons
        entry: dict[str, Any] = {"step": step, "samples": self._samples}
        if changed and parts == even(total, parts[0]):
            self._samples = entry["samples"] = parts[0] if len(parts) > 1 else None
        elif changed:
            entry = {"step": step, "parts": parts}
        self.entries.append({**entry, "sizer": sizer.state_dict()})

    def replay(self, entries: list[dict[str, Any]], first: int = 0) -> None:
        """Use the sizes of an earlier attempt again from step `first` on, as far as it came."""
        self._replay = []
        for entry in entries:  # a later attempt began again at an earlier step: what it did counts
            while self._replay and self._replay[-1]["step"] >= entry["step"]:
                self._replay.pop()
            self._replay.append(entry)
        self._replay = [entry for entry in self._replay if entry["step"] >= first]

    def leave(self) -> None:
        """What went through in that attempt does not now: from here on this one is on its own."""
        self._replay = []

    def parts(self, step: int, total: int) -> list[int] | None:
        """What that attempt used at this step; None beyond its last entry."""
        if not self._replay:
            return None
        entry, samples = self._replay[0], self._samples
        if entry["step"] == step:
            if sum(entry.get("parts", ())) == total:
                return list(entry["parts"])
            samples = entry.get("samples", samples)
        return even(total, samples or total)

    def _follow(self, step: int, sizer: Sizer) -> None:
        entry = self._replay[0]
        if entry["step"] == step:
            del self._replay[0]
            self._samples = entry.get("samples", self._samples)
            sizer.load_state_dict(entry["sizer"])
            self._taught = sizer.lessons

    def state_dict(self) -> dict[str, Any]:
        """What holds at a checkpoint."""
        return {"samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._samples = state["samples"]
