"""`buoy demo`: a training dies in a session made small for real, and the same one, guarded, does not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from buoy.cli.parser import Parser
from buoy.errors import UsageError, need_linux

_DESCRIPTION = "Show in a minute or two what buoy does, on this machine, with a small real training."


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    parser = Parser("buoy demo", "buoy demo [-o DIR]", _DESCRIPTION)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="keep the runs and the report there (default: a new temporary folder)",
    )
    chosen = parser.parse_args(arguments)
    need_linux("the demo needs")
    if chosen.output:
        return _tell(chosen.output)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = tempfile.mkdtemp(prefix="buoy-demo-")
    try:
        return _tell(folder)
    except BaseException:  # cut short, there is no report to keep
        shutil.rmtree(folder, ignore_errors=True)
        raise


_BUOY = [sys.executable, "-m", "buoy"]
_KILL_AT = 4
_PART = "80"
"""Samples at once where two runs are compared bit for bit: buoy would choose by what is free at that moment."""
_CLOSE = 1e-5


@dataclass
class Told:
    """What a training printed: its losses, a fingerprint of its weights, its memory."""

    code: int = 0
    before: int = 0
    peak: int = 0
    weights: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The loss of the last step."""
        return self.losses[max(self.losses)] if self.losses else float("nan")


def _tell(folder: str) -> int:
    """The whole story; 0 when it went as it should."""
    _needs_torch()
    _say("1. An ordinary training, with all the memory it wants")
    free = _run([sys.executable, "-m", "buoy.demo.training"])
    _say(f"   {len(free.losses)} steps, last loss {free.last:.6f}; {free.before} MiB before the first step,"
         f" {free.peak} MiB at its peak\n")  # fmt: skip
    session = Session(free.before + (free.peak - free.before) * 3 // 5)
    if not session.is_real:
        _say("   (No memory cgroup can be made here: a limit on the process's own memory stands in for it.)")
    try:
        right = _in_a_small_session(folder, session, free)
    finally:
        session.close()
    report = os.path.join(folder, "guarded", "report.html")
    subprocess.run([*_BUOY, "report", os.path.join(folder, "guarded"), "-o", report], check=False)
    _say(
        "\nIn short: it died, and buoy said why; guarded, it did not."
        if right
        else "\nThe demo did not go as expected."
    )
    return 0 if right else 1


def _in_a_small_session(folder: str, session: Session, free: Told) -> bool:
    _say(f"2. The same in a session of {session.mib} MiB: `buoy run -- python plain.py`")
    died = _supervised(folder, "plain", [], session)
    _say(f"   It ended with exit code {died.code} after {len(died.losses)} steps.\n")

    _say("3. The same session, guarded: `run.backward(batch, loss)` makes each step fit")
    guarded = _supervised(folder, "whole", [os.path.join(folder, "whole")], session)
    apart = abs(guarded.last - free.last)
    _say(f"   {len(guarded.losses)} steps, last loss {guarded.last:.6f}, {apart:.1e} from the one with all the memory;"
         f" {guarded.peak} MiB at its peak\n")  # fmt: skip

    _say(f"4. Guarded again, in micro-batches of {_PART}: once undisturbed, once killed with SIGKILL after step"
         f" {_KILL_AT}; `--restart 1` resumes automatically")  # fmt: skip
    peace, run = os.path.join(folder, "peace"), os.path.join(folder, "guarded")
    whole = _supervised(folder, "peace", [peace, _PART], session)
    killed = _supervised(folder, "guarded", [run, _PART], session, "--restart", "1", kill=_KILL_AT)
    same = bool(whole.weights) and killed.weights == whole.weights and killed.losses == whole.losses
    _say(f"   {len(killed.pids)} attempts, {len(killed.losses)} steps, weights {killed.weights} and {whole.weights}:"
         f" {'the same bit for bit' if same else 'NOT the same'}")  # fmt: skip
    return died.code != 0 and guarded.code == 0 and apart <= _CLOSE and len(killed.pids) == 2 and same


def _supervised(
    folder: str, name: str, arguments: list[str], session: Session, *options: str, kill: int | None = None
) -> Told:
    run = os.path.join(folder, name)
    command = [
        *_BUOY,
        "run",
        "--run",
        run,
        *options,
        "--",
        sys.executable,
        "-m",
        "buoy.demo.training",
        *arguments,
    ]
    return _run(command, session.enter, kill)


def _run(command: list[str], enter: Callable[[], None] | None = None, kill: int | None = None) -> Told:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    try:
        return _heard(process, kill)
    except BaseException:  # the demo is ended: so is what it started
        process.terminate()
        process.wait()
        raise


def _heard(process: subprocess.Popen[str], kill: int | None) -> Told:
    told = Told()
    assert process.stdout is not None
    for line in process.stdout:
        word, *values = line.split()
        if word == "step":
            told.losses[int(values[0])] = float(values[1])
            if kill == int(values[0]) and len(told.pids) == 1:
                os.kill(told.pids[0], signal.SIGKILL)
        elif word == "pid":
            told.pids.append(int(values[0]))
        elif word == "weights":
            told.weights = values[0]
        elif word in ("before", "peak"):
            setattr(told, word, int(values[0]))
    told.code = process.wait()
    return told


def _needs_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError(
            "the demo trains a small PyTorch model, and PyTorch is not installed",
            expected="`import torch` works",
            hint="`pip install torch`",
        )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


_PLACES = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


class Session:
    """So many MiB for whatever enters. `is_real`: the kernel's own limit, not a stand-in."""

    def __init__(self, mib: int) -> None:
        self.mib = mib
        self._group = _make_group(mib)
        self.is_real = self._group is not None

    def enter(self) -> None:
        """Confine the calling process and what it starts."""
        if self._group is not None:
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            import resource  # not on Windows, where `buoy demo` says what it needs

            resource.setrlimit(resource.RLIMIT_DATA, (self.mib << 20, self.mib << 20))

    def close(self) -> None:
        """Give it back; what has just ended in it may need a moment to leave."""
        for _ in range(50):
            try:
                if self._group is not None:
                    self._group.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def _make_group(mib: int) -> Path | None:
    for parent, limit in _PLACES:
        group = Path(parent) / f"buoy-demo-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(mib << 20))
            return group
        except OSError:
            group.rmdir()
    return None
