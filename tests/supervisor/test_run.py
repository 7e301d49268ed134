"""`buoy run` as a person uses it: the script's own output and code, signals, bad input, and nothing in its way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import (
    alive,
    attempt,
    buoy,
    event,
    events,
    main_pid,
    open_descriptors,
    read,
    run_python,
    start_python,
    wait_until,
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(137)", 137),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
        ("import ctypes; ctypes.string_at(0)", 139),
    ],
)
def test_the_exit_code_is_the_commands_own(tmp_path: Path, code: str, expected: int) -> None:
    assert run_python(tmp_path / "run", code).returncode == expected


def test_output_and_input_are_untouched(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('beware\\n')"

    done = run_python(tmp_path / "run", code, input="hello\n")
    assert (done.stdout, done.stderr) == ("HELLO\n", "beware\n")


def test_a_death_is_explained_on_stderr_in_at_most_six_lines(tmp_path: Path) -> None:
    done = run_python(tmp_path / "run", "print('out'); raise ValueError('bad value')")

    assert done.stdout == "out\n"
    said = done.stderr.partition("ValueError: bad value\n\n")[2]
    assert "python-exception" in said and len(said.splitlines()) <= 6


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 125, "no command to run"),
        (["--", "no-such-program-anywhere"], 127, "command not found"),
        (["--", "train.py"], 127, "no such script"),
        (["train.py"], 127, "no such script"),
        (["python", "-u", "train.py"], 127, "no such script"),
        ([sys.executable, "-X", "dev", "train.py", "-m", "x"], 127, "no such script"),
        (["--time-limit", "soon", "--", "true"], 125, "cannot read a duration"),
        (["--restart", "-1", "--", "true"], 125, "a negative number of restarts"),
        (["--restart", "many", "--", "true"], 125, "invalid int value"),
        (["--restrat", "2", "true"], 125, "hint: did you mean `--restart`?"),
        (["--time-limit", "0", "--", "true"], 125, "a time limit of nothing"),
        (["--time-limit", "12", "--", "true"], 125, "`12h`, or `12s` for seconds"),
        (["--run", "", "--", "true"], 125, "an empty run folder"),
        (["--", "/tmp"], 126, "a folder"),
    ],
)
def test_what_cannot_be_started_is_told_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    done = buoy("run", *arguments, cwd=tmp_path)

    assert done.returncode == code
    assert words in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["--", "train.py"],
        ["./train.py"],
        ["python", "train.py"],
        ["--", "python", "train.py"],
        ["-m", "train"],
        ["--", sys.executable, "-u", "train.py"],
    ],
)
def test_a_script_runs_however_it_is_spelt(tmp_path: Path, words: list[str]) -> None:
    """What comes before it is ours, what comes after it is its own. No `python` on PATH: then it is ours."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:], sys.executable)")
    (tmp_path / "train.py").chmod(0o755)  # as all files are on a mounted drive: no program, all the same

    options = ["--run", "there", *words, "--restart", "2", "--", "--help"]
    done = buoy("run", *options, cwd=tmp_path, env={**os.environ, "PATH": ""})
    assert (done.stdout, done.returncode) == (f"['--restart', '2', '--', '--help'] {sys.executable}\n", 0)
    assert (tmp_path / "there" / "attempts" / "0001").is_dir()


def test_a_script_that_is_a_program_starts_as_its_first_line_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("#!/bin/echo\n")
    (tmp_path / "train.py").chmod(0o755)

    assert buoy("run", "./train.py", cwd=tmp_path).stdout == "./train.py\n"
    assert buoy("run", "train.py", cwd=tmp_path).stdout == ""  # Python's: one line of comment


def test_a_mistyped_script_leaves_no_run_and_gets_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")

    done = buoy("run", "python", "trian.py", cwd=tmp_path)
    assert done.returncode == 127 and "did you mean `train.py`?" in done.stderr
    assert "no run found" in buoy("why", cwd=tmp_path).stderr


def test_the_verdict_starts_on_its_own_line_after_a_progress_bar(tmp_path: Path) -> None:
    code = "import os, sys; sys.stderr.write('\\r 50%|#####     | 5/10'); sys.stderr.flush(); os.kill(os.getpid(), 9)"

    said = run_python(tmp_path / "run", code).stderr.splitlines()
    assert any(line.startswith("run #1: killed") for line in said), said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello\n", "`buoy run -- bash "),
        ("#!/no/such/thing\n", "the interpreter in its first line is not there"),
    ],
)
def test_a_script_that_exec_refuses_is_126_and_leaves_no_attempt(
    tmp_path: Path, text: str, words: str
) -> None:
    script = tmp_path / "train"
    script.write_text(text)
    script.chmod(0o755)

    done = buoy("run", "--run", str(tmp_path / "run"), "--", str(script))
    assert done.returncode == 126 and words in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_working_directory_that_vanishes_does_not_change_the_exit_code(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    code = f"import os; os.rmdir({str(here)!r}); os.kill(os.getpid(), 15)"

    done = run_python(tmp_path / "run", code, cwd=here)
    assert done.returncode == 143


@pytest.mark.parametrize(("verb", "code"), [("run", 125), ("why", 2)])
def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, verb: str, code: int) -> None:
    script = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m buoy {verb} -- true"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == code and "the working directory is gone" in done.stderr


def test_a_run_folder_that_is_deleted_is_named(tmp_path: Path) -> None:
    code = f"import shutil; shutil.rmtree({str(tmp_path / 'run')!r}); raise SystemExit(3)"

    done = run_python(tmp_path / "run", code)
    assert done.returncode == 3 and f"the run folder {tmp_path / 'run'} is gone" in done.stderr


_CHILDREN = "import subprocess, sys\nfor _ in range(3): subprocess.run([sys.executable, '-c', CODE])"
_TRAINS = "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1).step()"


def test_python_children_leave_nothing_unless_they_train(tmp_path: Path) -> None:
    run_python(tmp_path / "run", _CHILDREN.replace("CODE", "'pass'"))
    run_python(tmp_path / "trains", _CHILDREN.replace("CODE", repr(_TRAINS)))

    assert len(list(attempt(tmp_path / "run").glob("process-*"))) == 1
    assert len(list(attempt(tmp_path / "trains").glob("process-*"))) == 4


def test_a_run_folder_that_is_a_file_is_125(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")

    done = run_python(tmp_path / "run", "print('ran')")
    assert done.returncode == 125 and "choose another with `--run DIR`" in done.stderr
    assert done.stdout == "" and (tmp_path / "run").read_text() == "mine"


@pytest.fixture
def small_disk(make_disk: Callable[[str], Path]) -> Path:
    return make_disk("1m")


def test_a_run_folder_on_a_full_disk_is_125(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1 << 20))

    done = run_python(small_disk / "run", "print('ran')")
    assert done.returncode == 125 and done.stdout == "" and "No space left" in done.stderr


def test_a_run_folder_on_a_read_only_disk_is_125(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    done = run_python(small_disk / "run", "print('ran')")
    assert done.returncode == 125 and done.stdout == "" and "Read-only" in done.stderr


def test_a_disk_that_fills_up_during_the_run_still_takes_the_verdict(small_disk: Path) -> None:
    code = (
        "import os, time\n"
        "time.sleep(0.5)\n"
        f"f = os.open({str(small_disk / 'filler')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "try:\n"
        "  while True: os.write(f, b'x' * 4096)\n"
        "except OSError: time.sleep(1); raise"
    )

    done = run_python(small_disk / "run", code)
    assert done.returncode == 1
    assert read(attempt(small_disk / "run") / "verdict.json")["cause"]["id"] == "disk-full"


_COUNT_SIGNALS = """
import signal, sys, time
seen = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: seen.append(number))
print("ready", flush=True)
end = time.monotonic() + 20
while signal.SIGHUP not in seen and time.monotonic() < end: time.sleep(0.01)
time.sleep(0.3)
print(sorted(int(number) for number in seen), flush=True)
"""


@pytest.mark.parametrize("to_group", [False, True], ids=["to buoy", "to buoy's process group"])
def test_signals_are_forwarded_once(tmp_path: Path, to_group: bool) -> None:
    process = start_python(tmp_path / "run", _COUNT_SIGNALS, process_group=0)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        (os.killpg if to_group else os.kill)(process.pid, number)

    out, _ = process.communicate(timeout=400)
    assert out == f"{sorted(map(int, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)))}\n"
    assert process.returncode == 0
    assert {found["signal"] for found in events(tmp_path / "run") if found["kind"] == "signal"} >= {
        "SIGTERM",
        "SIGHUP",
    }


def test_the_script_sees_its_own_world(tmp_path: Path) -> None:
    """The user's sitecustomize still runs, sys.path has nothing of ours, handlers look untouched."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'ran'")
    code = (
        "import sys, signal; print(mine, [p for p in sys.path if 'bootstrap' in p], "
        "signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, 'sitecustomize' in sys.modules, "
        "[m for m in ('torch', 'numpy', 'psutil', 'rich') if m in sys.modules])"
    )

    done = run_python(tmp_path / "run", code, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == "ran [] True True []\n"


def test_an_isolated_interpreter_runs_and_is_judged_from_outside(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", "print('alone'); raise SystemExit(4)"]

    done = buoy("run", "--run", str(tmp_path / "run"), "--", *command)
    assert (done.returncode, done.stdout) == (4, "alone\n")
    assert read(attempt(tmp_path / "run") / "verdict.json")["cause"]["id"] == "exit-code"


def test_a_child_that_forks_and_exits_is_not_waited_for(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.close(1); os.close(2); time.sleep(500); os._exit(0)\n"

    done = run_python(tmp_path / "run", code, timeout=400)
    assert done.returncode == 0
    (left,) = read(attempt(tmp_path / "run") / "death.json")["alive"] or [None]
    if left:
        os.kill(left, 9)


def test_ten_thousand_fast_steps_are_counted_exactly(tmp_path: Path) -> None:
    code = "import buoy; w = buoy.watch()\nfor _ in range(10_000): w.step()\nimport time; time.sleep(0.4)"

    assert run_python(tmp_path / "run", code).returncode == 0
    assert read(attempt(tmp_path / "run") / "verdict.json")["where"]["step"] == 10_000


def test_a_killed_sidecar_is_replaced_and_the_training_unharmed(tmp_path: Path) -> None:
    process = start_python(tmp_path / "run", "import time; time.sleep(6); print('finished')")
    sidecar = wait_until(lambda: event(tmp_path / "run", "start"), "the sidecar")["sidecar"]
    os.kill(sidecar, signal.SIGKILL)
    wait_until(lambda: event(tmp_path / "run", "sidecar"), "a new sidecar")

    out, err = process.communicate(timeout=400)
    assert (process.returncode, out, err) == (0, "finished\n", "")
    assert read(attempt(tmp_path / "run") / "verdict.json")["cause"]["id"] == "clean-exit"


def test_the_sidecar_leaves_with_the_training_and_listens_to_nobody(tmp_path: Path) -> None:
    process = start_python(tmp_path / "run", "import time; time.sleep(1.5)")
    sidecar = wait_until(lambda: event(tmp_path / "run", "start"), "the sidecar")["sidecar"]
    descriptors = open_descriptors(sidecar)
    session = os.getsid(sidecar)
    process.communicate(timeout=400)

    assert not [name for name in descriptors if name.startswith("socket:")]
    assert session == sidecar
    wait_until(lambda: not alive(sidecar), "the sidecar's end")


def test_if_buoy_itself_is_killed_the_training_goes_on_and_is_still_judged(tmp_path: Path) -> None:
    process = start_python(tmp_path / "run", "import time; time.sleep(2); raise SystemExit(5)")
    child = main_pid(tmp_path / "run")
    wait_until(lambda: event(tmp_path / "run", "start"), "the sidecar")
    process.kill()
    process.wait()

    assert alive(child)
    verdict = wait_until((attempt(tmp_path / "run") / "verdict.json").exists, "the verdict")
    assert verdict and read(attempt(tmp_path / "run") / "death.json")["pid"] == child


def test_nothing_secret_is_written(tmp_path: Path) -> None:
    secret = "hunter2secretvalue"
    done = buoy(
        "run", "--run", str(tmp_path / "run"), "--", sys.executable, "-c",
        f"raise RuntimeError('cannot reach https://me:{secret}@example.com/x')",
        "--api-key", secret, f"--password={secret}",
        env={**os.environ, "MY_TOKEN": secret},
    )  # fmt: skip

    assert done.returncode == 1
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    arguments = read(attempt(tmp_path / "run") / "attempt.json")["command"]
    assert arguments[-3:] == ["--api-key", "***", "--password=***"]


def test_run_folders_are_private(tmp_path: Path) -> None:
    run_python(tmp_path / "run", "pass")

    modes = {
        path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    }
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes


def test_a_store_as_mirror_is_refused_in_words(tmp_path: Path) -> None:
    done = buoy("run", "--run", str(tmp_path / "r"), "--mirror", "s3://bucket/runs", "--", "true")

    assert done.returncode == 125
    assert "buoy.Run(" in done.stderr


@pytest.mark.parametrize("reaped", [False, True])
def test_the_death_of_a_child_is_written_once_with_its_name(tmp_path: Path, reaped: bool) -> None:
    """Also of one that nobody collects: the kernel lists it as a child for as long."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "time.sleep(0.8)\n"
        "child.kill()\n"
        f"{reaped} and child.wait()\n"
        "time.sleep(2.5)\n"
    )
    run_python(tmp_path / "run", code)
    deaths = [found for found in events(tmp_path / "run") if found["kind"] == "process-death"]

    assert [(death["name"], death["status"]) for death in deaths] == [("sleep 60", 9)]
    assert deaths[0]["since"] < deaths[0]["t"]
