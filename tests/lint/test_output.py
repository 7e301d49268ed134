"""One snapshot per renderer, with a notebook in it, and what each format promises."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.cli.check import execute
from buoy.lint import engine, rules
from buoy.lint.target import Target
from buoy.view import findings
from buoy.view import findings as findings_machine
from buoy.view.findings import check

ALL = set(rules.all_codes())
TARGET = Target("colab-t4", (12 << 30, None, "the test"))
SCRIPT = b"import numpy as np\nvalue = np.float(3)\n"
NOTEBOOK = json.dumps(
    {"cells": [{"cell_type": "code", "source": "\n\tprint(missing)"}], "nbformat": 4}
).encode()


@pytest.fixture
def report() -> engine.Report:
    found = engine.check_source("train, v1.py", SCRIPT, TARGET, ALL)
    found += engine.check_source("notes.ipynb", NOTEBOOK, TARGET, ALL)
    return engine.Report(found, files=2)


def plain() -> findings.Paint:
    return findings.Paint(io.StringIO())


def test_full_shows_the_source_a_caret_and_what_to_do(report: engine.Report) -> None:
    assert findings.full(report, plain()) == (
        "train, v1.py:2:9: BY206 removed-data-api\n"
        "  error: `numpy.float` is gone: not in numpy 1.26.4 nor later (tried in 2.4.6); AttributeError\n"
        "  2 | value = np.float(3)\n"
        "    |         ^^^^^^^^\n"
        "  hint: write `float`\n"
        "  fix: write `float` (`--fix` does it)\n"
        "\n"
        "notes.ipynb:cell 1:2:8: BY102 undefined-name\n"
        "  error: `missing` is not defined: no earlier or later cell defines it; NameError\n"
        "  2 | print(missing)\n"
        "    |       ^^^^^^^\n"
        "  hint: define or import `missing` before this line, or correct its spelling\n"
        "\n"
        "2 errors in 2 files; 1 fixable with `--fix`\n"
    )


def test_concise_is_one_line_per_finding(report: engine.Report) -> None:
    assert findings.concise(report, plain()).splitlines() == [
        "train, v1.py:2:9: BY206 error: `numpy.float` is gone: not in numpy 1.26.4 nor later "
        "(tried in 2.4.6); AttributeError",
        "notes.ipynb:cell 1:2:8: BY102 error: `missing` is not defined: no earlier or later cell defines it; NameError",
        "2 errors in 2 files; 1 fixable with `--fix`",
    ]


def test_github_lines_escape_what_would_end_them(report: engine.Report) -> None:
    first, second = findings_machine.github(report).splitlines()

    assert first.startswith(
        "::error title=BY206 removed-data-api,file=train%2C v1.py,line=2,col=9,endLine=2::`numpy.float`"
    )
    assert second.startswith("::error title=BY102 undefined-name,file=notes.ipynb::cell 1, line 2: `missing`")


def test_json_has_a_schema_and_places_inside_cells(report: engine.Report) -> None:
    content = json.loads(findings_machine.as_json(report))

    assert content["schema"] == "buoy.check/1"
    assert content["findings"][1]["start"] == {"cell": 1, "line": 2, "column": 8}
    assert content["findings"][0]["fix"]["edits"] == [
        {"line": 2, "column": 9, "end_line": 2, "end_column": 17, "text": "float"}
    ]


def test_sarif_is_valid_by_its_official_schema(report: engine.Report) -> None:
    """A notebook, a script, a page, standard input, an unreadable file and no finding at all."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads((Path(__file__).parent / "sarif-2.1.0.schema.json").read_text("utf-8"))
    validator = jsonschema.Draft4Validator(schema)
    more = engine.check_source("-", b"import os\nprint(missing, os)\n", TARGET, ALL)
    more += engine.check_source("a b/ü.md", b"```python\nprint(x\n```\n", TARGET, ALL)
    more += engine.check_source("a.ipynb", b"{", TARGET, ALL)
    assert len(more) == 3
    for found in (report.diagnostics, more, []):
        log = json.loads(findings_machine.sarif(engine.Report(found, files=1)))
        validator.validate(log)
        (run,) = log["runs"]
        for result in run["results"]:
            assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    log["runs"][0]["results"] = [{"level": "fatal"}]
    assert not validator.is_valid(log)  # the schema does refuse


def test_sarif_is_read_by_a_library_that_models_the_standard(report: engine.Report) -> None:
    library = pytest.importorskip("sarif_pydantic", reason="sarif-pydantic is not installed")
    log = library.Sarif.model_validate_json(findings_machine.sarif(report))

    assert len(log.runs[0].results) == len(report.diagnostics)


def test_the_same_findings_have_the_same_fingerprints_when_lines_move() -> None:
    before = engine.check_source("a.py", SCRIPT + SCRIPT, TARGET, ALL)
    after = engine.check_source("a.py", b"# a new line\n" + SCRIPT + SCRIPT, TARGET, ALL)

    assert [item.fingerprint for item in before] == [item.fingerprint for item in after]


def test_colour_is_never_the_only_sign(report: engine.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = findings.full(report, plain())
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == findings.full(report, plain())


def test_check_in_python_returns_values_that_show_themselves(tmp_path: Path) -> None:
    path = tmp_path / "<b>.py"
    path.write_bytes(SCRIPT)

    found = check(str(path), on="colab-t4")
    assert [item.code for item in found] == ["BY206"] and len(found) == 1 and found[0].start.line == 2
    assert "hint: write `float`" in repr(found)
    assert [item.code for item in check([str(path), path], on=["colab-t4"], select="BY1, BY2")] == ["BY206"]
    assert list(check(path, on="colab-t4,kaggle-t4x2", ignore="BY2")) == []
    assert "&lt;b&gt;.py" in found._repr_html_() and "<b>" not in found._repr_html_()


@pytest.mark.parametrize("style", ["json", "sarif", "github"])
def test_machine_formats_print_nothing_else(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_bytes(SCRIPT)

    assert execute(["a.py", "--format", style, "--on", "colab-t4"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    if style != "github":
        json.loads(out)


def test_the_same_file_gives_the_same_words_in_every_process() -> None:
    """Sets are walked in another order in each process; what is printed must not show it."""
    source = (
        "import numpy as np\nimport keras.backend as K\nx = [np.float, np.int, np.object, "
        "np.NaN, K.exp, K.mean, K.sum, K.log]\n"
    )
    seen = set()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-m", "buoy", "check", "-", "--format", "concise", "--on", "colab-t4"],
            input=source,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        seen.add(done.stdout)

    assert len(seen) == 1 and "BY206" in seen.pop()


@pytest.mark.parametrize("name", ["a\x1b[31m\x07.py", "a\n::error::owned.py", "caf\udce9.py", "\u202ecod.py"])
def test_names_and_code_give_a_terminal_and_a_ci_log_no_orders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("import numpy as np\nprint(missing, '\x1b[31m'); value = np.float(3)\n")
    for style in ("full", "concise", "github", "json", "sarif"):
        execute([".", "--format", style])
        told = capsys.readouterr()
        for text in (told.out, told.err):
            assert not [sign for sign in text if not sign.isprintable() and sign != "\n"], ascii(text)
            assert style == "github" or not re.search(r"^\s*::", text, re.MULTILINE)
        if style in ("json", "sarif"):
            assert json.loads(told.out)
    execute([".", "--diff"])
    assert not re.search(r"^\s*::", capsys.readouterr().out, re.MULTILINE)
