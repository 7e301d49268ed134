"""Quantities in and out, and the errors for what cannot be read."""

from __future__ import annotations

import doctest

import pytest

import buoy.errors
import buoy.flight.privacy
import buoy.units
from buoy.errors import UsageError
from buoy.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    "module", [buoy.units, buoy.errors, buoy.flight.privacy], ids=lambda module: module.__name__
)
def test_the_examples_in_the_docstrings_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]

    assert result.attempted and not result.failed


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "12 parsecs", "1..2G"])
def test_a_size_that_cannot_be_read_says_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="hint: for example `20GB`"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "soon", "12 parsecs", "1:2:3:4", "-5", "h", "12h30x"])
def test_a_duration_that_cannot_be_read_says_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="hint: for example `12h`"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("45min", 2700),
        ("2d", 172800),
        ("01:30:00", 5400),
        ("10:00", 600),
        ("2-12", None),
    ],
)
def test_durations_as_people_and_slurm_write_them(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(UsageError):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


def test_unknown_is_not_zero() -> None:
    assert format_bytes(None) == format_duration(None) == "n/a"
    assert format_bytes(0) == "0 B"
