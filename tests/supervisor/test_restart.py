"""`--restart`: again after what can be survived, as long as it gets further."""

from __future__ import annotations

from pathlib import Path

from tests.processes import read, run_python

_RESUMING = """
import os, pathlib, signal, time
import buoy
watch = buoy.watch()
state = pathlib.Path(STATE)
start = int(state.read_text()) if state.exists() else 0
for step in range(start + 1, 10):
    watch.step(step)
    time.sleep(0.05)
    if step % 4 == 0 and step > start + 1:
        state.write_text(str(step)); time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)
print("finished from", start)
"""


def test_a_killed_script_that_saves_goes_on_and_finishes(tmp_path: Path) -> None:
    code = _RESUMING.replace("STATE", repr(str(tmp_path / "state")))

    done = run_python(tmp_path / "run", code, "--restart", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished from 8\n"
    assert "restart 2 of 5 after step 8" in done.stderr


def test_a_script_that_gets_no_further_is_not_started_for_ever(tmp_path: Path) -> None:
    code = "import buoy, os, time; w = buoy.watch(); w.step(); time.sleep(0.5); os.kill(os.getpid(), 9)"

    done = run_python(tmp_path / "run", code, "--restart", "9")
    assert done.returncode == 137
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 2
    assert "the script saved nothing that buoy saw, so it starts over" in done.stderr
    assert "not restarted: it got no further than step 1 of the previous attempt" in done.stderr


def test_a_training_that_a_killed_command_ends_at_the_same_step_is_not_started_for_ever(
    tmp_path: Path,
) -> None:
    code = (
        "import buoy, subprocess; w = buoy.watch(); w.step()\n"
        "subprocess.run(['sh', '-c', 'sleep 0.3; kill -9 $$'], check=True)"
    )

    done = run_python(tmp_path / "run", code, "--restart", "9")
    assert "worker-killed" in done.stderr
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 2
    assert "not restarted: it got no further than step 1 of the previous attempt" in done.stderr


def test_a_script_whose_steps_cannot_be_counted_is_restarted_as_often_as_asked(tmp_path: Path) -> None:
    done = run_python(tmp_path / "run", "import os; os.kill(os.getpid(), 9)", "--restart", "2")

    assert done.returncode == 137
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 3
    assert done.stderr.count("no step was counted and no save seen") == 2
    assert "it was restarted 2 times already" in done.stderr
    assert done.stderr.count("buoy restarted it") == 2
    assert done.stderr.count("its 2 restarts are used up") == 1
    assert "buoy run --restart" not in done.stderr  # who asked for it need not be told of it


def test_a_script_that_crashes_twice_at_the_same_place_is_not_started_a_third_time(tmp_path: Path) -> None:
    code = "import ctypes\ndef read(at):\n    ctypes.string_at(at)\nread(0)"

    done = run_python(tmp_path / "run", code, "--restart", "3")
    assert done.returncode == 139
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 2
    assert (
        "not restarted: it died twice in the same way (native-crash) at the same place, <string>:3"
        in done.stderr
    )


def test_a_script_that_crashes_elsewhere_each_time_is_restarted_as_often_as_asked(tmp_path: Path) -> None:
    code = (
        "import ctypes, os, pathlib\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "count.write_text((count.read_text() if count.exists() else '') + 'x')\n"
        "def first(): ctypes.string_at(0)\n\n"
        "def second(): ctypes.string_at(0)\n"
        "(first, second)[len(count.read_text()) % 2]()"
    )

    run_python(tmp_path / "run", code, "--restart", "2")
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 3


IN_A_RUN_OF_ITS_OWN = """
import os
from buoy.training.manager import CheckpointManager
keeper = CheckpointManager("runs/my cats")
with keeper.loop():
    keeper.due(0)
    keeper.recorder.step()
    os._exit(3)
"""


def test_the_last_line_names_the_folder_that_the_script_uses(tmp_path: Path) -> None:
    done = run_python(tmp_path / "recording", IN_A_RUN_OF_ITS_OWN, cwd=tmp_path)
    told = done.stderr.splitlines()

    assert any(line.startswith("my cats #1: exit-code") for line in told)
    assert told[-1] == "buoy: details: `buoy why 'runs/my cats'`; charts: `buoy report 'runs/my cats'`"


def test_a_bug_is_not_restarted(tmp_path: Path) -> None:
    done = run_python(tmp_path / "run", "raise NameError('typo')", "--restart", "3")

    assert done.returncode == 1 and "starting it again would not help" in done.stderr
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 1


def test_a_second_attempt_counts_the_time_limit_from_the_first(tmp_path: Path) -> None:
    code = _RESUMING.replace("STATE", repr(str(tmp_path / "state")))
    run_python(tmp_path / "run", code, "--restart", "2", "--time-limit", "1h")

    first, second = (read(tmp_path / "run" / "attempts" / name / "attempt.json") for name in ("0001", "0002"))
    assert first["session_started"] == second["session_started"] < second["wall"]
