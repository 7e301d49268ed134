"""Which sizes a run has used, so that a resumed run can use the same ones and come out the same to the last bit."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from buoy.machine.files import open_new, write_all
from buoy.machine.records import read_lines
from buoy.microbatch.sizing import Sizer, is_state
from buoy.microbatch.split import even
from buoy.text import whole_number

_MOST_LOG = 32 << 20


def logged(path: str) -> list[dict[str, Any]]:
    """The entries of a run's log of sizes; what is torn or something else is none."""
    return [line for line in read_lines(path, _MOST_LOG) if isinstance(line, dict) and _is_entry(line)]


def _is_entry(line: dict[str, Any]) -> bool:
    sizes = line["parts"] if "parts" in line else [line.get("samples") or 1]
    counts = [line.get("step"), *(sizes if isinstance(sizes, list) else [None])]
    return all(type(count) is int and count >= 0 for count in counts) and is_state(line.get("sizer"))


class History:
    """A log of changes: {"step": 12, "samples": 8} from step 12 on, {"step": 3, "parts": [4, 8, 20]} only then.

    Beside the size stands what the step had taught the sizer (an OOM, a measured line): when the step is done again
    that may not happen a second time, and the sizes of all later steps depend on it.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._samples: int | None = None
        self._replay: list[dict[str, Any]] = []
        self._until = 0
        """Steps before this one were done by an earlier attempt: without an entry, as the step before them."""
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

    def replay(self, entries: list[dict[str, Any]], first: int = 0, until: int = 0) -> None:
        """Use the sizes of an earlier attempt again from step `first` on, as far as it came: `until`."""
        self._replay, self._until = [], until
        for entry in entries:  # a later attempt began again at an earlier step: what it did counts
            while self._replay and self._replay[-1]["step"] >= entry["step"]:
                self._replay.pop()
            self._replay.append(entry)
        self._replay = [entry for entry in self._replay if entry["step"] >= first]

    def leave(self) -> None:
        """What went through in that attempt does not now: from here on this one is on its own."""
        self._replay, self._until = [], 0

    def parts(self, step: int, total: int) -> list[int] | None:
        """What that attempt used at this step; None where it did not come to it."""
        if not self._replay:
            return even(total, self._samples or total) if step < self._until else None
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


class SizeLog:
    """The sizes of a run in a file of JSON lines: how many steps are done, and every change.

    The first line, {"done": "        12"}, is written over at each step: what a killed attempt had done after its
    checkpoint is done again as it was, also where nothing changed.
    """

    _HEAD, _WIDTH = b'{"done": "', 16

    def __init__(self, path: str | None) -> None:
        """None: nothing is kept."""
        self._path = path
        self._descriptor: int | None = None

    def clear(self) -> None:
        """The training starts over: what an attempt before it did is not to be repeated."""
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """The changes, and how many steps were done."""
        if self._path is None:
            return [], 0
        first = next(iter(read_lines(self._path, _MOST_LOG)), None)
        done = first.get("done") if isinstance(first, dict) else None
        return logged(self._path), (whole_number(done.strip()) or 0) if isinstance(done, str) else 0

    def step(self, done: int, changes: list[dict[str, Any]]) -> None:
        """So many steps are done, and this has changed. Called before anybody hears of it: it may be killed then."""
        if self._path is None:
            return
        with suppress(OSError):  # a full disk: the checkpoint knows the size at its own step
            if self._descriptor is None:
                self._descriptor = self._open(self._path)
            if changes:
                os.lseek(self._descriptor, 0, os.SEEK_END)
                write_all(self._descriptor, "".join(json.dumps(each) + "\n" for each in changes).encode())
            os.pwrite(self._descriptor, b"%*d" % (self._WIDTH, done), len(self._HEAD))

    def _open(self, path: str) -> int:
        changes, done = self.read()
        lines = [self._HEAD.decode() + str(done).rjust(self._WIDTH) + '"}', *map(json.dumps, changes)]
        descriptor = open_new(path, again=True)
        write_all(descriptor, ("\n".join(lines) + "\n").encode())
        return descriptor
