"""Whether a recording still grows: by the process it is about, not by the age of its files, which a copy makes new."""

from __future__ import annotations

from typing import Any

from buoy.verdict.now import observe


def is_alive(about: dict[str, Any]) -> bool:
    """Whether the process that attempt.json tells of lives here."""
    return observe(about).alive


def may_live(about: dict[str, Any]) -> bool:
    """Whether it lives here, or was recorded elsewhere, where it cannot be seen."""
    now = observe(about)
    return now.alive or (bool(about) and now.same_machine is False)


def recorder_lives(about: dict[str, Any], events: list[dict[str, Any]]) -> bool | None:
    """Whether the sidecar that began last is still there; None where its process cannot be seen from here."""
    from buoy.machine import procfs

    pid = next((event.get("sidecar") for event in reversed(events) if event.get("kind") == "start"), None)
    now = observe(about)
    if not isinstance(pid, int) or now.sees_inside or now.same_machine is not True:
        return None
    stat = procfs.parse_stat(procfs.read_bytes(f"/proc/{pid}/stat"))
    is_there = stat is not None and stat.state not in ("Z", "X")
    return is_there and b"sidecar.py" in procfs.read_bytes(f"/proc/{pid}/cmdline")
