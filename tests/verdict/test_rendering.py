"""How a verdict looks, for every cause, and what `buoy why` returns."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from folders import CHILD, DIED_T, DIED_WALL, GIB, PID, START_T, Attempt, exited, note, oom_line

from buoy.cli import main
from buoy.verdict.causes import IN_ORDER
from buoy.verdict.model import Verdict
from buoy.view.verdict import CONCISE_LINES, FULL_LINES, render, terminal_width

DOCS = Path(__file__).parents[2] / "docs" / "verdicts.md"
LONG = "/a/very/long/folder/" * 8 + "file.py"
STALLS = {"starved": "starved", "waiting": "network"}
"""What `hang` also names: the cause, and the state of the threads that makes it so."""
CAUSES = sorted(
    [
        *STALLS,
        *(
            judge.__name__.removeprefix("judge_").replace("_", "-")
            for judge in IN_ORDER
            if judge.__name__ not in ("judge_relayed", "judge_child", "judge_damaged")
        ),
    ]
)


def staged(attempt: Attempt, cause: str) -> Verdict:
    """A death of this cause with everything as long and as many as it gets."""
    status = {"terminated": 15, "hangup": 1, "interrupted": 2, "other-signal": 12, "native-crash": 11, "bus-error": 7,
              "file-size-limit": 25, "clean-exit": exited(0), "exit-code": exited(137)}.get(cause)  # fmt: skip
    if status is not None:
        attempt.death["status"]["raw"] = status
    attempt.attempt["command"] = ["python", LONG, *["--option", "x" * 50] * 5]
    attempt.event("save", before=60, path=LONG, pid=PID, what="torch.save")
    attempt.event("warning", before=50, alarm="ram", text="RAM " + "grows " * 40, values={})
    attempt.event("warning", before=40, alarm="thrashing", text="slow " * 40, values={})
    attempt.event("hang", before=30, step=120, age=20.0, cpu_share=0.0, threads=[], idle=True)
    place = {"file": LONG, "line": 31, "function": "f" * 60}
    raising = {
        "memory-error": ("builtins.MemoryError", "Unable to allocate 745. GiB for an array"),
        "gpu-oom": (
            "torch.OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB. " + "more " * 99,
        ),
        "gpu-fault": ("torch.AcceleratorError", "CUDA error: device-side assert triggered " + "more " * 99),
        "disk-full": ("tensorflow.errors.X", "No space left on device " + "more " * 99),
        "shm-full": ("torch.X", "unable to allocate shared memory(shm) " + "more " * 99),
        "open-files": ("torch.X", "Too many open files " + "more " * 99),
        "process-limit": ("torch.X", "can't start new thread"),
        "distributed": ("torch.X", "gloo/transport " + "more " * 99),
        "python-exception": ("builtins.KeyError", "more " * 99),
    }
    if cause in raising:
        attempt.raises(*raising[cause], filename=LONG, where=place)
        attempt.child_death(9, before=1.0)
    if cause == "kernel-oom":
        attempt.oom_killed()
        attempt.process(PID, SIGTERM=("Current thread\n" + f'  File "{LONG}", line 3 in g\n', 5.0))
        attempt.death["processes"] += [
            {"pid": n, "name": "worker " * 20, "role": "child", "rss": GIB} for n in range(8)
        ]
    if cause == "worker-killed":
        attempt.raises(
            "builtins.RuntimeError",
            f"DataLoader worker (pid(s) {CHILD}) exited unexpectedly",
            ("builtins.RuntimeError",),
        )
        attempt.child_death(9, name="w" * 200, kernel_log=[oom_line(CHILD)])
    if cause == "cpu-limit":
        attempt.death["cpu"] = {"used": 60.0, "soft_limit": 60, "hard_limit": 60}
    if cause == "parent-lost":
        attempt.death["status"]["raw"] = exited(1)
        attempt.attempt["command"] = ["python", "ipykernel_launcher.py"]
        attempt.event("parent-death", before=1, pid=CHILD, name="jupyter " * 30, status=9, awaited=True)
    if cause == "time-limit":
        attempt.attempt["time_limit"] = 600.0
    if cause in ("recorder-lost", "machine-lost"):
        attempt.death = None
    if cause == "machine-lost":
        attempt.attempt["boot_id"] = "00000000-0000-0000-0000-000000000000"
    if cause in ("still-running", "hang", "thrashing", *STALLS):
        attempt.alive()
        kind = "warning" if cause == "thrashing" else "hang" if cause in STALLS else cause
        attempt.events = [
            {**event, "state": STALLS.get(cause, "blocked"), "waits": "is writing to " + LONG, "network": 1e9,
             "delayed": 0.97, "quota": 0.0123}
            for event in attempt.events if event["kind"] == kind
        ]  # fmt: skip
    if cause == "unknown":
        attempt.death["status"] = {"raw": None, "source": None}
        attempt.events = attempt.events[:1]
    return attempt.verdict()


def fits(line: str, width: int) -> bool:
    """Whether a line keeps to the width; a command that is longer is not broken, as it could not be pasted then."""
    words = line.strip().removeprefix("next").strip().removeprefix("hint:").strip().lstrip("123. ")
    return len(line) <= width or (words.startswith("`") and line.count("`") % 2 == 0)


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_fits_its_lines_and_says_what_to_do(attempt: Attempt, cause: str) -> None:
    verdict = staged(attempt, cause)
    full, concise = render(verdict), render(verdict, "concise")

    assert verdict.cause.id == cause
    assert len(full.splitlines()) <= FULL_LINES
    assert len(concise.splitlines()) <= CONCISE_LINES
    assert all(fits(line, 100) for line in [*full.splitlines(), *concise.splitlines()])
    assert concise.count("`") % 2 == 0
    assert f"[{verdict.cause.claim.grade}]" in full
    assert cause in full.splitlines()[0]
    assert cause in concise.splitlines()[0]
    if cause != "clean-exit":
        assert "next " in full
        assert "hint: " in concise
    assert len(verdict.cause.next) <= 3


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("width", [60, 73])
def test_every_cause_fits_a_narrow_terminal(attempt: Attempt, cause: str, width: int) -> None:
    verdict = staged(attempt, cause)
    full, concise = render(verdict, width=width), render(verdict, "concise", width=width)

    assert len(full.splitlines()) <= FULL_LINES
    assert len(concise.splitlines()) <= CONCISE_LINES
    assert all(fits(line, width) for line in [*full.splitlines(), *concise.splitlines()])
    assert cause == "clean-exit" or "next " in full


@pytest.mark.parametrize("style", ["full", "concise"])
def test_a_command_that_fits_a_line_is_on_one_line_and_whole(attempt: Attempt, style: str) -> None:
    attempt.attempt["command"] = ["python", "train.py", "--epochs", "20", "--data", "/data/cats"]
    command = "`buoy run --restart 3 -- python train.py --epochs 20 --data /data/cats`"
    attempt.event(
        "save", before=60, path="checkpoints/a-rather-long-name/last.pt", pid=PID, what="torch.save"
    )

    for width in (84, 100):
        assert command in render(attempt.verdict(), style, width=width)  # type: ignore[arg-type]


def test_a_command_that_is_longer_than_a_line_is_not_broken(attempt: Attempt) -> None:
    """What the terminal wraps can be pasted; a line break of ours cannot."""
    attempt.alive()
    attempt.folder = attempt.folder.rename(attempt.folder.with_name("0" * 90 + "1"))
    attempt.process(os.getpid(), stacks=("Thread 0x1 (most recent call first):\n", 0.0))
    attempt.event("hang", step=120, age=45.0, cpu_share=0.0, threads=[], idle=True)
    command = f"`cat {attempt.folder}/process-{os.getpid()}/stacks.txt`"

    assert any(line.endswith(command) for line in render(attempt.verdict(), width=80).splitlines())


def test_a_path_below_the_working_directory_is_shown_from_there(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt.process(PID, fault=("Fatal Python error: Segmentation fault\n", 0.0))
    attempt.death["status"]["raw"] = 11
    monkeypatch.chdir(attempt.folder.parents[3])

    assert f"`cat runs/train/attempts/0001/process-{PID}/fault.txt`" in render(attempt.verdict())


def test_a_command_too_long_for_the_rest_of_the_advice_stands_alone(attempt: Attempt) -> None:
    attempt.event("save", before=60, path="checkpoints/" + "a" * 60 + "/last.pt", pid=PID, what="torch.save")
    concise = render(attempt.verdict(), "concise", width=60)

    assert "hint: `buoy run --restart 3 -- python train.py`" in concise


@pytest.mark.parametrize(
    "command", [["python", "-c"], ["python"], ["python", "ipykernel_launcher.py", "-f", "x.json"]]
)
def test_a_restart_command_is_not_offered_where_there_is_none(attempt: Attempt, command: list[str]) -> None:
    attempt.attempt.update(mode="watch", command=command)
    assert "--restart" not in " ".join(attempt.verdict().cause.next)

    attempt.attempt["command"] = ["python", "train.py"]
    assert "--restart" in " ".join(attempt.verdict().cause.next)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("launcher", ["ipykernel_launcher.py", "/usr/lib/python3/colab_kernel_launcher.py"])
def test_a_notebooks_person_is_sent_to_no_shell(attempt: Attempt, cause: str, launcher: str) -> None:
    staged(attempt, cause)
    attempt.attempt.update(mode="watch", command=["python", launcher, "-f", "kernel-1.json"])
    verdict = attempt.verdict()
    advice = " ".join(verdict.cause.next)

    assert verdict.cause.id == cause
    assert "buoy run" not in advice
    assert "--run" not in advice and "--restart" not in advice and "--mirror" not in advice


@pytest.mark.parametrize("raw", [exited(2), 13])
def test_what_the_program_said_itself_is_not_repeated(attempt: Attempt, raw: int) -> None:
    """An argparse error, or a pipe whose reader had enough: one line and a hint."""
    attempt.death["status"]["raw"] = raw
    attempt.process(PID, step=0)
    attempt.attempt["t"] = DIED_T - 0.2
    for row in attempt.samples:
        row.update(step=0, phase="start")
    page = (attempt.folder / f"process-{PID}" / "beacon").read_bytes()
    (attempt.folder / f"process-{PID}" / "beacon").write_bytes(page[:96] + b"\xff" * 8 + bytes(4096 - 104))
    lines = render(attempt.verdict(), "concise").splitlines()

    assert len(lines) == 2
    assert "exit code 2" in lines[0] or "SIGPIPE" in lines[0]
    assert lines[1].startswith("  hint: ")


def test_the_width_is_that_of_the_terminal_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_width() == 100  # no terminal

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for columns, width in (("20", 60), ("73", 73), ("250", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal_width() == width


def test_another_attempt_at_the_same_time_is_mentioned(
    attempt: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last attempt ended well; the first, still running then, was killed."""
    attempt.attempt["number"] = 2
    attempt.death["status"]["raw"] = exited(0)
    first = attempt.folder.with_name("0002")
    attempt.folder.rename(first)
    attempt.folder.mkdir()
    attempt.folder, other = first, attempt.folder
    attempt.write()
    record = {"wall": DIED_WALL - 10, "cause": {"id": "kernel-oom"}}
    (other / "verdict.json").write_text(json.dumps(record))
    (other / "death.json").write_text(json.dumps({"t": DIED_T - 10}))
    about = {**attempt.attempt, "number": 1, "t": START_T - 50}
    (other / "attempt.json").write_text(json.dumps(about))
    run = str(attempt.folder.parents[1])
    assert main(["why", run]) == 0
    shown = capsys.readouterr().out
    assert "attempt 1 ran at the same time and ended with kernel-oom" in shown
    assert "--attempt 1`" in shown

    # Of another boot, neither clock nor pid can be compared.
    (other / "attempt.json").write_text(json.dumps({**about, "boot_id": "another"}))
    main(["why", run])
    assert "at the same time" not in capsys.readouterr().out

    (other / "attempt.json").write_text(json.dumps(about))
    # Before this one began: an ordinary restart.
    (other / "death.json").write_text(json.dumps({"t": START_T - 10}))
    main(["why", run])
    assert "at the same time" not in capsys.readouterr().out


def test_the_documentation_has_a_line_for_every_cause() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), re.MULTILINE)

    assert sorted(rows) == CAUSES


@pytest.mark.parametrize("raw", [9, exited(2)])
def test_colour_changes_nothing_but_colour(attempt: Attempt, raw: int) -> None:
    attempt.death["status"]["raw"] = raw
    verdict = attempt.verdict()

    assert "\x1b[" in render(verdict, colour=True)
    assert re.sub(r"\x1b\[\d+m", "", render(verdict, colour=True)) == render(verdict)
    assert re.sub(r"\x1b\[\d+m", "", render(verdict, "concise", colour=True)) == render(verdict, "concise")


def test_control_characters_of_a_message_do_not_reach_the_terminal(attempt: Attempt) -> None:
    attempt.raises("builtins.ValueError", "\x1b[2J\x07 evil \r\n second line")

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", render(attempt.verdict()))


def test_printing_a_verdict_shows_the_full_text(attempt: Attempt) -> None:
    verdict = attempt.verdict()

    assert str(verdict) == render(verdict)


def why(attempt: Attempt, *arguments: str) -> int:
    return main(["why", str(attempt.write().parents[1]), *arguments])


def test_a_verdict_exits_with_0(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    assert why(attempt) == 0
    assert "killed" in capsys.readouterr().out


def test_no_verdict_exits_with_1(attempt: Attempt) -> None:
    attempt.death["status"] = {"raw": None, "source": None}
    assert why(attempt) == 1

    attempt.alive()
    (attempt.folder / "death.json").unlink()
    assert why(attempt) == 1


def test_a_missing_run_exits_with_2_and_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(tmp_path / "nowhere"), "--format", "json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hint:" in captured.err


def test_a_missing_attempt_exits_with_2(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    assert why(attempt, "--attempt", "7") == 2
    assert "attempt 7" in capsys.readouterr().err


def test_json_is_all_there_is_on_stdout(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    attempt.oom_killed()
    assert why(attempt, "--format", "json") == 0
    value = json.loads(capsys.readouterr().out)

    assert value["schema"] == "buoy.verdict/1"
    assert value["cause"]["id"] == "kernel-oom"
    assert value["wall"] == DIED_WALL
    assert value["ran_for"] == DIED_T - attempt.attempt["t"]


@pytest.mark.parametrize(("environment", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True),
                                                       ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)])  # fmt: skip
def test_colour_follows_the_environment(
    attempt: Attempt,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict,
    coloured: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    why(attempt)

    assert ("\x1b[" in capsys.readouterr().out) == coloured


def test_a_note_is_quoted_in_the_exception(attempt: Attempt) -> None:
    attempt.process(PID, note("builtins.KeyError", "'label'"))
    attempt.death["status"]["raw"] = exited(1)

    assert "KeyError: 'label'" in render(attempt.verdict())
