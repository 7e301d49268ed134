"""What is told of a slow training, from readings as the sidecar feeds them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.flight.alarms.slowdown import Finding, SlowdownWatch, sentence
from buoy.machine.threads import Look


class Training:
    """A training as the watch sees it, one sample a second; totals grow at the rates given."""

    def __init__(self, cores: float = 2.0) -> None:
        self.watch = SlowdownWatch(cores)
        self.t, self.steps = 500.0, 1.0
        self.totals: dict[str, float] = {}

    def live(
        self,
        seconds: float,
        *,
        step_seconds: float = 0.1,
        phase: str = "train",
        gpu: float | None = None,
        **rates: float,
    ) -> list[Finding]:
        found = []
        for _ in range(int(seconds)):
            self.t += 1.0
            self.steps += 1.0 / step_seconds
            for name, rate in rates.items():
                self.totals[name] = self.totals.get(name, 0.0) + rate
            found += self.watch.feed(self.t, int(self.steps), phase, gpu_util=gpu, **self.totals)
        return found


def kinds(findings: list[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


def test_a_healthy_training_is_left_in_peace() -> None:
    training = Training()

    found = training.live(
        600, data_wait=0.1, major_faults=1, steal=0.05, throttled=0.05, io_stall=0.1, gpu=90.0
    )
    assert found == []


def test_slow_steps_with_major_faults_are_thrashing_told_once() -> None:
    training = Training()
    training.live(120, major_faults=1)

    found = training.live(300, step_seconds=2.0, major_faults=500)
    assert kinds(found) == ["thrashing"]
    assert found[0].alarm == "thrashing"
    assert found[0].usual_step_seconds == pytest.approx(0.1, rel=0.1)
    assert found[0].faults_per_second == pytest.approx(500, rel=0.1)


def test_thrashing_that_lets_no_step_end_is_told_too() -> None:
    training = Training()
    training.live(120, major_faults=1)

    assert kinds(training.live(60, step_seconds=500.0, major_faults=500)) == ["thrashing"]


def test_slow_steps_without_faults_are_not_called_thrashing() -> None:
    training = Training()
    training.live(120, major_faults=1)

    found = training.live(300, step_seconds=0.5, major_faults=1)
    assert kinds(found) == ["slow"]
    assert "not known" in sentence(found[0])


def test_a_training_that_always_faults_is_compared_with_itself() -> None:
    training = Training()
    training.live(120, major_faults=100)

    assert kinds(training.live(300, step_seconds=0.5, major_faults=150)) == ["slow"]


def test_thrashing_of_a_run_that_always_faults_a_little_is_told() -> None:
    """114 steps a second with 180 faults; then 6 with 1,500: by the second that is no tenfold, by the step 150-fold."""
    training = Training()
    training.live(120, step_seconds=1 / 114, major_faults=180, refaults=10)

    assert kinds(training.live(60, step_seconds=1 / 6, major_faults=1500, refaults=1500)) == ["thrashing"]


def test_faults_that_slow_it_down_by_half_are_a_known_cause() -> None:
    training = Training()
    training.live(120, major_faults=1, refaults=0)

    assert kinds(training.live(300, step_seconds=0.25, major_faults=8000, refaults=8000)) == ["thrashing"]


def test_reading_more_of_a_mapped_file_is_not_thrashing() -> None:
    """Pages that come for the first time: the faults are there, and nothing was thrown out."""
    training = Training()
    training.live(120, major_faults=1, refaults=0)

    assert kinds(training.live(300, step_seconds=0.5, major_faults=500, refaults=0)) == ["slow"]


def test_steps_with_more_to_do_are_not_slow_and_become_the_usual_ones() -> None:
    """After a learning-rate finder, or with a larger batch: the CPU time of a step grows with its duration."""
    training = Training()
    training.live(120, step_seconds=0.1, cpu_seconds=1.0)

    assert training.live(300, step_seconds=1.0, cpu_seconds=1.0) == []
    assert kinds(training.live(300, step_seconds=5.0, cpu_seconds=0.2)) == ["slow"]


def test_slow_for_want_of_a_cpu_is_a_known_cause(make_quota: Callable[[float], Path]) -> None:
    """The looks are at a real process that gets a tenth of a core."""
    quota = make_quota(0.1)
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (quota / "cgroup.procs").write_text(str(program.pid))

        def look() -> Look:
            time.sleep(0.5)
            return Look(time.monotonic(), [program.pid], program.pid)

        training = Training()
        training.watch = SlowdownWatch(2.0, look)
        training.live(120, cpu_seconds=1.0)
        found = training.live(120, step_seconds=1.0, cpu_seconds=0.1)
    finally:
        program.kill()
        program.wait()

    assert kinds(found) == ["crowded"]
    assert found[0].alarm == "bottleneck" and "it waits for a CPU" in sentence(found[0])


def test_a_short_slow_spell_is_not_told() -> None:
    training = Training()
    training.live(120)

    assert training.live(25, step_seconds=0.5) + training.live(120) == []


@pytest.mark.parametrize(
    ("reading", "kind", "low", "high"),
    [
        ("data_wait", "data", 0.3, 0.6),
        ("io_stall", "io", 0.3, 0.6),
        ("steal", "steal", 0.2, 0.5),  # of two cores
        ("throttled", "throttled", 0.2, 0.4),
    ],
)
def test_a_bottleneck_is_told_when_it_begins_and_again_only_after_it_ended(
    reading: str, kind: str, low: float, high: float
) -> None:
    training = Training()

    assert training.live(120, **{reading: low}) == []
    assert kinds(training.live(300, **{reading: high})) == [kind]
    assert training.live(300, **{reading: 0.0}) == []
    found = training.live(300, **{reading: high})
    assert kinds(found) == [kind]
    assert found[0].alarm == "bottleneck"


def test_an_idle_gpu_that_waits_for_data_is_one_finding() -> None:
    training = Training()

    found = training.live(300, data_wait=0.7, gpu=12.0)
    assert kinds(found) == ["gpu-idle"]
    assert "12 % busy" in sentence(found[0]) and "70 %" in sentence(found[0])


def test_evaluation_and_saving_do_not_count() -> None:
    training = Training()
    training.live(120)

    assert training.live(600, step_seconds=1e9, phase="eval", io_stall=0.9) == []
    assert training.live(120) == []


def test_before_the_first_step_nothing_is_judged() -> None:
    watch = SlowdownWatch()

    assert [watch.feed(float(t), 0, "start", io_stall=float(t)) for t in range(300)] == [[]] * 300


def test_readings_that_are_missing_are_not_taken_for_zero_or_a_finding() -> None:
    watch = SlowdownWatch()

    assert [watch.feed(float(t), 10 * t, "train") for t in range(300)] == [[]] * 300


@pytest.mark.parametrize(
    "kind", ["thrashing", "crowded", "slow", "data", "gpu-idle", "io", "steal", "throttled"]
)
def test_every_line_is_short_and_ends_with_what_to_do(kind: str) -> None:
    line = sentence(Finding(kind, 0.987, 1234.5, 12.3456, 123_456.0, 12.0))

    assert len(line) <= 200
    assert line.count(". ") == 1 and line.endswith(".")
