"""The log's files: bounded, whole lines, forgiving readers, and a disk that fills up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from buoy.flight.log import FIELDS, EventLog, LineFile, SampleLog, read_samples
from buoy.machine.files import read_lines


def sample(t: float, **values: object) -> list[object]:
    return [t if field == "t" else values.get(field, 1) for field in FIELDS]


def test_samples_are_read_back_by_name(tmp_path: Path) -> None:
    log = SampleLog(str(tmp_path))
    log.add(sample(1.0, rss=5, phase="train", gpu_used=None))

    (seen,) = read_samples(str(tmp_path))
    assert (seen["t"], seen["rss"], seen["phase"], seen["gpu_used"]) == (1.0, 5, "train", None)


def test_a_day_at_full_rate_is_bounded_and_keeps_the_last_ten_minutes(tmp_path: Path) -> None:
    log = SampleLog(str(tmp_path))
    big = {field: 123456789012 for field in FIELDS if field != "t"}
    end = 3 * 3600.0
    t = 0.0
    while t < end:  # three hours at 10 Hz; nothing below depends on more than the last segments
        log.add(sample(round(t, 3), **big))
        t += 0.1
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    minutes = (tmp_path / "minutes.jsonl").stat().st_size

    kept = list(read_samples(str(tmp_path)))
    assert kept[-1]["t"] - kept[0]["t"] >= 600
    assert len([one for one in kept if one["t"] > end - 600]) >= 5990
    assert (size - minutes) + 8 * minutes < 20e6, "8 x 3 h of minutes and the segments must fit in 20 MB"


def test_a_minute_keeps_the_spike(tmp_path: Path) -> None:
    log = SampleLog(str(tmp_path))
    for tenth in range(700):
        log.add(sample(tenth / 10, rss=999 if tenth == 333 else 5))

    rows = [row for row in read_lines(str(tmp_path / "minutes.jsonl")) if isinstance(row, list)]
    assert rows[0][FIELDS.index("rss")] == [5, 999, 5]


def test_a_torn_last_line_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\nnot json\n\xff\xfe\n[1]\n{"kind": "b"}\n{"kind": "torn')

    assert list(read_lines(str(path))) == [{"kind": "a"}, [1], {"kind": "b"}]
    assert list(read_lines(str(tmp_path / "missing"))) == []


def test_every_truncation_of_a_log_can_be_read(tmp_path: Path) -> None:
    log = SampleLog(str(tmp_path))
    for tenth in range(5):
        log.add(sample(tenth / 10))
    (path,) = tmp_path.glob("samples-*")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")

        assert len(list(read_samples(str(tmp_path)))) in (max(0, lines - 1), lines)


def test_events_from_two_writers_do_not_mix(tmp_path: Path) -> None:
    first, second = EventLog(str(tmp_path)), EventLog(str(tmp_path))
    for number in range(50):
        first.add("one", number=number)
        second.add("two", number=number)

    assert len(list(read_lines(str(tmp_path / "events.jsonl")))) == 100


def test_a_full_disk_loses_no_line_that_fits_later(make_disk: Callable[[str], Path]) -> None:
    tiny_disk = make_disk("64k")
    filler = tiny_disk / "filler"
    log = LineFile(str(tiny_disk / "events.jsonl"))
    filler.write_bytes(b"x" * 56 * 1024)
    for number in range(100):
        log.write(json.dumps({"n": number, "pad": "y" * 200}).encode() + b"\n")
    filler.unlink()
    log.write(b'{"n": 100}\n')
    log.close()

    numbers = [line["n"] for line in read_lines(str(tiny_disk / "events.jsonl"))]
    assert sorted(set(numbers)) == list(range(101))


def test_the_log_is_private(tmp_path: Path) -> None:
    os.umask(0o000)
    try:
        EventLog(str(tmp_path)).add("x")
    finally:
        os.umask(0o022)

    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600
