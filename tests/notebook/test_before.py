"""Which kernel's end a new kernel speaks of, from what lies in the folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from buoy.machine import host
from buoy.notebook.extension import Life, last_ended, lives, unseen

KERNEL = ["python", "/usr/lib/ipykernel_launcher.py", "-f", "kernel-1.json"]


def record(run: Path, number: int, command: list[str], began: float, ended: float | None = None) -> None:
    """An attempt; without an end it is this very process."""
    folder = run / "attempts" / f"{number:04d}"
    folder.mkdir(parents=True)
    about = {"command": command, "wall": began, "pid": 3_999_999, "boot_id": host.boot_id()}
    if ended is None:
        about |= {"pid": os.getpid(), "t": time.monotonic(), "hostname": host.hostname()}
    else:
        (folder / "death.json").write_text(json.dumps({"wall": ended, "pid": 3_999_999}))
    (folder / "attempt.json").write_text(json.dumps(about))


def test_only_kernels_count_and_the_one_that_ended_last_is_meant(tmp_path: Path) -> None:
    record(tmp_path, 1, KERNEL, 100.0, 500.0)
    record(tmp_path, 2, KERNEL, 200.0, 300.0)
    record(tmp_path, 3, ["python", "train.py"], 600.0, 700.0)
    record(tmp_path, 4, KERNEL, 400.0)
    known = lives(str(tmp_path))

    assert known == [Life(1, 100.0, 500.0), Life(2, 200.0, 300.0), Life(4, 400.0, None)]
    assert last_ended(known) == known[0]
    assert unseen(known) == [known[0]]  # the end of attempt 2 was there to be told when attempt 4 began


def test_two_ends_since_the_last_kernel_began_are_both_news_the_latest_first() -> None:
    first, second = Life(1, 10.0, 40.0), Life(2, 20.0, 30.0)

    assert unseen([first, second]) == [first, second]
    assert unseen([first, second, Life(3, 50.0, None)]) == []


def test_a_clock_that_was_set_back_hides_no_end() -> None:
    before, dead = Life(1, 5000.0, 5100.0), Life(2, 100.0, 200.0)

    assert dead in unseen([before, dead])


def test_a_kernel_without_a_record_of_its_end_that_lives_no_more_has_ended(tmp_path: Path) -> None:
    record(tmp_path, 1, KERNEL, 100.0, 500.0)
    (tmp_path / "attempts" / "0001" / "death.json").unlink()

    assert lives(str(tmp_path)) == [Life(1, 100.0, 100.0)]
