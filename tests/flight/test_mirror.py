"""The log's tail in a mirror."""

from __future__ import annotations

import os
from pathlib import Path

from buoy.flight.mirror import copy_tail


def test_what_is_no_plain_file_is_left_out_and_the_rest_is_copied(tmp_path: Path) -> None:
    attempt = tmp_path / "run" / "attempts" / "0001"
    (attempt / "process-7").mkdir(parents=True)
    (attempt / "attempt.json").write_text("{}")
    (attempt / "samples-00002.jsonl").write_text('{"fields": ["t"]}\n[1]\n')
    (attempt / "process-7" / "fault.txt").write_text("words")
    for name in ("events.jsonl", "samples-00001.jsonl", "process-8", "process-7/stacks.txt"):
        os.mkfifo(attempt / name)
    (attempt / "death.json").symlink_to("/etc/passwd")
    copied: dict[str, bytes] = {}

    copy_tail(str(attempt), str(tmp_path / "run" / "run.json"), 1, copied.__setitem__)

    assert {Path(name).name: data for name, data in copied.items()} == {
        "attempt.json": b"{}",
        "fault.txt": b"words",
        "samples-tail.jsonl": b'{"fields": ["t"]}\n[1]\n',
    }
