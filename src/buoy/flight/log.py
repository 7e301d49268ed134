"""The flight log's files: whole lines appended by one write each, in bounded segments; readers forgive a torn end."""

from __future__ import annotations

import json
import os
import time

SAMPLE_SCHEMA = "buoy.samples/1"
FIELDS = (
    "t", "wall", "step", "phase", "rss", "tree_rss", "processes", "cgroup_used", "cgroup_limit", "available",
    "cpu_seconds", "major_faults", "oom_kills", "memory_stall", "io_stall", "read_bytes", "written_bytes",
    "disk_free", "shm_free", "gpu_used", "gpu_util", "data_wait", "steal", "throttled",
    "disk_total",
)  # fmt: skip

SEGMENT_SECONDS = 300.0
KEPT_SECONDS = 600.0
"""The last ten minutes are always there at full rate."""
EVENTS_MOST_BYTES = 4 << 20
_PENDING_MOST = 256

_HEADER = (json.dumps({"schema": SAMPLE_SCHEMA, "fields": FIELDS}) + "\n").encode()


class LineFile:
    """Appends lines; on a full disk keeps the newest few in memory and tries again with the next one."""

    def __init__(self, path: str, header: bytes = b"") -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._pending: list[bytes] = []
        if header and not os.fstat(self._descriptor).st_size:
            self.write(header)

    def write(self, line: bytes) -> None:
        """Append one line that ends in a newline."""
        self._pending.append(line)
        try:
            # One write for all that waits: a line is on disk whole, or will be tried again whole.
            written = os.write(self._descriptor, b"".join(self._pending))
        except OSError:
            del self._pending[:-_PENDING_MOST]
            return
        if written < sum(map(len, self._pending)):  # the disk filled within this write: end the torn line
            self._pending = [b"\n", *self._pending[-_PENDING_MOST:]]
            return
        self._pending.clear()

    def size(self) -> int:
        """Bytes on disk."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        os.close(self._descriptor)


class SampleLog:
    """Samples at full rate in segments of five minutes, and a summary of each minute for the whole attempt."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._segments: list[tuple[str, float]] = []  # path, monotonic time of its end
        self._number = 0
        self._segment: LineFile | None = None
        self._segment_end = 0.0
        self._minutes = LineFile(os.path.join(folder, "minutes.jsonl"), _HEADER)
        self._minute: list[list[object] | None] = []
        self._minute_end = 0.0

    def add(self, sample: list[object]) -> None:
        """Append a sample, given in the order of FIELDS."""
        now = sample[0]
        assert isinstance(now, float)
        if self._segment is None or now >= self._segment_end:
            self._rotate(now)
        assert self._segment is not None
        self._segment.write((json.dumps(sample, separators=(",", ":")) + "\n").encode())
        self._summarise(now, sample)

    def _rotate(self, now: float) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segments.append((self._path(self._number), now))
        self._number += 1
        while os.path.exists(self._path(self._number)):  # a restarted sidecar goes on after its predecessor
            self._number += 1
        self._segment = LineFile(self._path(self._number), _HEADER)
        self._segment_end = now + SEGMENT_SECONDS
        while self._segments and self._segments[0][1] < now - KEPT_SECONDS:
            path, _ = self._segments.pop(0)
            try:
                os.unlink(path)
            except OSError:
                pass

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"samples-{number:04d}.jsonl")

    def _summarise(self, now: float, sample: list[object]) -> None:
        if not self._minute:
            self._minute_end = now + 60.0
            self._minute = [None if value is None else [value, value, value] for value in sample]
            return
        for index, value in enumerate(sample):
            summary = self._minute[index]
            if value is None:
                continue
            if summary is None:
                self._minute[index] = [value, value, value]
                continue
            if not isinstance(value, str):
                if value < summary[0]:  # type: ignore[operator]
                    summary[0] = value
                if value > summary[1]:  # type: ignore[operator]
                    summary[1] = value
            summary[2] = value
        if now >= self._minute_end:
            self.flush_minute()

    def flush_minute(self) -> None:
        """Write the summary of the minute so far."""
        if self._minute:
            self._minutes.write((json.dumps(self._minute, separators=(",", ":")) + "\n").encode())
            self._minute = []


class EventLog:
    """Appends events. Several processes may hold one for the same file: each line is one O_APPEND write."""

    def __init__(self, folder: str) -> None:
        self._file = LineFile(os.path.join(folder, "events.jsonl"))

    def add(self, kind: str, **values: object) -> None:
        """Append an event stamped with both clocks; dropped once the file has reached its bound."""
        if self._file.size() > EVENTS_MOST_BYTES:
            return
        event = {"t": round(time.monotonic(), 4), "wall": round(time.time(), 4), "kind": kind, **values}
        self._file.write((json.dumps(event) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: str, most: int = 64 << 20) -> list:  # type: ignore[type-arg]
    """Every line that parses, as dicts or lists; a torn or foreign line is skipped."""
    try:
        with open(path, "rb") as file:
            data = file.read(most)
    except OSError:
        return []
    values = []
    for line in data.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict | list):
            values.append(value)
    return values


def read_events(folder: str) -> list[dict]:  # type: ignore[type-arg]
    """The events of an attempt, oldest first."""
    return [line for line in read_lines(os.path.join(folder, "events.jsonl")) if isinstance(line, dict)]


def read_samples(folder: str) -> list[dict]:  # type: ignore[type-arg]
    """The samples at full rate, oldest first, as dicts by field name."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("samples-"))
    except OSError:
        return []
    samples = []
    for name in names:
        fields: list[str] = []
        for line in read_lines(os.path.join(folder, name)):
            if isinstance(line, dict):
                fields = [str(field) for field in line.get("fields") or ()]
            elif fields and len(line) == len(fields):
                samples.append(dict(zip(fields, line, strict=True)))
    return samples
