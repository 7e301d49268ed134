"""`buoy.watch()`: the same recording for a script that nobody launched with `buoy run`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import MountedDrive
from tests.processes import alive, attempt, event, read, run_python, wait_until

_JOINED = (
    "buoy.watch('r'); from buoy.training.recording import record; from buoy.checkpoint.store import Store;"
    " record(Store('other'), sys.argv[1], None, print)"
)
"""A recording that ran already, as a notebook's, is copied to the mirror of a run that joins it."""


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=400)


def verdict(folder: Path) -> dict[str, object]:
    path = attempt(folder) / "verdict.json"
    wait_until(path.exists, "the verdict")
    return read(path)  # type: ignore[no-any-return]


def test_a_watched_script_is_judged_after_its_death(tmp_path: Path) -> None:
    done = python("import buoy; buoy.watch('r').step(); raise MemoryError('too much')", tmp_path)

    assert done.returncode == 1 and "MemoryError: too much" in done.stderr
    assert verdict(tmp_path / "r")["cause"]["id"] == "memory-error"  # type: ignore[index]


def test_called_twice_it_is_the_same_recorder(tmp_path: Path) -> None:
    done = python("import buoy; print(buoy.watch('r') is buoy.watch('r') is buoy.watch())", tmp_path)

    assert done.stdout == "True\n"


def test_a_second_folder_is_not_used_and_that_is_said(tmp_path: Path) -> None:
    done = python("import buoy; buoy.watch('a'); print(buoy.watch('b'))", tmp_path)

    assert done.stdout == f"<buoy records into {tmp_path / 'a'}>\n"
    assert done.stderr == f"buoy: already recording into {tmp_path / 'a'}; b is not used\n"
    assert not (tmp_path / "b").exists()


def test_why_asked_from_another_folder_is_about_the_process_that_asks(tmp_path: Path) -> None:
    code = (
        "import buoy, os; buoy.watch('runs/cats').step(); os.mkdir('sub'); os.chdir('sub')\n"
        "print(buoy.why().cause.id, buoy.why().run)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)

    assert done.stdout.split() == ["still-running", str(tmp_path / "runs" / "cats")], done.stderr


def test_inside_buoy_run_it_joins(tmp_path: Path) -> None:
    code = "import buoy; w = buoy.watch(); w.step(); print(w.folder)"

    done = run_python(tmp_path / "run", code)
    assert done.stdout == f"{tmp_path / 'run'}\n"
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 1


def test_inside_buoy_run_another_folder_is_not_used_and_the_training_goes_on(tmp_path: Path) -> None:
    done = run_python(
        tmp_path / "run", f"import buoy; buoy.watch({str(tmp_path / 'other')!r}); print('trained')"
    )

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "already recording into" in done.stderr and not (tmp_path / "other").exists()


def test_what_cannot_be_recorded_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    code = "import buoy; w = buoy.watch('taken'); w.step(); w.epoch(1); w.event('x'); print('trained', w)"
    done = python(code, tmp_path)

    assert (done.returncode, done.stdout) == (0, "trained <buoy records nothing>\n")
    assert done.stderr.startswith("buoy: nothing is recorded; training continues: ")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_time_limit_that_cannot_be_read_is_an_error_before_anything_is_made(tmp_path: Path) -> None:
    done = python("import buoy; buoy.watch('r', time_limit='soon')", tmp_path)

    assert done.returncode == 1 and "cannot read a duration" in done.stderr
    assert not (tmp_path / "r").exists()


def test_no_dump_goes_into_a_file_of_the_script(tmp_path: Path) -> None:
    """A daemon closes every descriptor it does not know; what it opens then is its own."""
    code = (
        "import buoy, ctypes, os; buoy.watch('r'); os.closerange(3, 4096)\n"
        "files = [open(f'{n}.bin', 'wb', buffering=0) for n in range(20)]\n"
        "for file in files: file.write(b'DATA')\n"
        "ctypes.string_at(0)"
    )
    assert python(code, tmp_path).returncode == -signal.SIGSEGV

    assert {path.read_bytes() for path in tmp_path.glob("*.bin")} == {b"DATA"}


def test_phases_and_epochs_are_recorded(tmp_path: Path) -> None:
    code = "import buoy, os; w = buoy.watch('r'); w.epoch(2); w.step()\nwith w.phase('eval'): os._exit(9)"
    python(code, tmp_path)

    where = verdict(tmp_path / "r")["where"]
    assert isinstance(where, dict)
    assert (where["step"], where["epoch"], where["phase"]) == (1, 2, "eval")


def test_a_forked_child_leaves_no_words_in_its_parents_name(tmp_path: Path) -> None:
    code = (
        "import buoy, os, signal, time; buoy.watch('r')\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(30)\n"
        "time.sleep(0.3); os.kill(child, signal.SIGTERM); os.waitpid(child, 0)\n"
        "child = os.fork()\n"
        "if child == 0: raise ValueError('of the child')\n"
        "os.waitpid(child, 0)"
    )
    python(code, tmp_path)

    assert verdict(tmp_path / "r")["cause"]["id"] == "clean-exit"  # type: ignore[index]
    (words,) = (attempt(tmp_path / "r")).glob("process-*/SIGTERM.txt")
    assert words.read_text() == ""


def test_the_mirror_gets_the_tail_and_the_verdict(tmp_path: Path) -> None:
    python("import buoy, time; buoy.watch('r', mirror='drive').step(); time.sleep(0.5); 1/0", tmp_path)

    copy = tmp_path / "drive" / "r"
    wait_until((attempt(copy) / "verdict.json").exists, "the mirrored verdict")
    shutil.rmtree(tmp_path / "r")
    told = subprocess.run([sys.executable, "-m", "buoy", "why", str(copy)], capture_output=True, text=True)
    assert told.returncode == 0 and "ZeroDivisionError" in told.stdout


@pytest.mark.parametrize("begins", ["buoy.watch('r', mirror=sys.argv[1])", _JOINED])
def test_the_log_leaves_nothing_where_its_mirror_was_mounted(
    begins: str, tmp_path: Path, make_drive: Callable[..., MountedDrive]
) -> None:
    """`drive.mount` refuses a folder that is not empty."""
    drive = make_drive()
    code = f"import buoy, sys; {begins}; print('go', flush=True); sys.stdin.readline(); 1/0"
    training = subprocess.Popen(
        [sys.executable, "-c", code, str(drive.path)],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    wait_until((attempt(drive.path / "r") / "events.jsonl").exists, "the first copy")
    drive.unmount()
    training.communicate("\n", timeout=400)
    wait_until((attempt(tmp_path / "r") / "verdict.json").exists, "the verdict")
    wait_until(lambda: not _sidecars(tmp_path / "r"), "the last copy")

    assert os.listdir(drive.path) == []


def _sidecars(run: Path) -> list[str]:
    """The processes that Python was given this attempt for: a sidecar, and what it has forked to copy."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path.parent.name] if f"{attempt(run)}\0".encode() in path.read_bytes() else []
    return found


def test_a_store_as_the_logs_mirror_is_refused_and_no_folder_of_its_name_is_made(tmp_path: Path) -> None:
    done = python("import buoy; buoy.watch('r', mirror='s3://bucket/runs')", tmp_path)

    assert done.returncode == 1 and "received: mirror='s3://bucket/runs'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "drive").write_text("not a folder")
    done = python(
        "import buoy, time; buoy.watch('r', mirror='drive'); time.sleep(2.5); print('trained')", tmp_path
    )

    assert done.returncode == 0 and done.stdout == "trained\n"
    assert done.stderr.count("cannot copy to mirror") == 1


def test_the_sidecar_survives_the_kill_of_the_whole_group_and_session(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import buoy, time; buoy.watch('r'); time.sleep(60)"],
        cwd=tmp_path,
        start_new_session=True,
    )
    sidecar = wait_until(lambda: event(tmp_path / "r", "start"), "the sidecar")["sidecar"]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    assert verdict(tmp_path / "r")["cause"]["id"] == "killed"  # type: ignore[index]
    wait_until(lambda: not alive(sidecar), "the sidecar's end")
