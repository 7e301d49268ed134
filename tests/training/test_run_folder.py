"""A run that can keep nothing: an error at the start, in words, with nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.errors import RunFolderError
from buoy.training.recording import make_folder

_CODE = """
import os
from buoy.errors import RunFolderError
from buoy.training.manager import CheckpointManager
try:
    CheckpointManager('runs/cats')
except RunFolderError as error:
    print(error)
"""


@pytest.mark.parametrize("why", ["full", "read-only"])
def test_where_nothing_can_be_written_it_does_not_begin(why: str, make_disk: Callable[[str], Path]) -> None:
    disk = make_disk("64k")
    if why == "full":
        with pytest.raises(OSError, match="No space"), open(disk / "fill", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=disk, capture_output=True, text=True, timeout=400
    )

    assert done.stderr == ""  # no promise that the training goes on right before an error
    assert "cannot write checkpoints" in done.stdout
    assert ("0 B of 64.0 KiB free" if why == "full" else "Read-only file system") in done.stdout
    assert ("free some space" if why == "full" else "give the Run another folder") in done.stdout
    assert sorted(path.name for path in disk.iterdir()) == (["fill"] if why == "full" else [])


def test_trainings_that_start_at_the_same_moment_make_the_folder_above_them_together(tmp_path: Path) -> None:
    """Two cells or two jobs of one sweep, in a place where there is no `runs/` yet."""
    at_once = threading.Barrier(4)
    refused: list[str] = []

    def start(number: int) -> None:
        for attempt in range(60):
            at_once.wait(400)
            try:
                make_folder(str(tmp_path / f"sweep-{attempt}" / "runs" / f"cats-{number}"))
            except RunFolderError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(400)

    assert refused == []
    assert len(list(tmp_path.glob("sweep-*/runs/cats-*"))) == 4 * 60
