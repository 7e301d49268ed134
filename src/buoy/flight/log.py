"""The flight log's files: whole lines appended by one write each, in bounded segments; readers forgive a torn end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

from buoy.machine.files import open_lines, parse_json, read_bounded, read_end, read_lines

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
SAMPLES_MOST_BYTES = 6 << 20
"""That a reader takes in: twice of what the recorder keeps, so that only damage comes to it."""
_MOST_HEADER = 64 << 10
_PENDING_MOST = 256

# What a field holds in whatever event it stands; readers need not look twice.
_TEXT, _NUMBER = (str,), (int, float)
_KINDS = {
    "kind": _TEXT, "run": _TEXT, "path": _TEXT, "what": _TEXT, "text": _TEXT, "alarm": _TEXT, "name": _TEXT,
    "why": _TEXT, "type": _TEXT, "message": _TEXT, "reason": _TEXT, "newest": _TEXT,
    "t": _NUMBER, "wall": _NUMBER, "seconds": _NUMBER, "jump": _NUMBER, "step": _NUMBER, "left": _NUMBER,
    "counted": _NUMBER, "kept": _NUMBER, "samples": _NUMBER, "smaller": _NUMBER, "pid": _NUMBER,
}  # fmt: skip

_HEADER = (json.dumps({"schema": SAMPLE_SCHEMA, "fields": FIELDS}) + "\n").encode()


def memory_use(
    used: int | None, limit: int | None, available: int | None, total: int | None
) -> tuple[int | None, int | None]:
    """Bytes of RAM that a sample shows as used, and that there are: of the memory group, else of the whole machine."""
    if limit is None or used is None or (total and limit > total):
        return (total - available if total is not None and available is not None else None), total
    return used, limit


class LineFile:
    """Appends lines; on a full disk keeps the newest few in memory and tries again with the next one."""

    def __init__(self, path: str, header: bytes = b"") -> None:
        self._descriptor = open_lines(path)
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
        self.newest: float | None = None
        """When the last sample was taken."""
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
        self.newest = now
        self._summarise(now, sample)

    def _rotate(self, now: float) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segments.append((self._path(self._number), now))
        self._number += 1
        while os.path.exists(self._path(self._number)):  # a restarted sidecar continues after its predecessor
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
            self._flush_minute()

    def flush(self) -> None:
        """Write what a full disk had not taken, and the summary of the minute so far."""
        if self._segment is not None:
            self._segment.write(b"")
        self._flush_minute()

    def _flush_minute(self) -> None:
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


def note(folder: str, kind: str, **values: object) -> None:
    """Append one event of an attempt; never raises. The file is opened each time: a script could close it under us."""
    try:
        log = EventLog(folder)
        log.add(kind, **values)
        log.close()
    except OSError:
        pass


def read_events(folder: str) -> list[dict]:  # type: ignore[type-arg]
    """The events of an attempt, oldest first; a field that holds another kind of thing than ever is left out."""
    lines = read_lines(os.path.join(folder, "events.jsonl"))
    return [
        {name: value for name, value in line.items() if _fits(value, _KINDS.get(name))}
        for line in lines
        if isinstance(line, dict)
    ]


def _fits(value: object, kinds: tuple[type, ...] | None) -> bool:
    return kinds is None or value is None or type(value) in kinds


def sample_files(folder: str) -> list[str]:
    """The segments of samples at full rate, oldest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [os.path.join(folder, name) for name in sorted(names) if name.startswith("samples-")]


def read_samples(folder: str, most: int = SAMPLES_MOST_BYTES, every: int = 1) -> Iterator[dict]:  # type: ignore[type-arg]
    """The newest samples at full rate, oldest first, as dicts by field name: so many bytes of them.

    `every`: each n-th, and the last few; of the others only where the training was (`t`, `step`, `phase`), since pauses
    and new beginnings that are left out would count as steps.
    """
    chosen: list[tuple[str, int]] = []
    for path in reversed(sample_files(folder)):
        size = min(_size(path), most)
        if most <= 0:
            break
        chosen.append((path, size))
        most -= size
    for path, size in reversed(chosen):
        yield from _rows(path, size, every)


def _rows(path: str, most: int, every: int) -> Iterator[dict]:  # type: ignore[type-arg]
    names, lines = read_table(path, most)
    for number, line in enumerate(lines):
        if number % every and number < len(lines) - 3:  # the last line may be torn
            if (place := _place_of(line, names)) is not None:
                yield place
        elif (row := parse_row(line, names)) is not None:
            yield {name: measured(name, value) for name, value in row.items()}


def read_table(path: str, most: int) -> tuple[list[str], list[bytes]]:
    """The names of a file's columns, and its last lines, so many bytes of them; nothing where it cannot be read."""
    try:
        header = parse_json(read_bounded(path, _MOST_HEADER).partition(b"\n")[0])
        data, _ = read_end(path, most)
    except (OSError, ValueError):
        return [], []
    return fields_of(header), data.split(b"\n")


def parse_row(line: bytes, names: list[str]) -> dict | None:  # type: ignore[type-arg]
    """A line as a dict by the columns' names; None when it is torn or something else."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return dict(zip(names, row, strict=True)) if isinstance(row, list) and len(row) == len(names) else None


def fields_of(header: object) -> list[str]:
    """The names of the columns, by the first line of a file; none if that is no such line."""
    names = header.get("fields") if isinstance(header, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def measured(name: str, value: object) -> object:
    """A reading; None where there is something else, which says as much as nothing."""
    return value if type(value) in ((str,) if name == "phase" else (int, float)) else None


def _place_of(line: bytes, fields: list[str]) -> dict | None:  # type: ignore[type-arg]
    """The first of its fields, without parsing the others."""
    parts = line.split(b",", 4)
    if fields[:4] != ["t", "wall", "step", "phase"] or len(parts) != 5:
        return None
    try:
        place = {"t": float(parts[0][1:]), "step": int(parts[2]), "phase": parts[3].strip(b'"').decode()}
    except ValueError:
        return None
    return place if abs(place["t"]) < 1e18 and abs(place["step"]) < 1e18 else None  # type: ignore[arg-type]


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
