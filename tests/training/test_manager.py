"""When the keeper saves, what it keeps, and what it does where there is no room; in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from buoy.checkpoint.store import Store
from tests.processes import attempt, events, read, wait_until

HEAD = """
import os, sys, time
from buoy.training import manager as module, save_policy
from tests.training.loop import *
"""


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def saves(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """[step, reason, error] of each save."""
    return [line.split(maxsplit=3)[1:] for line in done.stdout.splitlines() if line.startswith("saved")]


def kept(folder: Path) -> list[int]:
    return [entry.step for entry in Store(str(folder)).list()]


def test_by_steps_it_saves_at_the_multiples_keeps_the_last_few_and_goes_on_from_the_newest(
    tmp_path: Path,
) -> None:
    first = run(tmp_path / "run", "train(sys.argv[1], steps=35, save=10, keep=2, pause=0)")
    second = run(tmp_path / "run", "train(sys.argv[1], steps=45, save=10, keep=2, pause=0)")

    assert saves(first) == [["10", "steps", "None"], ["20", "steps", "None"], ["30", "steps", "None"]], (
        first.stderr
    )
    assert second.stdout.splitlines()[0] == "from 35"
    assert saves(second) == [["40", "steps", "None"]]
    assert kept(tmp_path / "run") == [45, 40]


def test_without_a_wish_it_measures_chooses_and_says_so_once(tmp_path: Path) -> None:
    code = """
save_policy.FIRST_SECONDS = save_policy.SHORTEST = 0.2
save_policy._UNKNOWN_MEAN_LIFE = save_policy._MOST_SHARE = save_policy._WRITE_SHARE = 1.0
def each(step):
    there = [name for name in os.listdir(sys.argv[1] + "/checkpoints") if name.startswith("step-")]
    if step >= 100 and len(there) >= 2: raise SystemExit
train(sys.argv[1], steps=100_000, pause=0.01, each=each)
"""
    done = run(tmp_path / "run", code)

    assert {reason for _, reason, _ in saves(done)} == {"interval"} and len(saves(done)) >= 2
    told = [line for line in done.stderr.splitlines() if "a checkpoint costs" in line]
    assert len(told) == 1 and "to write; saving every" in told[0] and "lost" in told[0]


def test_a_time_that_was_asked_for_is_kept_to(tmp_path: Path) -> None:
    code = """
began, save = [], CheckpointManager.save
def timed(*given, **named):
    began.append(time.monotonic())
    return save(*given, **named)
CheckpointManager.save = timed
def each(step):
    if len(began) < 3: return
    print("apart", min(after - before for before, after in zip(began, began[1:])), flush=True)
    raise SystemExit
train(sys.argv[1], steps=100_000, pause=0.01, save="0.3s", each=each)
"""
    done = run(tmp_path / "run", code)

    (apart,) = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("apart")]
    assert apart > 0.29 and "a checkpoint costs" not in done.stderr


def test_before_the_sessions_end_it_saves_says_so_and_trains_on(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "train(sys.argv[1], steps=300, pause=0.01, time_limit='31s')")

    assert [reason for _, reason, _ in saves(done)] == ["deadline"]
    told = r"the session ends in \d+ s: saving now and then every 10 s; training continues until the session ends"
    assert len(re.findall(told, done.stderr)) == 1
    assert done.stdout.endswith("finished\n")


def test_a_foretold_exhaustion_is_one_save_a_minute(tmp_path: Path) -> None:
    code = """
save_policy._LOOK_SECONDS = 0.1
with kept(sys.argv[1], save="1h") as keeper:
    reasons = []
    for step in range(1, 100):
        time.sleep(0.01)
        if step in (20, 60):
            keeper.recorder.event("warning", alarm="ram", text="RAM will be full", values={})
        if step == 40:
            keeper.recorder.event("warning", alarm="bottleneck", text="slow", values={})
        if reason := keeper.due(step):
            keeper.save(items(step, 10), step=step, epoch=0, reason=reason, as_tensor=as_tensor)
            reasons.append((reason, step < 40))
    print(reasons)
"""
    done = run(tmp_path / "run", code)

    assert done.stdout == "[('alarm', True)]\n", done.stderr


def test_a_checkpoint_that_can_never_fit_is_refused_before_training(
    tmp_path: Path, make_disk: Callable[[str], Path]
) -> None:
    disk = make_disk("4m")
    full = run(disk / "run", "train(sys.argv[1], size=1_000_000)")
    budget = run(tmp_path / "run", "train(sys.argv[1], size=1_000_000, disk='2MB')")

    assert "there is no room for one checkpoint" in full.stderr and "7.6 MiB does not fit" in full.stderr
    assert "there is no room for one checkpoint" in budget.stderr
    assert "step 1\n" not in full.stdout + budget.stdout


def test_fewer_are_kept_where_more_do_not_fit(tmp_path: Path) -> None:
    """The budget holds at every moment, the one that is being written included."""
    code = """
import threading
most, stop = 0, False
def look():
    global most
    while not stop:
        size = 0
        for folder, _, names in os.walk(os.path.join(sys.argv[1], "checkpoints")):
            for name in names:
                try: size += os.stat(os.path.join(folder, name)).st_size
                except FileNotFoundError: pass
        most = max(most, size)
        time.sleep(0.002)
thread = threading.Thread(target=look, daemon=True); thread.start()
train(sys.argv[1], steps=60, save=5, size=50_000, disk='1500kB', keep=10, pause=0.02)
stop = True; thread.join()
print("most", most)
"""
    done = run(tmp_path / "run", code)

    assert "10 checkpoints of 395.6 KiB do not fit in 1.4 MiB: keeping the last 2" in done.stderr, done.stderr
    assert len(saves(done)) == 12 and {error for *_, error in saves(done)} == {"None"}
    assert kept(tmp_path / "run") == [60, 55]
    assert int(done.stdout.split()[-1]) <= 1_500_000


def test_a_disk_that_fills_up_costs_no_training_and_no_good_checkpoint(
    make_disk: Callable[[str], Path],
) -> None:
    disk = make_disk("6m")
    code = """
save_policy._RETRY_SECONDS = 0.05
filler = os.path.join(os.path.dirname(sys.argv[1]), "filler")
def fill(step):
    if 25 <= step < 60:  # whatever is given up is eaten at once
        with open(filler, "ab", buffering=0) as file:
            try:
                while True: file.write(bytes(4096))
            except OSError: pass
    if step == 60: os.unlink(filler)
train(sys.argv[1], steps=100, save=10, size=100_000, keep=2, pause=0.02, each=fill)
"""
    done = run(disk / "run", code)

    assert done.stdout.endswith("finished\n"), done.stderr
    by_step = {int(step): error for step, _, error in saves(done)}
    assert by_step[20] == "None" and any(error != "None" for step, error in by_step.items() if 25 < step < 60)
    told = [line for line in done.stderr.splitlines() if "was not saved" in line]
    assert len(told) == 1 and "is the newest that is safe" in told[0] and "training continues" in told[0]
    assert kept(disk / "run")[0] == 100
    assert not [name for name in os.listdir(disk / "run" / "checkpoints") if ".part" in name]
    assert any(
        "was not saved" in str(event.get("what"))
        for event in events(disk / "run")
        if event["kind"] == "trouble"
    )


def test_an_end_that_finds_the_disk_full_is_told_as_one_and_as_nothing_else(
    make_disk: Callable[[str], Path],
) -> None:
    disk = make_disk("6m")
    code = """
filler = os.path.join(os.path.dirname(sys.argv[1]), "filler")
def fill(step):
    if step == 12:
        with open(filler, "ab", buffering=0) as file:
            try:
                while True: file.write(bytes(4096))
            except OSError: pass
try:
    train(sys.argv[1], steps=12, save=10, size=200_000, keep=1, pause=0.0, each=fill)
finally:
    os.unlink(filler)
with kept(sys.argv[1]) as keeper:
    for pin in (None, "best"):
        last = {"step": 12, "epoch": 1, "as_tensor": as_tensor, "pin": pin}
        keeper.save(items(12, 200_000), reason="user" if pin else "finished", finished=pin is None, **last)
"""
    done = run(disk / "run", code)
    told = [event for event in events(disk / "run") if event["kind"] in ("training", "trained")]

    assert done.returncode == 0, done.stderr
    assert [(event["kind"], event.get("finished"), event.get("no_room")) for event in told] == [
        ("training", None, None), ("trained", False, True), ("training", None, None), ("trained", True, None),
    ]  # fmt: skip
    assert told[1]["unsaved"]
    # The end, saved once more under a name of its own, is no training.
    assert [event["reason"] for event in events(disk / "run") if event["kind"] == "save"][-2:] == [
        "finished",
        "user",
    ]


def test_a_second_training_on_the_same_run_is_told_who_holds_it(tmp_path: Path) -> None:
    code = """
import subprocess
with kept(sys.argv[1]) as keeper:
    second = "import sys; from tests.training.loop import *; train(sys.argv[1])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BUOY")}
    done = subprocess.run([sys.executable, "-c", second, sys.argv[1]], capture_output=True, text=True, env=environment)
    print(os.getpid(), done.stdout)
    print(done.stderr)
"""
    done = run(tmp_path / "run", code)

    assert "another process is writing the checkpoints of" in done.stdout, done.stdout + done.stderr
    assert f"process {done.stdout.split()[0]} on" in done.stdout and "step 1" not in done.stdout


def test_what_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    code = """
with kept(sys.argv[1]) as keeper:
    keeper.expect({"scheduler": {"lr_lambdas": [lambda step: 1.0]}}, as_tensor)
"""
    done = run(tmp_path / "run", code)

    assert done.returncode == 1 and "scheduler" in done.stderr and "lr_lambdas" in done.stderr


def test_what_can_no_longer_be_saved_later_is_told_and_costs_no_training(tmp_path: Path) -> None:
    code = """
with kept(sys.argv[1], save=1) as keeper:
    state = {"meter": {}}
    keeper.expect(state, as_tensor)
    state["meter"]["hook"] = print
    print(keeper.save(state, step=1, epoch=0, reason="steps", as_tensor=as_tensor).error)
print("trained")
"""
    done = run(tmp_path / "run", code)

    assert done.stdout.endswith("trained\n") and "meter" in done.stdout, done.stderr
    assert "step 1 was not saved" in done.stderr and "nothing is saved yet" in done.stderr


def test_a_keeper_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    code = """
with kept(sys.argv[1], save=1) as keeper:
    keeper.store.list = lambda: 1 / 0
    for step in range(1, 4):
        print(keeper.due(step))
        print(keeper.save(items(step, 10), step=step, epoch=0, reason="steps", as_tensor=as_tensor).step)
print("trained")
"""
    done = run(tmp_path / "run", code)

    assert done.stdout.endswith("trained\n"), done.stderr


def test_checkpoints_go_where_they_were_asked_for_when_buoy_run_records_elsewhere(tmp_path: Path) -> None:
    code = "import sys; from tests.training.loop import *; train(sys.argv[1], steps=3)"
    command = [
        sys.executable,
        "-m",
        "buoy",
        "run",
        "--run",
        str(tmp_path / "log"),
        "--",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, timeout=400)

    assert done.returncode == 0 and kept(tmp_path / "run") == [3]
    assert f"checkpoints go to {tmp_path / 'run'}, the recording to {tmp_path / 'log'}" in done.stderr
    assert [event["step"] for event in events(tmp_path / "log") if event["kind"] == "save"] == [3]


def test_the_verdict_points_to_no_checkpoint_of_an_earlier_run(tmp_path: Path) -> None:
    """A notebook trains one run after the other, within one recording."""
    code = f"""
import os, buoy
from tests.training.loop import train
os.chdir({str(tmp_path)!r})
buoy.watch("recording")
train("first", steps=10, save=5, pause=0.0)
def each(step):
    if step == 4: os.kill(os.getpid(), 9)
train("second", steps=10, save="24h", pause=0.0, each=each)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=400, check=False)
    path = attempt(tmp_path / "recording") / "verdict.json"
    verdict = wait_until(lambda: read(path) if path.exists() else None, "the verdict")

    assert verdict["mechanism"] and "first" not in str(verdict["cause"]["next"])
