"""The command's front door: help, version, and what it says to a mistyped verb."""

from __future__ import annotations

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
