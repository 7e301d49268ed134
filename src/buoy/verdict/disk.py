"""Which disk of a training was full when it ended, by what was read before its end and not after.

What fills a disk is often gone with the process, and the recorder's own reserve is given back at the death: free space
that is found afterwards proves nothing.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from buoy.fields import count, mapping, number, text
from buoy.units import format_bytes
from buoy.verdict.evidence import Evidence
from buoy.verdict.model import Reading

NO_PAGE = 1 << 20
"""A file system with less than this free takes no further page of a mapped file."""
NO_FILE = 16 << 20
"""Less than this is no room for a file whose write has just failed."""
_LATELY = 10.0
"""Seconds before the end in which a reading is about the end."""


class FullDisk(NamedTuple):
    """A folder on the disk that is full, and what shows that."""

    path: str
    reading: Reading


def full_disk(evidence: Evidence, below: int = NO_PAGE) -> FullDisk | None:
    """A disk of this attempt that had less than this many bytes free at the end, if any; never /dev/shm."""
    return (
        _by_its_last_words(evidence, below)
        or _by_samples(evidence, below)
        or _by_warning(evidence)
        or _by_death_record(evidence, below)
    )


def _by_its_last_words(evidence: Evidence, below: int) -> FullDisk | None:
    speaker = evidence.speaker
    free = count((speaker.exception or {}).get("run_disk_free")) if speaker else None
    if speaker is None or free is None or free >= below:
        return None
    folder = _recording(evidence)
    return FullDisk(folder, Reading(f"{format_bytes(free)} free where {folder} lies", speaker.source))


def _by_samples(evidence: Evidence, below: int) -> FullDisk | None:
    end = evidence.last_t
    for row in reversed(evidence.samples[-100:]):
        free, t = count(row.get("disk_free")), number(row.get("t"))
        if free is None or t is None or end is None or end - t > _LATELY:
            continue
        if free >= below:
            return None  # it is the newest reading that counts
        moved = next((text(event.get("path")) for event in reversed(evidence.events_of("disk"))), None)
        path = moved or _recording(evidence)
        reading = Reading(f"{format_bytes(free)} free where {path} lies", "samples", number(row.get("wall")))
        return FullDisk(path, reading)
    return None


def _by_warning(evidence: Evidence) -> FullDisk | None:
    """The recorder's own warning: a full disk may have taken no sample any more."""
    end = evidence.last_t
    for event in reversed(evidence.events_of("warning")):
        t, path = number(event.get("t")), text(mapping(event.get("values")).get("path"))
        if event.get("alarm") == "disk-full" and path and t is not None and end is not None:
            reading = Reading(f"the disk of {path} was full", "events.jsonl", number(event.get("wall")))
            return FullDisk(path, reading) if end - t <= _LATELY else None
    return None


def _by_death_record(evidence: Evidence, below: int) -> FullDisk | None:
    for disk in mapping(evidence.death.get("disks")).values():
        free, path = count(mapping(disk).get("free")), text(mapping(disk).get("path"))
        if free is not None and path and free < below and not path.startswith("/dev/shm"):  # noqa: S108
            return FullDisk(path, Reading(f"no room left on {path}", "death.json", evidence.died_wall))
    return None


def _recording(evidence: Evidence) -> str:
    return os.path.dirname(os.path.dirname(evidence.folder))


def mount_of(folder: str) -> str:
    """The folder in which this one's disk begins; the same folder where that cannot be seen, or is the whole system."""
    try:
        device, found = os.stat(folder).st_dev, os.path.realpath(folder)
        while os.stat(os.path.dirname(found)).st_dev == device:
            if found == "/":
                return folder
            found = os.path.dirname(found)
    except OSError:
        return folder
    return found
