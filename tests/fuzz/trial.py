"""One mutant: damaged in a copy, then read by every verb in a forked process that is watched.

`python -m tests.fuzz.trial KIND BASE ROOM SEED FIRST LAST` prints a JSON line for each.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.fuzz import mutants
from tests.fuzz.ground import ENDS, EVENTS, add_events

KINDS = ("run", "checkpoint", "mirror", "notebook")
PATIENCE = 90.0
"""Seconds of the clock for all verbs on one mutant: the machine may be busy."""
MOST_BYTES = 200 << 20
_ADDRESSES = 3 << 30
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RESUMES = {"run": 4, "checkpoint": 2, "mirror": 3}
"""A training goes on from every n-th of them."""
_COMMAND_LINES = 40
"""Every n-th goes through the command line in a process of its own."""

Problem = dict[str, object]


def run_trial(kind: str, base: Path, room: Path, seed: str) -> dict[str, Any]:
    """Damage a copy, let every verb read it; what went wrong."""
    chance = random.Random(seed)
    room = Path(
        tempfile.mkdtemp(prefix="mutant-", dir=room)
    )  # what the one before left running writes elsewhere
    done = _PREPARE[kind](base, room, chance)
    started = time.monotonic()
    answer = _watched(lambda: _verbs(kind, room, chance), room)
    shutil.rmtree(room, ignore_errors=True)
    return {
        "kind": kind,
        "seed": seed,
        "done": done,
        "seconds": round(time.monotonic() - started, 3),
        **answer,
    }


def _prepare_run(base: Path, room: Path, chance: random.Random) -> str:
    run = room / "runs" / "cats"
    shutil.copytree(base / "runs" / chance.choice(ENDS), run)
    shutil.copytree(base / "runs" / "finish", room / "runs" / "healthy")
    attempt = run / "attempts" / "0001"
    for name in ("verdict.json", "death.json", "exit.json") if chance.random() < 0.4 else ():
        if chance.random() < 0.6:
            (attempt / name).unlink()
    if chance.random() < 0.6:
        add_events(attempt, chance.sample(EVENTS, chance.choice((1, 2, 4, len(EVENTS)))))
    files = [path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    done = [_damage(run, files, chance)]
    while chance.random() < 0.4:
        done += [_damage(run, left, chance)] if (left := [path for path in files if path.is_file()]) else []
    return "; ".join(done)


def _prepare_checkpoint(base: Path, room: Path, chance: random.Random) -> str:
    run = room / "runs" / "cats"
    shutil.copytree(base / "runs" / chance.choice(ENDS), run)
    return _damage_checkpoints(run, chance)


def _prepare_mirror(base: Path, room: Path, chance: random.Random) -> str:
    shutil.copytree(base / "mirror" / chance.choice(ENDS), room / "mirror" / "cats")
    if chance.random() < 0.6:
        return _damage_checkpoints(room / "mirror" / "cats", chance)
    files = [path for path in (room / "mirror" / "cats").rglob("*") if path.is_file()]
    return _damage(room / "mirror" / "cats", files, chance)


def _prepare_notebook(base: Path, room: Path, chance: random.Random) -> str:
    path = chance.choice(sorted((base / "notebooks").iterdir()))
    here = room / path.name
    shutil.copy(path, here)
    if chance.random() < 0.08:
        here = here.rename(
            room / chance.choice((f"a{mutants.ESCAPE}.py", "a\n::error::PWNED.ipynb", "caf\udce9.py"))
        )
    if chance.random() < 0.1:
        return f"{here.name!a}: {mutants.replace_file(here, chance)}"
    return f"{here.name!a}: {mutants.mutate_file(here, chance)}"


def _damage_checkpoints(run: Path, chance: random.Random) -> str:
    checkpoints = run / "checkpoints"
    folders = sorted(checkpoints.glob("step-*"), reverse=True)
    chosen = folders if chance.random() < 0.3 else folders[: chance.choice((1, 1, 2))]
    done = []
    for folder in chosen:
        if chance.random() < 0.6:
            done.append(f"{folder.name}: {mutants.forge(folder, chance)}")
        else:
            files = [path for path in folder.iterdir() if path.is_file()]
            done.append(_damage(checkpoints, files, chance))
    return "; ".join(done)


def _damage(top: Path, files: list[Path], chance: random.Random) -> str:
    how = chance.random()
    files = sorted(files)
    (path,) = chance.choices(files, [6 if other.suffix in (".json", ".jsonl", "") else 1 for other in files])
    name = path.relative_to(top)
    if how < 0.2:
        return f"{name}: {mutants.replace_file(path, chance)}"
    if how < 0.27:
        folders = sorted(
            {
                above
                for other in files
                for above in (other.parent, other.parent.parent)
                if top in above.parents
            }
        )
        folder = chance.choice(folders or [top])
        return f"in {folder.relative_to(top)}: {mutants.add_odd_name(folder, chance)}"
    if how < 0.3:
        return f"{path.parent.relative_to(top)}: {mutants.replace_file(path.parent, chance)}"
    return f"{name}: {mutants.mutate_file(path, chance)}"


_PREPARE: dict[str, Callable[[Path, Path, random.Random], str]] = {
    "run": _prepare_run,
    "checkpoint": _prepare_checkpoint,
    "mirror": _prepare_mirror,
    "notebook": _prepare_notebook,
}


def _watched(work: Callable[[], list[Problem]], room: Path) -> dict[str, Any]:
    """Do it in a forked process with limits: its problems, its most memory above what it began with, its CPU time."""
    answer, output = room / "answer.json", room / "output.txt"
    child = os.fork()
    if not child:
        _child(work, room, answer, output)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.002)
    else:
        os.killpg(child, signal.SIGKILL)
        os.wait4(child, 0)
        return {
            "problems": [{"what": "hang", "detail": output.read_text(errors="replace")[-2000:]}],
            "bytes": 0,
        }
    try:
        told = json.loads(answer.read_text())
    except (OSError, ValueError):
        detail = f"status {status}: {output.read_text(errors='replace')[-2000:]}"
        return {"problems": [{"what": "died", "detail": detail}], "bytes": 0}
    if told["bytes"] > MOST_BYTES:
        told["problems"].append({"what": "memory", "detail": f"{told['bytes'] >> 20} MiB"})
    return {**told, "cpu": round(usage.ru_utime + usage.ru_stime, 3)}


def _child(work: Callable[[], list[Problem]], room: Path, answer: Path, output: Path) -> None:
    try:
        os.setpgid(0, 0)
        with open(output, "wb") as file, open(os.devnull, "rb") as nothing:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.dup2(nothing.fileno(), 0)
        os.chdir(room)
        before = _memory("VmRSS")
        addresses = _memory("VmSize") + _ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
        Path("/proc/self/clear_refs").write_text("5")  # the most that is counted begins here
        problems = work()
        told = output.read_text(errors="replace")
        if "Traceback (most recent call last)" in told:
            problems.append({"what": "traceback", "verb": "a process below", "detail": told[-3000:]})
        answer.write_text(json.dumps({"problems": problems, "bytes": max(0, _memory("VmHWM") - before)}))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _verbs(kind: str, room: Path, chance: random.Random) -> list[Problem]:
    by_command = chance.randrange(_COMMAND_LINES) == 0
    before = _snapshot(room)
    problems: list[Problem] = []
    for words in _WORDS[kind](room):
        problems += _judge(words, *(_through_command(words) if by_command else _in_process(words)))
    gone = [name for name, found in before.items() if _snapshot(room).get(name) != found]
    if gone:
        problems.append({"what": "changed", "detail": str(gone[:5])})
    if kind == "run":
        problems += _guarded("why in a notebook", lambda: _card(room))
    if kind in ("run", "checkpoint") and chance.randrange(_RESUMES[kind]) == 0:
        problems += _resume(room, None)
    if kind == "mirror" and chance.randrange(_RESUMES[kind]) == 0:
        problems += _resume(room, str(room / "mirror"))
    return problems


def _snapshot(room: Path) -> dict[str, tuple[int, int]]:
    """What is there, so that a verb that only reads can be seen to do so."""
    found = {}
    for top in ("runs", "mirror"):
        for folder, _, files in os.walk(room / top):
            for name in files:
                status = os.lstat(os.path.join(folder, name))
                found[os.path.relpath(os.path.join(folder, name), room)] = (
                    status.st_size,
                    status.st_mtime_ns,
                )
    return {name: value for name, value in found.items() if not name.endswith("/lock")}


def _run_words(room: Path) -> list[list[str]]:
    run = "runs/cats"
    return [
        ["why", run], ["why", run, "--format", "concise"], ["why", run, "--format", "json"], ["why"],
        ["top", run, "--once"], ["top", run, "--format", "json"],
        ["runs"], ["runs", "--format", "json"], ["runs", "rm", run],
        ["report", run, "-o", "page.html"], ["report", run, "--format", "json"],
        ["ckpt", "list", run],
    ]  # fmt: skip


def _checkpoint_words(room: Path) -> list[list[str]]:
    run = "runs/cats"
    return [
        ["ckpt", "list", run], ["ckpt", "list", run, "--format", "json"],
        ["ckpt", "show", run], ["ckpt", "show", run, "--format", "json"],
        ["ckpt", "verify", run], ["ckpt", "verify", run, "--format", "json"],
        ["ckpt", "export", run, "-o", "weights.safetensors"], ["ckpt", "prune", run, "--keep", "1"],
        ["runs"], ["top", run, "--once"], ["report", run, "-o", "page.html"], ["why", run],
    ]  # fmt: skip


def _mirror_words(room: Path) -> list[list[str]]:
    return [
        ["ckpt", "restore", "mirror/cats", "--to", "back"],
        ["ckpt", "restore", "mirror/cats", "20", "--to", "back-json", "--format", "json"],
        ["runs", "mirror"], ["why", "mirror/cats"], ["report", "mirror/cats", "-o", "page.html"],
        ["ckpt", "list", "mirror/cats"],
    ]  # fmt: skip


def _notebook_words(room: Path) -> list[list[str]]:
    formats = ("full", "concise", "json", "github", "sarif")
    return [
        *(["check", ".", "--select", "all", "--format", one] for one in formats),
        ["check", ".", "--diff"],
    ]


_WORDS: dict[str, Callable[[Path], list[list[str]]]] = {
    "run": _run_words,
    "checkpoint": _checkpoint_words,
    "mirror": _mirror_words,
    "notebook": _notebook_words,
}


def _in_process(words: list[str]) -> tuple[int | str, str, str]:
    from buoy.cli import main

    output, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            code: int | str = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = traceback.format_exc()
    return code, output.getvalue(), errors.getvalue()


def _through_command(words: list[str]) -> tuple[int | str, str, str]:
    done = subprocess.run([sys.executable, "-m", "buoy", *words], capture_output=True, check=False)
    texts = [stream.decode("utf-8", "surrogateescape") for stream in (done.stdout, done.stderr)]
    trace = re.search(r"Traceback \(most recent call last\).*", texts[1], re.DOTALL)
    return trace[0] if trace is not None else done.returncode, texts[0], texts[1]


def _judge(words: list[str], code: int | str, output: str, errors: str) -> list[Problem]:
    verb = " ".join(words)
    if isinstance(code, str):
        return [{"what": "traceback", "verb": verb, "detail": code[-3000:]}]
    found: list[Problem] = []
    if code not in (0, 1, 2):
        found.append({"what": "exit", "verb": verb, "detail": f"{code}: {errors[-500:]}"})
    for text in (output, errors):
        control = _CONTROL.search(text) if "--diff" not in words else None  # a patch is exact, byte for byte
        if control is not None:
            near = text[max(0, control.start() - 60) : control.end() + 60]
            found.append({"what": "escape", "verb": verb, "detail": repr(near)})
        if re.search(r"^::error::PWNED", text, re.MULTILINE):
            at = text.index("::error::PWNED")
            found.append({"what": "injected", "verb": verb, "detail": repr(text[max(0, at - 80) : at + 20])})
    if "json" in words or "sarif" in words:
        try:
            json.loads(output or "null", parse_constant=_refuse)
        except ValueError as error:
            found.append({"what": "json", "verb": verb, "detail": f"{error}: {output[:200]}"})
    if code == 2 and len(errors.rstrip("\n").split("\n")) > 12:
        found.append({"what": "words", "verb": verb, "detail": errors[:600]})
    if words == ["runs"] and Path("runs/healthy").is_dir() and "runs/healthy" not in output:
        found.append({"what": "hidden", "verb": verb, "detail": output[:600] + errors[:600]})
    if "this run cannot be read" in output or ("failed:" in output and "BY000" in output):
        found.append({"what": "traceback", "verb": verb, "detail": output[:800]})
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _guarded(verb: str, work: Callable[[], object]) -> list[Problem]:
    from buoy.errors import BuoyError

    try:
        work()
    except BuoyError:
        pass
    except BaseException:
        return [{"what": "traceback", "verb": verb, "detail": traceback.format_exc()[-3000:]}]
    return []


def _card(room: Path) -> None:
    import buoy

    card = buoy.why("runs/cats")._repr_html_()
    card.encode()


def _resume(room: Path, mirror: str | None) -> list[Problem]:
    """A training that goes on with it: from there, from an older one, or refused in words; nothing is lost."""
    checkpoints = room / ("mirror" if mirror else "runs") / "cats" / "checkpoints"
    before = {
        name: found for name, found in _snapshot(checkpoints.parent.parent.parent).items() if "/step-" in name
    }
    told: list[str] = []
    problems = _guarded("resume", lambda: _train(room, mirror, told))
    left = _snapshot(checkpoints.parent.parent.parent)
    gone = [name for name, found in before.items() if left.get(name) != found]
    if gone and not told:  # nobody was told that the training goes on: then nothing may be tidied up
        problems.append({"what": "lost", "verb": "resume", "detail": str(gone[:5])})
    return problems


def _train(room: Path, mirror: str | None, told: list[str]) -> None:
    import torch

    import buoy

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    history = {"losses": [], "seen": {1, 2}, "name": "cats", "best": float("inf"), "last": (1, 2)}
    run = buoy.Run(str(room / "runs" / "cats"), mirror=mirror)
    try:
        run.track(model=model, optimizer=optimizer, history=history)
        data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(10)]
        for _ in run.epochs(4):
            for batch in run.batches(data):
                run.backward(batch, lambda part: torch.nn.functional.mse_loss(model(part[0]), part[1]))
                optimizer.step()
                optimizer.zero_grad()
                told.append("a step")
                if len(told) == 2:
                    return
    finally:
        run.__exit__(None, None, None)


def load(kind: str) -> None:
    """Import what the verbs need, once and before the forks."""
    if kind != "notebook":
        import torch

        torch.set_num_threads(1)
    import buoy.cli.check
    import buoy.cli.ckpt
    import buoy.training.run
    import buoy.verdict.judge
    import buoy.view.report  # noqa: F401

    os.environ["BUOY_NO_PROGRESS"] = "1"


def main() -> int:
    """Try mutants of one kind, from the first number to the last."""
    kind, base, room, seed, first, last = sys.argv[1:]
    load(kind)
    Path(room).mkdir(parents=True, exist_ok=True)
    for number in range(int(first), int(last)):
        found = run_trial(kind, Path(base), Path(room), f"{seed} {kind} {number}")
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
