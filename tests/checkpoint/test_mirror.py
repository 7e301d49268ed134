"""The second home: a drive that is pulled away, fills up or hangs, and the way back from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buoy.checkpoint.manifest import STATE
from buoy.checkpoint.mirror.mirror import Mirror
from buoy.checkpoint.mirror.storage import FolderStorage
from buoy.checkpoint.retention import Keep
from buoy.checkpoint.store import Store
from buoy.errors import UsageError
from tests.checkpoint.ground import save
from tests.conftest import MountedDrive
from tests.processes import alive, buoy, read, wait_until

HEAD = """
import os, signal, subprocess, sys, time
from buoy.checkpoint.mirror.mirror import Mirror
from buoy.training import manager as module, save_policy
from tests.training.loop import *
Mirror.retry_seconds, Mirror.patience = 0.2, 3.0
"""


def start(folder: Path, mirror: object, code: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HEAD + code, str(folder), str(mirror)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, **options)


def train(folder: Path, mirror: object, code: str) -> tuple[str, str]:
    return start(folder, mirror, code).communicate(timeout=400)


def steps(run: Path) -> list[int]:
    return [entry.step for entry in Store(str(run)).list() if entry.complete]


def status(run: Path) -> dict[str, Any]:
    try:
        return read(run / "mirror.json")  # type: ignore[no-any-return]
    except FileNotFoundError:
        return {}


PLAIN = "train(sys.argv[1], mirror=sys.argv[2], steps=45, save=10, keep=2, pause=0.01)"


def test_checkpoints_are_copied_and_the_end_waits_for_the_last_one(tmp_path: Path) -> None:
    out, err = train(tmp_path / "run", tmp_path / "drive", PLAIN)
    copies = tmp_path / "drive" / "run"

    assert out.endswith("finished\n") and f"step 45 is safe in the mirror {tmp_path / 'drive'}" in err
    assert f"buoy: the mirror {tmp_path / 'drive'} is on the same disk as the run folder" in err
    assert steps(copies)[0] == 45
    newest = Store(str(copies)).newest(pytest.fail)  # every byte
    assert newest is not None and newest.step == 45
    wait_until(lambda: steps(copies) == [45, 40], "the mirror's own retention")
    assert (copies / "attempts").is_dir()  # one argument for the checkpoints and the flight log


def test_what_was_saved_before_a_kill_reaches_the_mirror_and_a_new_machine_goes_on_from_it(
    tmp_path: Path,
) -> None:
    code = """
def each(step):
    if step == 31: os.kill(os.getpid(), signal.SIGKILL)
train(sys.argv[1], mirror=sys.argv[2], steps=100, save=10, pause=0.01, each=each)
"""
    train(tmp_path / "run", tmp_path / "drive", code)
    wait_until(lambda: steps(tmp_path / "drive" / "run")[:1] == [30], "the last checkpoint in the mirror")
    shutil.rmtree(tmp_path / "run")

    out, err = train(tmp_path / "run", tmp_path / "drive", PLAIN)
    assert out.startswith("from 30\n"), err
    assert f"step 30 was brought back from the mirror {tmp_path / 'drive'}" in err


def test_a_checkpoint_that_a_slow_disk_finishes_after_the_kill_reaches_the_mirror(tmp_path: Path) -> None:
    code = """
from buoy.checkpoint.lock import writers_of
def each(step):
    if step == 20:
        while '"newest": 10' not in open(sys.argv[1] + "/mirror.json").read(): time.sleep(0.02)
        for pid in writers_of(sys.argv[1] + "/checkpoints"):
            os.kill(pid, signal.SIGSTOP)
            print("writer", pid, flush=True)
    if step == 21: os.kill(os.getpid(), signal.SIGKILL)
train(sys.argv[1], mirror=sys.argv[2], steps=45, save=10, each=each)
"""
    out, err = train(tmp_path / "run", tmp_path / "drive", code)
    writers = [int(line.split()[1]) for line in out.splitlines() if line.startswith("writer")]
    assert writers and out.splitlines()[-1].startswith("saved 20"), out + err
    time.sleep(1)  # the mirror's process has seen that the training is gone, and that nothing is left to copy
    for pid in writers:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: steps(tmp_path / "drive" / "run")[:1] == [20], "the last checkpoint in the mirror")
    mirror = int(status(tmp_path / "run")["pid"])
    wait_until(lambda: not Path(f"/proc/{mirror}").exists(), "the end of the mirror's process")


def test_what_is_newer_here_is_not_replaced_by_the_mirror(tmp_path: Path) -> None:
    train(tmp_path / "run", tmp_path / "drive", PLAIN)
    train(tmp_path / "run", tmp_path / "other", "train(sys.argv[1], steps=50, pause=0)")

    out, err = train(tmp_path / "run", tmp_path / "drive", PLAIN.replace("45", "60"))
    assert out.startswith("from 50\n") and "brought back" not in err


def test_a_damaged_copy_is_named_and_the_one_before_is_brought_back(tmp_path: Path) -> None:
    train(tmp_path / "run", tmp_path / "drive", PLAIN)
    wait_until(lambda: len(steps(tmp_path / "drive" / "run")) == 2, "two copies")
    path = tmp_path / "drive" / "run" / "checkpoints" / "step-000000045" / STATE
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "run")

    out, err = train(tmp_path / "run", tmp_path / "drive", PLAIN)
    assert out.startswith("from 40\n"), err
    assert "step 45 in the mirror is damaged" in err and "model/weights" in err
    # The one made anew has taken its place.
    again = Store(str(tmp_path / "drive" / "run")).newest(pytest.fail)
    assert again is not None and again.step == 45


def test_a_drive_that_is_pulled_away_costs_one_warning_and_is_used_again_when_it_is_back(
    tmp_path: Path, make_disk: Callable[[str], Path]
) -> None:
    drive = make_disk("32m")
    code = """
save_policy._LOOK_SECONDS = 0.1
import buoy.checkpoint.mirror.mirror as mirror
mirror._LOOK_SECONDS = 0.1
def each(step):
    if step == 30: subprocess.run(["umount", "-l", sys.argv[2]], check=True)
    if step == 160: subprocess.run(["mount", "-t", "tmpfs", "tmpfs", sys.argv[2]], check=True)
train(sys.argv[1], mirror=sys.argv[2], steps=340, save=10, pause=0.01, each=each)
"""
    training = start(tmp_path / "run", drive, code)
    wait_until(lambda: status(tmp_path / "run").get("trouble"), "the trouble")
    assert not os.path.ismount(drive) and not os.listdir(drive)  # nothing on the machine's own disk
    out, err = training.communicate(timeout=400)

    assert out.endswith("finished\n")
    assert err.count("cannot take a checkpoint: it is no longer mounted") == 1 and "training continues" in err
    assert "again safe in the mirror" in err
    assert steps(drive / "run")[0] == 340


def test_a_drive_that_is_full_costs_one_warning(tmp_path: Path, make_disk: Callable[[str], Path]) -> None:
    drive = make_disk("1m")
    code = """
save_policy._LOOK_SECONDS = 0.1
import buoy.checkpoint.mirror.mirror as mirror
mirror._LOOK_SECONDS = 0.1
train(sys.argv[1], mirror=sys.argv[2], steps=100, save=20, size=200_000, pause=0.01)
"""
    out, err = train(tmp_path / "run", drive, code)

    assert out.endswith("finished\n") and steps(tmp_path / "run")[0] == 100
    assert "same disk" not in err
    assert err.count("cannot take a checkpoint: No space left on device") == 1
    assert "step 100 is not yet in the mirror" in err
    assert not list(drive.rglob("*.part"))  # half a file helps nobody there


def test_a_drive_that_hangs_holds_nobody_up_nor_who_reads_the_trainings_output(
    tmp_path: Path, make_drive: Callable[..., MountedDrive]
) -> None:
    """`python train.py 2>&1 | tee log` ends with the training: no helper that hangs has its streams."""
    drive = make_drive(hangs_at=f"{STATE}.part")
    code = """
import buoy.checkpoint.mirror.mirror as mirror
mirror._LOOK_SECONDS, mirror._SILENCE, save_policy._LOOK_SECONDS, Mirror.patience = 0.1, 0.5, 0.1, 0.5
train(sys.argv[1], mirror=sys.argv[2], steps=150, save=10, pause=0.01)
"""
    out, _ = start(tmp_path / "run", drive.path, code, stderr=subprocess.STDOUT).communicate(timeout=400)
    hung = int(status(tmp_path / "run")["pid"])

    assert out.endswith("copying continues in the background\nfinished\n")
    assert out.count("cannot take a checkpoint: it has not answered for") == 1
    assert alive(hung)
    os.kill(hung, signal.SIGKILL)


def test_a_drive_without_modes_and_owners_is_a_mirror_as_any_other(
    tmp_path: Path, make_drive: Callable[..., MountedDrive]
) -> None:
    """Google Drive's mount, and vfat: no links, one owner for all files, who may be another than this user."""
    drive = make_drive(uid=54321)
    out, err = train(tmp_path / "run", drive.path, PLAIN)
    copies = drive.path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)

    assert out.endswith("finished\n"), err
    assert f"step 45 is handed to Drive (which uploads it by itself) in the mirror {drive.path}" in err
    assert (copies / "attempts" / "0001" / "attempt.json").exists()
    assert train(tmp_path / "run", drive.path, PLAIN)[0].startswith("from 45\n")


def test_a_drive_that_reports_room_and_has_none_once_loses_no_copy(
    tmp_path: Path, make_drive: Callable[..., MountedDrive]
) -> None:
    drive = make_drive()
    code = """
save_policy._LOOK_SECONDS = 0.1
import buoy.checkpoint.mirror.mirror as mirror
mirror._LOOK_SECONDS = 0.1
def each(step):
    if step in (25, 35): sys.stdin.readline()
train(sys.argv[1], mirror=sys.argv[2], steps=40, save=10, keep=2, each=each)
"""
    training = start(tmp_path / "run", drive.path, code, stdin=subprocess.PIPE)
    assert training.stdin is not None and training.stdout is not None
    copies = drive.path / "run"
    wait_until(lambda: steps(copies) == [20, 10], "two copies")
    (drive.path / "full").touch()
    training.stdin.write("\n")
    training.stdin.flush()
    wait_until(lambda: status(tmp_path / "run").get("trouble"), "the trouble")
    kept = steps(copies)
    (drive.path / "full").unlink()
    out, err = training.communicate("\n", timeout=400)

    assert kept == [20, 10] and out.endswith("finished\n"), err
    # The training may end while the copier still pauses after the trouble: then it goes on in the background.
    wait_until(lambda: steps(copies)[:1] == [40] and status(tmp_path / "run")["trouble"] is None, "the copy")


def test_a_mirror_process_that_is_killed_is_started_again_three_times_and_then_the_truth_is_said(
    tmp_path: Path,
) -> None:
    code = """
save_policy._LOOK_SECONDS = 0.05
import buoy.checkpoint.mirror.mirror as mirror
from buoy.checkpoint.mirror.mirror import read_status
mirror._LOOK_SECONDS = 0.05
killed = set()
def each(step):
    if step not in (12, 22, 32, 42): return
    until = time.monotonic() + 200
    while time.monotonic() < until:
        status = read_status(sys.argv[1])
        if status.get("newest_safe") and status["newest"] >= step - 2 and status["pid"] not in killed:
            break  # this one is alive, and copies
        time.sleep(0.01)
    killed.add(status["pid"])
    os.kill(status["pid"], signal.SIGKILL)
train(sys.argv[1], mirror=sys.argv[2], steps=65, save=10, pause=0.01, each=each)
"""
    out, err = train(tmp_path / "run", tmp_path / "drive", code)
    listed = buoy("ckpt", "list", str(tmp_path / "run")).stdout

    assert out.endswith("finished\n") and steps(tmp_path / "run")[0] == 65
    assert err.count("started again") == 3 and "3 of 3 times" in err
    assert err.count("buoy: copying to the mirror") == 1
    assert "step 65 is not yet in the mirror" in err and "copying has stopped" in err
    assert "continues in the background" not in err
    assert "step 40 safe in the mirror" in listed and "copying has stopped" in listed


def test_a_mirror_process_that_is_killed_shortly_before_the_end_is_started_again_for_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = tmp_path / "run", list[str]()
    save(run, 10, size=400)
    mirror = Mirror(str(run), str(tmp_path / "drive"), Keep())

    def kill() -> None:
        wait_until(lambda: status(run).get("pid"), "its first words")
        os.kill(status(run)["pid"], signal.SIGKILL)
        wait_until(lambda: mirror._is_gone, "its end")

    def finish() -> str:
        newest = Store(str(run)).list()[0]
        mirror.finish(newest.step, newest.time, said.append)
        return said[-1]

    mirror.start()
    wait_until(lambda: status(run).get("newest") == 10, "the first copy")
    kill()
    save(run, 20, size=400)
    safe = f"step 20 is safe in the mirror {tmp_path / 'drive'}"
    assert finish() == safe and said[0].endswith("started again, 1 of 3 times")
    assert steps(tmp_path / "drive" / "run") == [20, 10]

    kill()
    copying = {"step": 10, "done": 1, "bytes": 2, "moved": time.time()}  # an older one, until it was killed
    (run / "mirror.json").write_text(json.dumps({**status(run), "copying": copying}))
    assert finish() == safe

    save(run, 30, size=400)
    monkeypatch.setattr(mirror, "_start_again", lambda say: False)
    assert "step 30 is not yet" in finish() and "its process has ended 2 times (was" in said[-1]
    mirror._restarts = 0
    assert finish() and "its process has ended once (was" in said[-1]


def test_old_copies_go_truncated_where_the_trash_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Google Drive a deleted file moves to the trash and keeps its bytes: it must be empty before."""
    train(tmp_path / "run", tmp_path / "drive", PLAIN)
    copies = tmp_path / "drive" / "run" / "checkpoints"
    trash = tmp_path / "trash"
    os.link(copies / "step-000000045" / STATE, trash)
    monkeypatch.setattr("buoy.checkpoint.mirror.storage.is_drive", lambda path: True)

    FolderStorage(str(tmp_path / "drive"), "run").remove("step-000000045")
    assert not (copies / "step-000000045").exists() and trash.stat().st_size == 0


@pytest.mark.parametrize(
    ("where", "words", "hint"),
    [
        ("gs://bucket/runs", "the mirror needs gcsfs", "pip install gcsfs"),
        ("memory://runs", "the mirror cannot be in memory", "s3://"),
        ("sthree://bucket", "unknown kind of mirror", "s3://"),
        ("/proc/nowhere", "the mirror cannot be written", "mounted"),
        ("/content/drive/MyDrive/runs", "Google Drive is not mounted", "drive.mount"),
        ("file://runs/cats", "cannot tell which folder", "runs/cats"),
        ("file://HERE", "the mirror is the run folder itself", "mirror="),
        ("HERE", "the mirror is the run folder itself", "mirror="),
        ("HERE/run", "the mirror is the run folder itself", "mirror="),
    ],
)
def test_a_mirror_that_cannot_work_is_refused_at_the_start(
    where: str, words: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        Mirror(str(tmp_path / "run"), where.replace("HERE", str(tmp_path)), Keep())

    assert words in str(refused.value) and hint in str(refused.value.hint)


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_file_url_is_the_folder_that_it_names(protocol: str, tmp_path: Path) -> None:
    """With its owner, its log and the watch over its mount: not a store that only fsspec reaches."""
    mirror = Mirror(str(tmp_path / "run"), f"{protocol}://{tmp_path}/drive/", Keep())

    assert mirror.where == mirror.shown == mirror.log_folder == str(tmp_path / "drive")


def test_passwords_in_a_url_are_shown_to_nobody(tmp_path: Path) -> None:
    assert Mirror(str(tmp_path / "run"), "ftp://me:secret@host/runs", Keep()).shown == "ftp://***@host/runs"
