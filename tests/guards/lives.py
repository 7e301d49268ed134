"""Lives of trainings, each in a fork of one process that has the library loaded; and what must be true of them.

`python -m tests.guards.lives MODULE FOLDER` reads requests from stdin, one JSON value a line:
["resume", name, [steps at which it is killed]] or ["check", name]; and answers each in one line.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buoy.errors import BuoyError
from tests.processes import Answers, answers

if TYPE_CHECKING:
    import torch


def ask_guard(
    library: str, folder: Path, kills: dict[str, list[int]], checks: list[str]
) -> AbstractContextManager[Answers]:
    """The answers of a guard's lives."""
    questions = {name: ["resume", name, steps] for name, steps in kills.items()}
    questions |= {name: ["check", name] for name in checks}
    return answers(questions, "tests.guards.lives", f"tests.guards.{library}_lives", str(folder))


def assert_goes_on(result: dict[str, Any], kills: list[int]) -> None:
    """Killed with SIGKILL at these steps, it gave in each step, to the last bit, what it gives in one life."""
    assert result["killed"] == [False, *(True for _ in kills), False], result["said"]
    assert result["ended"], result["said"]
    assert result["resumed"] == len(kills), result["said"]
    assert result["steps"] >= max(kills)
    assert result["differ"] == [], result["said"]
    assert result["unlike"] == [], result["said"]


class Stage:
    """What a training is given: a folder, which life this is, and where to write what it did."""

    def __init__(self, folder: str, kill_at: int | None, life: int) -> None:
        self.folder = folder
        self.life = life
        self._kill_at = kill_at

    def log(self, step: int | str, *values: object) -> None:
        """Note what a step gave; the life ends here if this is the step at which it is to be killed."""
        with open(f"{self.folder}.log", "a", encoding="utf-8") as file:
            file.write(f"{step} {json.dumps(values)}\n")
        if step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def refusal(attempt: Callable[[], object]) -> str:
    """In which words it was refused."""
    try:
        attempt()
    except BuoyError as error:
        return str(error)
    return "nothing was refused"


def fingerprint(*modules: torch.nn.Module) -> str:
    """Every bit of some weights."""
    return " ".join(
        value.detach().double().sum().item().hex() for each in modules for value in each.state_dict().values()
    )


def live(folder: str, work: Callable[[], None]) -> int:
    """One life in a process of its own; its wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        said = os.open(f"{folder}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def read(path: str) -> tuple[dict[str, str], list[str]]:
    """What each step gave, and the steps that gave something else when they were done again."""
    steps: dict[str, str] = {}
    unlike: list[str] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            step, _, words = line.rstrip("\n").partition(" ")
            if steps.setdefault(step, words) != words:
                unlike.append(step)
    return steps, unlike


def _said(folder: str) -> str:
    with open(f"{folder}.said", encoding="utf-8") as file:
        return file.read()


def resume(training: Callable[[Stage], None], name: str, folder: str, kills: list[int]) -> dict[str, Any]:
    """Run it whole, run it with kills, and compare."""
    started = time.monotonic()
    whole, cut = os.path.join(folder, f"{name}-whole"), os.path.join(folder, f"{name}-cut")
    statuses = [live(whole, lambda: training(Stage(whole, None, 0)))]
    for life, kill_at in enumerate([*kills, None]):
        stage = Stage(cut, kill_at, life)
        statuses.append(live(cut, lambda stage=stage: training(stage)))  # type: ignore[misc]
    expected, _ = read(f"{whole}.log")
    got, unlike = read(f"{cut}.log")
    said = _said(cut)
    return {
        "killed": [os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL for status in statuses],
        "ended": statuses[0] == statuses[-1] == 0,
        "steps": len(expected),
        "differ": [step for step in expected if got.get(step) != expected[step]],
        "unlike": unlike,
        "resumed": said.count("resumed from step"),
        "said": said[-3000:],
        "seconds": time.monotonic() - started,
    }


def check(work: Callable[[str], Any], name: str, folder: str) -> dict[str, Any]:
    """Run a function in a fork; what it returned, as JSON has it."""
    place = os.path.join(folder, name)

    def write() -> None:
        made = work(place)
        with open(f"{place}.json", "w", encoding="utf-8") as file:
            json.dump(made, file)

    status = live(place, write)
    try:
        with open(f"{place}.json", encoding="utf-8") as file:
            made = json.load(file)
    except OSError:
        made = None
    return {"status": status, "made": made, "said": _said(place)[-20000:]}


def two_processes(folder: str, work: Callable[[int], str]) -> list[str]:
    """What two ranks return, in the environment that torchrun gives them."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    pids = []
    for rank in (0, 1):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        try:
            signal.alarm(60)
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
                MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="lives",
            )  # fmt: skip
            with open(f"{folder}.rank{rank}", "w", encoding="utf-8") as file:
                file.write(work(rank))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    answers = []
    for rank in (0, 1):
        with open(f"{folder}.rank{rank}", encoding="utf-8") as file:
            answers.append(file.read())
    return answers


def main() -> None:
    import torch

    torch.set_num_threads(1)
    module, folder = import_module(sys.argv[1]), sys.argv[2]
    for line in sys.stdin:
        kind, name, *rest = json.loads(line)
        if kind == "resume":
            answer = resume(module.TRAININGS[name], name, folder, *rest)
        else:
            answer = check(module.CHECKS[name], name, folder)
        print(json.dumps({"name": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
