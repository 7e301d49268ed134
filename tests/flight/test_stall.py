"""When a training counts as stuck, told from step, CPU and I/O as the sidecar feeds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from buoy.flight.stall import Hang, HangOver, StallWatch, is_stopped, sentence
from buoy.machine import procfs


class Training:
    """A training as the watch sees it, one sample a second."""

    def __init__(self, floor_seconds: float | None = None, step_seconds: float = 0.25) -> None:
        self.watch = StallWatch(floor_seconds)
        self.t, self.step, self.step_t, self.cpu, self.io = 1000.0, 0, 0.0, 0.0, 0.0
        self.step_seconds = step_seconds
        self.phase = "train"
        self.readable = True

    def live(
        self,
        seconds: float,
        *,
        steps: bool = False,
        cpu: float = 0.0,
        io: float = 0.0,
        gpu: float | None = None,
    ) -> list[tuple[float, Hang | HangOver]]:
        """Go on for so many seconds; what was told, with its time from the beginning of this stretch."""
        told = []
        begun = self.t
        while self.t - begun < seconds:
            self.t += 1.0
            self.cpu += cpu
            self.io += io
            if steps:
                self.step += max(1, int(1 / self.step_seconds))
                self.step_t = self.t
            event = self.watch.feed(
                self.t, self.step, self.step_t, self.step_seconds, self.phase,
                self.cpu if self.readable else None, self.io if self.readable else None, gpu,
            )  # fmt: skip
            if event is not None:
                told.append((self.t - begun, event))
        return told


def test_a_blocked_training_is_told_once_after_half_a_minute() -> None:
    training = Training()
    assert training.live(60, steps=True, cpu=1.0) == []

    told = training.live(600)

    [(after, hang)] = told
    assert isinstance(hang, Hang) and hang.idle
    assert 30 <= after <= 35
    assert hang.step == training.step and hang.cpu_share == pytest.approx(0.0)


def test_slow_steps_stretch_the_patience() -> None:
    training = Training(step_seconds=10.0)
    training.step_seconds = 10.0
    training.live(30, steps=True, cpu=1.0)

    assert training.live(190) == []
    assert len(training.live(30)) == 1


def test_a_busy_pause_is_told_late_and_not_as_idle() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    assert training.live(290, cpu=1.0) == []
    [(_, hang)] = training.live(30, cpu=1.0)
    assert isinstance(hang, Hang) and not hang.idle
    assert hang.cpu_share == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("phase", ["eval", "checkpoint"])
def test_a_marked_phase_is_given_four_times_as_long(phase: str) -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.phase = phase

    assert training.live(1190, cpu=1.0) == []
    assert len(training.live(30, cpu=1.0)) == 1


def test_reading_data_without_cpu_is_not_idle() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    assert training.live(250, io=10e6) == []


def test_a_busy_gpu_is_not_idle() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    assert training.live(250, gpu=95.0) == []


def test_a_blocked_training_that_shows_a_heartbeat_is_still_blocked() -> None:
    """A progress bar's thread uses a little CPU and writes a line now and then."""
    training = Training()
    training.live(60, steps=True, cpu=1.0)

    [(_, hang)] = training.live(60, cpu=0.005, io=100)
    assert isinstance(hang, Hang) and hang.idle


def test_a_block_after_a_long_busy_pause_is_told_from_when_it_blocked() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.live(200, cpu=1.0)

    [(after, hang)] = training.live(60)
    assert isinstance(hang, Hang) and hang.idle and 30 <= after <= 40


def test_steps_that_come_again_end_the_hang_and_a_second_hang_is_told_again() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    assert len(training.live(60)) == 1

    [(_, over)] = training.live(30, steps=True, cpu=1.0)
    assert isinstance(over, HangOver) and over.step > 0
    [(after, hang)] = training.live(300)
    assert isinstance(hang, Hang) and after > 60  # it has come out of a minute's pause before


def test_a_pause_that_the_run_has_come_out_of_is_not_told_the_next_time() -> None:
    training = Training()
    for _ in range(3):
        training.live(60, steps=True, cpu=1.0)
        assert training.live(25) == []
    training.live(60, steps=True, cpu=1.0)

    assert training.live(36) == []


def test_before_the_first_step_only_idleness_counts_and_later() -> None:
    busy, idle = Training(), Training()
    busy.phase = idle.phase = "start"

    assert busy.live(3600, cpu=1.0) == []
    [(after, hang)] = idle.live(300)
    assert isinstance(hang, Hang) and hang.idle and 120 <= after <= 125


def test_a_suspended_machine_is_no_hang() -> None:
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.t += 36_000

    assert training.live(20) == []
    assert len(training.live(60)) == 1


def test_a_training_that_is_done_does_not_hang() -> None:
    """Also a notebook between two cells."""
    training = Training()
    training.live(60, steps=True, cpu=1.0)
    training.phase = "done"

    assert training.live(4000) == []


def test_without_readings_a_stall_is_never_called_idle() -> None:
    training = Training()
    training.readable = False
    training.live(60, steps=True)

    assert training.live(290) == []
    [(_, hang)] = training.live(30)
    assert isinstance(hang, Hang) and not hang.idle and hang.cpu_share is None


def test_the_impatient_set_every_floor() -> None:
    blocked, busy, before = Training(3.0, 0.01), Training(3.0, 0.01), Training(3.0)
    blocked.live(10, steps=True, cpu=1.0)
    busy.live(10, steps=True, cpu=1.0)

    assert blocked.live(6)
    assert busy.live(6, cpu=1.0)
    assert before.live(6)


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("step", [0, 123_456_789])
def test_the_line_says_where_and_what_and_is_short(idle: bool, step: int) -> None:
    line = sentence(Hang(idle, 4000.0, 300.0, None if idle else 1.98, step, "checkpoint", 123.456))

    assert len(line) <= 200
    assert "1 h 6 min" in line and "checkpoint" in line and "`buoy why`" in line
    assert ("blocked" in line) is idle


def test_a_stopped_process_is_told_how_it_goes_on_and_not_that_it_is_blocked() -> None:
    """Its states are read from a process that is stopped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not is_stopped(procfs.thread_states(child.pid))
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(procfs.thread_states(child.pid))
    finally:
        child.kill()
        child.wait()
    assert not is_stopped([])

    line = sentence(Hang(True, 31.0, 30.0, 0.0, 150, "train", 0.01), stopped_pid=77)
    assert "stopped" in line
    assert "`kill -CONT 77`" in line
    assert "blocked" not in line
