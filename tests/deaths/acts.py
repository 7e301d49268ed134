"""What the campaign does to a program once it is ready."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from buoy.flight.alarms.stall import standing
from tests.deaths.judging import judge_folder
from tests.deaths.kind import Act
from tests.deaths.scene import Scene, StageError


def nothing(scene: Scene) -> None:
    """It needs no help, and gives no sign."""


def cue(scene: Scene) -> None:
    """Give it its cue; it dies of its own doing."""
    scene.wait_ready()
    scene.wait_sidecar()
    scene.say()


def followed(act: Act) -> Act:
    """Let the recorder see the child processes first: a training's workers live for more than an instant."""

    def acted(scene: Scene) -> None:
        scene.wait_ready()
        scene.wait_followed()
        act(scene)

    return acted


def send(*signals: int, pause: float = 0.15, to: str = "main") -> Act:
    """Send signals, one after the other, to the main process or to the command the campaign launched."""

    def act(scene: Scene) -> None:
        scene.wait_ready()
        scene.wait_sidecar()
        for index, number in enumerate(signals):
            time.sleep(pause if index else 0.1)
            launcher = to == "launcher" or (to == "launcher-then-main" and index == 0)
            scene.kill(number, scene.process.pid if launcher else scene.main)

    return act


def wait_only(scene: Scene) -> None:
    """Wait until it is ready; what kills it is on its way."""
    scene.wait_ready()


def signal_then_cue(number: int, pause: float) -> Act:
    """Send a signal that is survived; give the cue some time later."""

    def act(scene: Scene) -> None:
        scene.wait_ready()
        scene.wait_sidecar()
        scene.kill(number)
        time.sleep(pause)
        scene.say()

    return act


def cue_then_send(number: int, pause: float) -> Act:
    """Give the cue, wait, then send a signal."""

    def act(scene: Scene) -> None:
        cue(scene)
        time.sleep(pause)
        scene.kill(number)

    return act


def kill_at_birth(scene: Scene) -> None:
    """Kill the main process as soon as it is known who that is."""
    scene.wait_ready()
    scene.kill(signal.SIGKILL)


def hang(scene: Scene) -> None:
    """Let it hang until the recorder says so, ask why while it is alive, then kill it."""
    cue(scene)
    _judge_hang(scene)


def stop_then_kill(scene: Scene) -> None:
    """Stop it with SIGSTOP until the recorder calls that a hang, then kill it."""
    scene.wait_ready()
    scene.wait_sidecar()
    scene.kill(signal.SIGSTOP)
    _judge_hang(scene)


def starve(percent: int) -> Act:
    """Allow it this much of a core until the recorder has something to say, ask why, then kill it."""

    def act(scene: Scene) -> None:
        scene.wait_ready()
        scene.wait_sidecar()
        scene.ground.starve(percent, scene.main)
        scene.say()
        _judge_hang(scene)

    return act


def crowd_out(scene: Scene) -> None:
    """Let other programs take every CPU, and this one what they leave; ask why, then kill it."""
    scene.wait_ready()
    scene.wait_sidecar()
    busy = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(busy) for _ in range(os.cpu_count() or 1)]
    try:
        for other in others:
            os.setpriority(os.PRIO_PROCESS, other.pid, -10)
        os.setpriority(os.PRIO_PROCESS, scene.main, 19)
        scene.say()
        _judge_hang(scene)
    finally:
        for other in others:
            other.kill()
            other.wait()


def _judge_hang(scene: Scene) -> None:
    begun = time.time()
    scene.wait_for(lambda: _is_staged(scene, standing(scene.events()), begun), "the hang to be noticed")
    scene.alive_verdict = judge_folder(scene.attempt_folder())
    scene.kill(signal.SIGKILL)


_TWO_LOOKS = 4.0
"""Seconds after which both looks at the threads came later than the cue."""


def _is_staged(scene: Scene, hang: dict[str, Any] | None, begun: float) -> bool:
    """Whether it is the one that is staged: on a crowded machine a start that gets no CPU is noticed, too."""
    assert scene.kind.alive is not None
    if hang is None:
        return False
    if not any(answer.cause == "still-running" for answer in scene.kind.alive.full):
        return bool(hang["step"])
    return hang["state"] != "starved" or bool(hang["wall"] > begun + _TWO_LOOKS)


def neighbour_dies_too(pace: str) -> Act:
    """Kill the main process in the moment in which the kernel kills a neighbour for memory."""

    def act(scene: Scene) -> None:
        scene.wait_ready()
        scene.wait_sidecar()
        neighbour = scene.neighbour("leak.py", "2", pace)
        Path(f"/proc/{neighbour.pid}/oom_score_adj").write_text("1000")  # it is the kernel's first choice
        (scene.folder / "neighbour" / "go").touch()
        while neighbour.poll() is None:
            time.sleep(0.0005)
        scene.kill(signal.SIGKILL)
        if neighbour.returncode != -signal.SIGKILL or scene.ground.oom_kills() != 1:
            raise StageError("the neighbour did not die as it should")

    return act


def neighbour_presses(scene: Scene) -> None:
    """A neighbour takes what is left of the group's memory; the kernel kills the largest, which is us."""
    scene.wait_ready()
    scene.wait_sidecar()
    scene.neighbour("leak.py", "1", "0.01")
    (scene.folder / "neighbour" / "go").touch()


def kill_recorder_then(number: int) -> Act:
    """Kill the recorder, then the main process."""

    def act(scene: Scene) -> None:
        scene.wait_ready()
        time.sleep(0.3)
        scene.kill(signal.SIGKILL, scene.wait_sidecar())
        scene.kill(number)

    return act


def kill_recorder_then_cue(scene: Scene) -> None:
    """Kill the recorder, then give the cue."""
    scene.wait_ready()
    time.sleep(0.3)
    scene.kill(signal.SIGKILL, scene.wait_sidecar())
    scene.say()


def kill_recorder_then_wait_then_cue(scene: Scene) -> None:
    """Kill the recorder, wait until `buoy run` has started another, then give the cue."""
    scene.wait_ready()
    first = scene.wait_sidecar()
    scene.kill(signal.SIGKILL, first)
    scene.wait_for(lambda: scene.sidecar() != first, "the recorder to be started again")
    scene.say()


def kill_everything(scene: Scene) -> None:
    """Kill launcher, recorder and main process, as the end of a container does."""
    scene.wait_ready()
    time.sleep(0.3)
    for pid in {scene.process.pid, scene.wait_sidecar(), scene.main} - {scene.main}:
        scene.kill(signal.SIGKILL, pid)
    scene.kill(signal.SIGKILL)


def kill_launcher_then_main(scene: Scene) -> None:
    """Kill `buoy run` itself; training continues, and dies later."""
    scene.wait_ready()
    scene.wait_sidecar()
    scene.kill(signal.SIGKILL, scene.process.pid)
    time.sleep(0.4)
    scene.kill(signal.SIGKILL)
    time.sleep(0.3)


def kill_server_then_main(scene: Scene) -> None:
    """Kill the server, and its kernel before that has looked for it."""
    scene.wait_ready()
    scene.wait_sidecar()
    scene.kill(signal.SIGKILL, scene.process.pid)
    scene.kill(signal.SIGKILL)


def judge_from_outside_then_kill(scene: Scene) -> None:
    """Ask why from outside its container while it runs, then kill it."""
    scene.wait_ready()
    time.sleep(0.5)
    scene.alive_verdict = judge_folder(scene.attempt_folder())
    scene.kill(signal.SIGKILL)


def lose_the_machine(scene: Scene) -> None:
    """Kill everything, then let the recording say that it was made in another boot."""
    kill_everything(scene)
    scene.process.wait(5)
    attempt = scene.attempt_folder()
    for name in ("exit.json", "death.json", "verdict.json"):
        (attempt / name).unlink(missing_ok=True)
    path = attempt / "attempt.json"
    found = json.loads(path.read_text())
    path.write_text(
        json.dumps({**found, "boot_id": "00000000-0000-4000-8000-000000000000", "pid1_start": 1.0})
    )


def lose_samples(act: Act, keep: float) -> Act:
    """Let it die, then copy its recording as a sync that broke off would: with this share of the samples, or none."""

    def acted(scene: Scene) -> None:
        act(scene)
        scene.wait_end()
        attempt = scene.attempt_folder()
        (attempt / "verdict.json").unlink()
        for path in attempt.glob("samples-*.jsonl"):
            data = path.read_bytes()
            path.write_bytes(data[: int(len(data) * keep)]) if keep else path.unlink()

    return acted


def limit_processes(scene: Scene) -> None:
    """Allow a few more processes, then give the cue."""
    scene.wait_ready()
    scene.wait_sidecar()
    scene.ground.limit_processes(more=8)
    scene.say()


def kill_rank(scene: Scene) -> None:
    """Kill the second rank of a distributed training."""
    scene.wait_ready()
    rank = scene.wait_word("ready-rank")
    time.sleep(0.2)
    scene.kill(signal.SIGKILL, rank)


_AT_A_LIMIT = 4.0
"""Seconds after a time limit in which it is kept."""


def kill_at_time_limit(seconds: float) -> Act:
    """Kill the main process when its session's time is over."""

    def act(scene: Scene) -> None:
        scene.wait_ready()
        attempt = json.loads((scene.attempt_folder() / "attempt.json").read_text())
        time.sleep(max(0.0, attempt["wall"] + seconds - time.time()))
        late = time.time() - attempt["session_started"] - seconds
        if (
            late > _AT_A_LIMIT
        ):  # on a crowded machine: whoever kills so late was no scheduler, and is not taken for one
            raise StageError(f"the kill came {late:.0f} s after the time limit")
        scene.kill(signal.SIGKILL)

    return act
