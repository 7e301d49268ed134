"""Every rule has a page; its bad example is found, its mended one is clean, and the fix turns one into
something clean.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buoy.lint import engine, rules
from buoy.lint.model import Diagnostic
from buoy.lint.target import Target
from buoy.units import parse_bytes
from tests.lint.pairs import RULES, Pair, judge, pairs, run_example

PAIRS = {pair.code: pair for pair in pairs()}


def check(pair: Pair, source: str, folder: Path) -> list[Diagnostic]:
    ram = parse_bytes(pair.notes.get("ram", "12GiB"))
    target = Target("colab-t4", (ram, None, "the test"))
    name, data = "example.py", source.encode()
    if pair.notes.get("as") == "notebook":
        cells = [
            {"cell_type": "code", "source": part.strip("\n")}
            for part in source.split("# %%\n")
            if part.strip()
        ]
        name, data = "example.ipynb", json.dumps({"cells": cells}).encode()
    return engine.check_source(str(folder / name), data, target, set(rules.all_codes()))


@pytest.mark.parametrize("code", rules.all_codes())
def test_every_rule_has_a_page_that_names_it(code: str) -> None:
    first = (RULES / f"{code}.md").read_text().splitlines()[0]

    assert first == f"# {code} {rules.rule(code).name}"


def test_the_list_of_rules_in_the_manual_is_complete() -> None:
    manual = (RULES.parent / "check.md").read_text()
    for code in rules.all_codes():
        rule = rules.rule(code)

        assert (
            f"| [{code}](rules/{code}.md) | {rule.name} | {'yes' if rule.default else 'no'} | {rule.summary} |"
            in manual
        )


def test_every_page_belongs_to_a_rule_and_every_rule_has_a_pair() -> None:
    assert {path.stem for path in RULES.glob("BY*.md")} == set(rules.all_codes())
    assert set(PAIRS) == set(rules.RULES)


@pytest.mark.parametrize("code", sorted(PAIRS))
def test_the_bad_example_is_found_and_the_mended_one_is_clean(code: str, tmp_path: Path) -> None:
    """Every rule runs, so a mended example is clean of the others' errors and warnings, too."""
    pair = PAIRS[code]
    if pair.setup:
        (tmp_path / "frames.npy").touch()
        with open(tmp_path / "frames.npy", "r+b") as file:
            file.truncate(1 << 40)

    assert code in {item.code for item in check(pair, pair.bad, tmp_path)}
    left = [
        item for item in check(pair, pair.mended, tmp_path) if item.code == code or item.severity != "note"
    ]
    assert [item.message for item in left] == []


@pytest.mark.parametrize("code", ["BY102", "BY103", "BY206", "BY301", "BY981"])
def test_a_sample_of_the_pairs_shows_its_claim_when_run(code: str) -> None:
    """The quick ones; `make pairs` runs all of them."""
    assert judge(PAIRS[code]) is None


def test_the_runner_does_not_believe_a_bad_example_that_ends_well() -> None:
    honest = PAIRS["BY102"]

    assert judge(Pair("BY102", "fails", "NameError", honest.mended, honest.mended, None, {})) is not None
    assert run_example("print('x')", None, 30).stdout == "x\n"
