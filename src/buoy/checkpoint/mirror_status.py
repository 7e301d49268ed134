"""`mirror.json` in the run folder: what the mirror's own process says of itself, and how that reads to people."""

from __future__ import annotations

import os
import time
from typing import Any

from buoy.checkpoint.held import is_held
from buoy.machine.records import read_json, write_json
from buoy.units import format_duration, format_share

STATUS = "mirror.json"
STATUS_SCHEMA = "buoy.mirror/1"
LOCK = "mirror.lock"
"""Held by the one process that copies."""
_STATUS_SECONDS = 1.0


class Status:
    """`mirror.json` in the run folder: what is safe there, what is on its way, what is wrong."""

    def __init__(self, run: str, shown: str, uploads_later: bool) -> None:
        """`uploads_later`: a drive that takes a file and sends it off in its own time, which nobody can see."""
        self._path = os.path.join(run, STATUS)
        self._due = 0.0
        self.values: dict[str, Any] = {
            "schema": STATUS_SCHEMA, "home": shown, "pid": os.getpid(), "there": {}, "newest": None,
            "newest_made": None, "newest_safe": None, "copy_seconds": None, "copying": None, "trouble": None,
            "damaged_here": None, "uploads_later": uploads_later, "not_ours": False,
        }  # fmt: skip

    def set(self, **values: object) -> None:
        """Change and write at once."""
        self.values.update(values)
        self._due = 0.0
        self.beat()

    def beat(self) -> None:
        """Write now and then, so that a reader sees that it moves."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _STATUS_SECONDS
        try:
            write_json(self._path, {**self.values, "wall": time.time()})
        except OSError:
            pass  # the local disk is full: the copies matter more than the words


def read_status(run: str) -> dict[str, Any]:
    """What the process last said, and whether it is still there (`running`; None: cannot be told)."""
    status = read_json(os.path.join(run, STATUS)) or {}
    return {**status, "running": is_held(os.path.join(run, LOCK))} if status else {}


def lag_in_words(status: dict[str, Any], newest_here: int | None, now: float) -> str | None:
    """`step 1150 safe in s3://runs 41 s ago, 50 steps behind`; None when nothing is known of a mirror."""
    if not status:
        return None
    home = str(status.get("home"))
    newest, safe = status.get("newest"), status.get("newest_safe")
    newest = newest if isinstance(newest, int) else None
    if newest is None:
        words = f"nothing in the mirror {home} yet"
    else:
        if isinstance(safe, int | float):
            is_there, age = safety(status), f" {format_duration(max(0.0, now - safe))} ago"
        else:
            is_there, age = "in", " by its size, not compared yet"
        behind = (
            f", {newest_here - newest} steps behind"
            if newest_here is not None and newest_here > newest
            else ""
        )
        words = f"step {newest} {is_there} the mirror {home}{age}{behind}"
    copying = status.get("copying")
    is_behind = newest is None or (newest_here is not None and newest_here > newest)
    if status.get("running") is False and (copying or is_behind):
        words += (
            "; nobody copies any more: the process that did has ended, a new start of the training goes on"
        )
    elif isinstance(copying, dict):
        done, size = copying.get("done"), copying.get("bytes")
        if isinstance(done, int) and isinstance(size, int) and size:
            words += f"; copying step {copying.get('step')}: {format_share(done, size)}"
    if status.get("trouble"):
        words += f"; in trouble: {status['trouble']}"
    return words


def safety(status: dict[str, Any]) -> str:
    """What can be said of a copy: Google Drive's mount takes it at once and uploads it at a time of its own."""
    return "handed to Drive (which uploads it by itself) in" if status.get("uploads_later") else "safe in"
