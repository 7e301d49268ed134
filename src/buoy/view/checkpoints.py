"""Checkpoints as text and as JSON: the list, and what is in one; a bar while their bytes are read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from buoy.checkpoint.manifest import saved_at
from buoy.checkpoint.mirror.mirror import lag_in_words
from buoy.checkpoint.reader import Checkpoint
from buoy.checkpoint.retention import last_finite
from buoy.checkpoint.store import Entry
from buoy.fields import mapping
from buoy.text import joined
from buoy.units import format_bytes, format_duration, format_share

SCHEMA = "buoy.checkpoints/1"
_METRICS_SHOWN = 3


def listed(run: str, entries: Sequence[Entry], mirror: dict[str, Any], now: float | None = None) -> str:
    """The list for users, the newest first."""
    now = time.time() if now is None else now
    rows = [("step", "age", "size", "saved because", "metrics", "state", "mirror")]
    finite = last_finite(entries)
    for entry in entries:
        age = format_duration(max(0.0, now - entry.time)) if entry.time is not None else "n/a"
        state = "complete" if entry.complete else "damaged"
        copied = {True: "yes", False: "no", None: "n/a" if mirror else "-"}[_mirrored(entry, mirror)]
        size = format_bytes(entry.bytes or None)
        reason = _reason(entry.about) + (", last finite" if entry is finite else "")
        rows.append((str(entry.step), age, size, reason, _metrics(entry.about), state, copied))
    good = [entry for entry in entries if entry.complete]
    lines = [f"{run}: {_summary(good, len(entries) - len(good))}", *_table(rows)]
    lag = lag_in_words(mirror, good[0].step if good else None, now)
    if lag is not None:
        lines.append(lag)
    return joined(lines)


def listed_json(run: str, entries: Sequence[Entry], mirror: dict[str, Any]) -> dict[str, object]:
    """The list for programs."""
    return {
        "schema": SCHEMA,
        "run": run,
        "checkpoints": [
            {
                "step": entry.step,
                "folder": entry.folder,
                "time": entry.time,
                "bytes": entry.bytes if entry.complete else None,
                "complete": entry.complete,
                "about": entry.about,
                "mirrored": _mirrored(entry, mirror),
            }
            for entry in entries
        ],
        "mirror": mirror or None,
    }


def shown(checkpoint: Checkpoint) -> str:
    """What is in one checkpoint, for users."""
    about = checkpoint.about
    lines = [f"step {checkpoint.step} in {checkpoint.folder}", f"  saved because  {_reason(about)}"]
    saved = saved_at(about)
    if saved is not None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved))
        lines.append(f"  saved          {stamp}, {format_duration(max(0.0, time.time() - saved))} ago")
    epoch = about.get("epoch")
    if isinstance(epoch, int):
        lines.append(f"  epoch          {epoch + 1}")
    if metrics := _metrics(about, None):
        lines.append(f"  metrics        {metrics}")
    lines.append(
        f"  made with      {', '.join(f'{name} {word}' for name, word in checkpoint.versions.items())}"
    )
    rows = [(name, str(count), format_bytes(size)) for name, (count, size) in _groups(checkpoint).items()]
    rows.insert(0, ("name", "tensors", "size"))
    lines += ["", *_table(rows), ""]
    described = [("tensor", "type", "shape", "size")]
    for name, stored in checkpoint.tensors.items():
        shape = " x ".join(map(str, stored.shape)) or "scalar"
        described.append((name, stored.dtype, shape, format_bytes(stored.nbytes)))
    return joined([*lines, *_table(described)])


def shown_json(checkpoint: Checkpoint) -> dict[str, object]:
    """What is in one checkpoint, for programs."""
    return {
        "schema": SCHEMA,
        "step": checkpoint.step,
        "folder": checkpoint.folder,
        "about": checkpoint.about,
        "versions": checkpoint.versions,
        "names": checkpoint.names,
        "tensors": [
            {"name": name, "dtype": stored.dtype, "shape": list(stored.shape), "bytes": stored.nbytes}
            for name, stored in checkpoint.tensors.items()
        ],
    }


def _mirrored(entry: Entry, mirror: dict[str, Any]) -> bool | None:
    """Whether this very one is in the mirror; None where that is not known, as where an older buoy kept the list."""
    there = mirror.get("there")
    return there.get(entry.name) == entry.digest if isinstance(there, dict) else None


def _groups(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    groups = dict.fromkeys(checkpoint.names, (0, 0))
    for name, stored in checkpoint.tensors.items():
        group = name.partition("/")[0]
        tensors, size = groups.get(group, (0, 0))
        groups[group] = (tensors + 1, size + stored.nbytes)
    return groups


def _summary(complete: Sequence[Entry], damaged: int) -> str:
    """Complete is not yet good, since no byte is verified here; but what is not complete is certainly not good."""
    if not complete:
        return f"0 good, {damaged} damaged" if damaged else "no checkpoint yet"
    size = format_bytes(sum(entry.bytes for entry in complete))
    if damaged:
        return f"{len(complete)} complete, {size}; {damaged} damaged"
    return f"{len(complete)} checkpoint{'' if len(complete) == 1 else 's'}, {size}"


def _reason(about: dict[str, Any]) -> str:
    words = str(about.get("reason") or "n/a")
    if about.get("finished"):
        words = "finished"
    if about.get("finite") is False:
        words += ", loss not finite"
    return f"{words}, pinned: {about['pin']}" if about.get("pin") else words


def _metrics(about: dict[str, Any], most: int | None = _METRICS_SHOWN) -> str:
    words = [
        f"{name}={value:.4g}" if isinstance(value, int | float) else f"{name}=n/a"
        for name, value in mapping(about.get("metrics")).items()
    ]
    return " ".join(words[:most]) + (" …" if most is not None and len(words) > most else "")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side; those without a word below their head are left out."""
    columns = [
        column for column in zip(*rows, strict=True) if any(cell not in ("", "-") for cell in column[1:])
    ]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return ["  " + "  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


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
