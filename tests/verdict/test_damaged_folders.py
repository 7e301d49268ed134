"""Whatever happens to the files: an answer, and never a certainty that its evidence does not carry."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from folders import CHILD, PID, Attempt, exited, note, oom_line

from buoy.verdict import settle
from buoy.verdict.evidence import load
from buoy.verdict.judge import judge
from buoy.view.verdict import CONCISE_LINES, FULL_LINES, render

ODD = [
    None,
    0,
    -1,
    9,
    1e300,
    float("nan"),
    "",
    "x" * 3000,
    "\x1b[31m\n\x00",
    [],
    [1, {}],
    {},
    {"raw": "9"},
    True,
]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, chance: random.Random) -> None:
    """Delete, cut, overwrite or scramble one file; JSON keeps its shape and loses its sense."""
    data = path.read_bytes()
    kind = chance.choice(["delete", "cut", "garbage", "values", "flip"])
    if kind == "delete":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif kind == "garbage":
        path.write_bytes(chance.randbytes(chance.randrange(5000)))
    elif kind == "flip" and data:
        scrambled = bytearray(data)
        for _ in range(chance.randrange(1, 30)):
            scrambled[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(scrambled)
    elif path.suffix in (".json", ".jsonl"):
        lines = [json.dumps(scramble(json.loads(line), chance)) for line in data.decode().splitlines()]
        path.write_text("\n".join(lines) + "\n")


def scramble(value: object, chance: random.Random) -> object:
    if chance.random() < 0.12:
        return chance.choice(ODD)
    if isinstance(value, dict):
        return {key: scramble(item, chance) for key, item in value.items()}
    if isinstance(value, list):
        return [scramble(item, chance) for item in value]
    return value


def rich(attempt: Attempt, seed: int) -> Attempt:
    """A folder with something in every file, of a kind that depends on the seed."""
    chance = random.Random(seed)
    attempt.exit = {"t": 1600.0, "wall": 0.0, "pid": PID, "status": chance.choice([9, 15, exited(1), exited(137)]),
                    "rusage": {"utime": 1.0, "stime": 1.0}, "forwarded": []}  # fmt: skip
    attempt.death["status"]["raw"] = attempt.exit["status"]
    attempt.death["gpu"] = [{"index": 0, "name": "T4", "used": 1, "total": 2, "util": 3}]
    attempt.child_death(9, kernel_log=[oom_line(CHILD)])
    attempt.event("hang", before=30, step=3, age=3.0, cpu_share=0.1, threads=[{"tid": 1, "state": "D"}])
    attempt.event("warning", before=10, alarm=chance.choice(["ram", "thrashing"]), text="careful", values={})
    attempt.event("signal", before=2, signal="SIGTERM", from_pid=4)
    attempt.event("save", before=60, path="ck/last.pt", pid=PID, what="torch.save")
    stack = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n'
    words = note(
        "builtins.RuntimeError", f"DataLoader worker (pid(s) {CHILD}) exited", ("builtins.RuntimeError",)
    )
    attempt.process(
        PID, chance.choice([None, words, {"kind": "exit"}]), fault=(stack, 1.0), SIGTERM=(stack, 3.0)
    )
    return attempt


@pytest.mark.parametrize("seed", range(150))
def test_any_damage_leaves_an_answer_that_can_be_shown(attempt: Attempt, seed: int) -> None:
    chance = random.Random(1000 + seed)
    folder = rich(attempt, seed).write()
    for path in chance.sample(files_of(folder), chance.randrange(1, 6)):
        damage(path, chance)
    for evidence in (
        load(str(folder)),
        load(str(folder)).without("notes-only"),
        load(str(folder)).without("old-kernel"),
    ):
        verdict = judge(evidence)

        assert len(render(verdict).splitlines()) <= FULL_LINES
        assert len(render(verdict, "concise").splitlines()) <= CONCISE_LINES
        assert "\x1b" not in render(verdict)
        assert json.loads(json.dumps(verdict.to_json()))["schema"] == "buoy.verdict/1"


@pytest.mark.parametrize("seed", range(100))
def test_damage_never_makes_a_kernel_oom_certain(attempt: Attempt, seed: int) -> None:
    """The true death is somebody's SIGKILL, with unchanged counters: no loss of evidence may turn that into proof."""
    chance = random.Random(2000 + seed)
    folder = attempt.write()
    for path in files_of(folder):
        if chance.random() < 0.4:
            data = path.read_bytes()
            path.write_bytes(
                data[: chance.randrange(len(data) + 1)]
            ) if chance.random() < 0.5 else path.unlink()
    verdict = judge(load(str(folder)))

    assert verdict.cause.id != "kernel-oom"
    if verdict.cause.claim.grade == "certain":
        assert verdict.cause.id in ("killed", "recorder-lost")


@pytest.mark.parametrize("lost", ["attempt.json", "death.json", "events.jsonl", "samples-0001.jsonl"])
def test_each_file_can_be_missing_after_an_oom_kill(attempt: Attempt, lost: str) -> None:
    """Without attempt.json nobody knows whether the kernel log's pids are ours; without death.json nothing is known."""
    attempt.oom_killed()
    folder = attempt.write()
    (folder / lost).unlink()
    verdict = judge(load(str(folder)))

    expected = {"death.json": ("recorder-lost", "certain"), "attempt.json": ("kernel-oom", "likely")}.get(
        lost, ("kernel-oom", "certain")
    )
    assert (verdict.cause.id, verdict.cause.claim.grade) == expected


def test_settle_writes_a_whole_verdict(attempt: Attempt) -> None:
    attempt.oom_killed()
    folder = attempt.write()
    verdict = settle(str(folder))
    written = json.loads((folder / "verdict.json").read_text())

    assert written == json.loads(json.dumps(verdict.to_json()))
    assert written["cause"]["id"] == "kernel-oom"
    assert [path.name for path in folder.iterdir() if path.suffix == ".part"] == []


def test_without_a_record_of_who_the_training_was_nobody_is_said_to_have_ended_first(tmp_path: Path) -> None:
    """The only process that left words is the training itself, as far as anyone knows."""
    attempt = Attempt(tmp_path)
    attempt.raises("builtins.ValueError", "no such label")
    folder = attempt.write()
    for name in ("attempt.json", "death.json"):
        (folder / name).write_text('{"sche')
    verdict = judge(load(str(folder)))

    assert verdict.cause.id == "python-exception" and verdict.cause.claim.grade != "certain"
    assert "ended first" not in render(verdict)


def test_samples_that_were_not_copied_are_missed_and_no_story_is_made_of_the_rest(attempt: Attempt) -> None:
    """Without them the readings from after the death would look like an allocation out of nowhere."""
    attempt.oom_killed()
    attempt.death["cgroup"]["used"] = 5 << 20
    folder = attempt.write()
    lines = (folder / "samples-0001.jsonl").read_text().splitlines(keepends=True)
    whole = render(judge(load(str(folder))))
    told = []
    for rest in (lines[:-6], lines[:1], []):
        (folder / "samples-0001.jsonl").write_text("".join(rest))
        told.append(render(judge(load(str(folder)))))

    assert "samples are missing" not in whole
    assert "the newest is from 0.7 s before the end" in " ".join(told[0].split())
    for text in told:
        assert "samples are missing from this folder" in text
        assert "sudden allocation" not in text and "memory last seen" not in text
    assert "there is none" in told[1] and "there is none" in told[2]


def test_a_kill_that_was_counted_is_only_possibly_this_one_without_the_samples(attempt: Attempt) -> None:
    """They would tell whether it had been counted long before."""
    attempt.oom_killed(named=False)
    attempt.death["processes"][0]["rss"] = attempt.death["cgroup"]["limit"]
    folder = attempt.write()
    (folder / "samples-0001.jsonl").unlink()
    verdict = judge(load(str(folder)))

    assert (verdict.cause.id, verdict.cause.claim.grade) == ("kernel-oom", "possible")


def test_a_recorder_that_never_took_a_sample_misses_none(attempt: Attempt) -> None:
    attempt.samples, attempt.death["last"] = [], None

    assert "samples are missing" not in render(attempt.verdict())
