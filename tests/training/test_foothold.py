"""A run that can keep nothing: an error at the start, in words, with nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_CODE = """
import os
from buoy.errors import RunFolderError
from buoy.training.keeper import Keeper
try:
    Keeper('runs/cats')
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
    done = subprocess.run([sys.executable, "-c", _CODE], cwd=disk, capture_output=True, text=True, timeout=60)

    assert done.stderr == ""  # no promise that the training goes on right before an error
    assert "cannot write checkpoints" in done.stdout
    assert ("0 B of 64.0 KiB free" if why == "full" else "Read-only file system") in done.stdout
    assert ("free some space" if why == "full" else "give the Run another folder") in done.stdout
    assert sorted(path.name for path in disk.iterdir()) == (["fill"] if why == "full" else [])
