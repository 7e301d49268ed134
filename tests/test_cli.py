"""The command's front door: help, version, and what it says to a mistyped verb."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.cli import VERBS, main


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    shown = capsys.readouterr().out
    assert all(f"\n  {verb}" in shown for verb in VERBS)


def test_a_mistyped_verb_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wyh"]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert "unknown command" in shown.err and "did you mean `buoy why`?" in shown.err


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("why --atempt 1", "`--attempt`"),
        ("run --restrat=3 train.py", "`--restart`"),
        ("check --fromat json", "`--format`"),
        ("why --format jsno", "`json`"),
        ("ckpt lsit", "`list`"),
        ("train.py", "`buoy run train.py`"),
    ],
)
def test_a_mistyped_option_choice_or_action_gets_the_nearest_one(
    line: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) in (2, 125)

    assert f"hint: did you mean {near}?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_its_usage(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])

    assert left.value.code == 0
    assert f"buoy {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(("verb", "code"), [("run", 125), ("why", 2)])
def test_an_unknown_option_is_an_error_without_a_traceback(
    verb: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--bogus"]) == code

    shown = capsys.readouterr().err
    assert "--bogus" in shown and f"hint: `buoy {verb} --help`" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_ended_leaves_no_folder_behind(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "buoy", "demo"]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()  # the story has begun
    made = list(tmp_path.glob("buoy-demo-*"))
    child.send_signal(number)
    child.communicate(timeout=400)

    assert made and child.returncode not in (0, None)
    assert not list(tmp_path.glob("buoy-demo-*"))
