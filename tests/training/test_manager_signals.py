"""SIGTERM and Ctrl-C, sent to real processes: a checkpoint at the end of the step, then the end the signal means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from buoy.checkpoint.store import Store
from tests.processes import alive, attempt, events, wait_until


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training.loop", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_code(folder: Path, code: str) -> subprocess.Popen[str]:
    head = "import os, signal, sys, time\nfrom tests.training.loop import *\n"
    command = [sys.executable, "-c", head + code, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"never printed {line!r}: {process.communicate()[1]}")


def newest_step(folder: Path) -> int:
    found = Store(str(folder)).newest(lambda text: None)
    assert found is not None
    return found.step


def test_sigterm_saves_after_the_step_and_then_ends_it_as_sigterm_does(tmp_path: Path) -> None:
    training = start(tmp_path / "run")
    read_until(training, "step 3")
    training.send_signal(signal.SIGTERM)
    training.send_signal(signal.SIGTERM)  # `timeout` sends it twice: that is one request
    out, err = training.communicate(timeout=400)

    assert training.returncode == -signal.SIGTERM
    assert "received SIGTERM: saving a checkpoint after this step" in err
    last = out.splitlines()[-1].split()
    assert last[:1] + last[2:] == ["saved", "sigterm", "None"]
    assert f"buoy: step {last[1]} is saved\n" in err
    assert newest_step(tmp_path / "run") == int(last[1])
    saves = [event for event in events(tmp_path / "run") if event["kind"] == "save"]
    assert [(event["what"], event["step"]) for event in saves] == [("buoy", int(last[1]))]


def test_a_signal_that_comes_during_a_regular_save_is_answered_with_that_one(tmp_path: Path) -> None:
    code = """
with kept(sys.argv[1], save=3) as keeper, keeper.loop():
    for step in range(1, 10):
        if (reason := keeper.due(step)) is not None:
            keeper.save(items(step, 1000), step=step, epoch=0, reason=reason, as_tensor=as_tensor)
            os.kill(os.getpid(), signal.SIGTERM)
            keeper.stop_if_asked()
"""
    training = start_code(tmp_path / "run", code)
    _, err = training.communicate(timeout=400)

    assert training.returncode == -signal.SIGTERM and err.count("buoy: step 3 is saved\n") == 1, err
    assert newest_step(tmp_path / "run") == 3


def test_the_stacks_at_a_sigterm_are_still_dumped(tmp_path: Path) -> None:
    """The verdict of a process that is killed after SIGTERM rests on this dump."""
    training = start(tmp_path / "run")
    read_until(training, "step 2")
    training.send_signal(signal.SIGTERM)
    training.communicate(timeout=400)

    dump = attempt(tmp_path / "run") / f"process-{training.pid}" / "SIGTERM.txt"
    assert "loop.py" in dump.read_text()


def test_a_step_that_does_not_end_is_not_waited_for_longer_than_the_grace(tmp_path: Path) -> None:
    code = """
from buoy.training.signals import Signals
from buoy.flight.recorder import Recorder
signals = Signals(Recorder(None), lambda text: print(text, flush=True), grace=0.3)
signals.arm()
print("armed", flush=True)
while True: time.sleep(0.05)
"""
    training = start_code(tmp_path, code)
    read_until(training, "armed")
    training.send_signal(signal.SIGTERM)
    out, _ = training.communicate(timeout=400)

    assert training.returncode == -signal.SIGTERM
    assert "no step ended within 0.3 s of SIGTERM" in out


def test_the_users_own_sigterm_handler_is_called_after_the_save(tmp_path: Path) -> None:
    code = """
def handler(number, frame):
    print("mine", number, flush=True)
signal.signal(signal.SIGTERM, handler)
train(sys.argv[1], steps=60)
print(signal.getsignal(signal.SIGTERM) is handler)
"""
    training = start_code(tmp_path / "run", code)
    read_until(training, "step 2")
    training.send_signal(signal.SIGTERM)
    out, err = training.communicate(timeout=400)

    lines = out.splitlines()
    saved = next(number for number, line in enumerate(lines) if line.endswith("sigterm None"))
    assert lines[saved + 1] == "mine 15", err
    assert lines[-2:] == ["finished", "True"]  # its handler did not end it, so it went on


def test_ctrl_c_saves_after_the_step_and_then_interrupts(tmp_path: Path) -> None:
    training = start(tmp_path / "run")
    read_until(training, "step 3")
    training.send_signal(signal.SIGINT)
    out, err = training.communicate(timeout=400)

    assert "saving a checkpoint after this step; press Ctrl-C again to stop at once" in err
    saved, interrupted = out.splitlines()[-2:]
    assert saved.endswith("interrupt None") and interrupted == "KeyboardInterrupt"
    assert newest_step(tmp_path / "run") == int(saved.split()[1])


IN_MY_LINE = """
import signal
def work(keeper):
    with keeper.loop():
        for step in range(3):
            if keeper.due(step):
                keeper.stop_if_asked()  # my last line
            os.kill(os.getpid(), signal.SIGINT)
work(CheckpointManager(sys.argv[1]))
"""


def test_the_traceback_of_a_ctrl_c_ends_in_the_persons_own_line(tmp_path: Path) -> None:
    """The last line of a traceback is what a tired person takes for the culprit."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nfrom buoy.training.manager import CheckpointManager\n" + IN_MY_LINE)
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    shown = done.stderr[done.stderr.index("Traceback") :]

    assert done.returncode == -signal.SIGINT
    assert shown.count("  File ") == 2 and "signals.py" not in shown
    assert "keeper.stop_if_asked()  # my last line" in shown
    assert shown.splitlines()[-1] == "KeyboardInterrupt"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    code = "train(sys.argv[1], pause=60)"
    training = start_code(tmp_path / "run", code)
    read_until(training, "from 0")
    time.sleep(0.5)
    training.send_signal(signal.SIGINT)
    assert training.stderr is not None
    while "press Ctrl-C again" not in training.stderr.readline():
        pass
    time.sleep(0.5)
    training.send_signal(signal.SIGINT)
    _, err = training.communicate(timeout=400)

    assert "KeyboardInterrupt" in err
    assert not Store(str(tmp_path / "run")).list()


def test_outside_the_loop_the_signals_act_as_ever(tmp_path: Path) -> None:
    code = """
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
with kept(sys.argv[1]) as keeper:
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with keeper.loop():
        keeper.due(1)
        assert before != [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
print("well")
"""
    out, err = start_code(tmp_path / "run", code).communicate(timeout=400)

    assert out == "well\n", err


def test_ignored_signals_stay_ignored_and_another_thread_arms_nothing(tmp_path: Path) -> None:
    code = """
import threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
with kept(sys.argv[1]) as keeper:
    def body():
        with keeper.loop():
            keeper.due(1)
            print(signal.getsignal(signal.SIGTERM))
    thread = threading.Thread(target=body)
    thread.start(); thread.join()
    with keeper.loop():
        print(signal.getsignal(signal.SIGINT))
"""
    out, err = start_code(tmp_path / "run", code).communicate(timeout=400)

    assert out.split() == [str(int(signal.SIG_DFL)), str(int(signal.SIG_IGN))], err


def test_a_worker_forked_inside_the_loop_dies_of_sigterm_but_leaves_the_first_ctrl_c_to_the_training(
    tmp_path: Path,
) -> None:
    code = """
with kept(sys.argv[1]) as keeper, keeper.loop():
    for number in (signal.SIGTERM, signal.SIGINT):
        child = os.fork()
        if not child:
            os.write(1, f"{number.name} {os.getpid()}\\n".encode())  # a signal before this line would be lost
            time.sleep(60)
            os._exit(0)
    sys.stdin.read()
"""
    head = "import os, signal, sys, time\nfrom tests.training.loop import *\n"
    training = subprocess.Popen(
        [sys.executable, "-c", head + code, str(tmp_path / "run")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert training.stdout is not None
    children = dict(training.stdout.readline().split() for _ in range(2))
    first, second = int(children["SIGTERM"]), int(children["SIGINT"])
    os.kill(first, signal.SIGTERM)
    os.kill(second, signal.SIGINT)

    wait_until(lambda: not alive(first), "the worker's death")
    time.sleep(0.3)
    assert alive(second)
    os.kill(second, signal.SIGTERM)
    wait_until(lambda: not alive(second), "the worker's death")
    _, err = training.communicate("", timeout=400)
    assert training.returncode == 0, err
