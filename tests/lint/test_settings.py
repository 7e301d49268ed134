"""The command line, settings files, ignore comments, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.cli.check import execute, read_settings
from buoy.errors import UsageError
from buoy.lint import engine, rules
from buoy.lint.target import Target

ALL = set(rules.all_codes())
TARGET = Target("colab-t4", (12 << 30, None, "the test"))
BAD = "import numpy as np\nvalue = np.float(3)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "good.py").write_text("print(1)\n")
    return tmp_path


def codes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [item["code"] for item in json.loads(capsys.readouterr().out)["findings"]]


def test_exit_codes(folder: Path) -> None:
    """0 clean, 1 findings, 0 for notes alone and with --exit-zero."""
    (folder / "page.md").write_text("```python\n# ...\nprint(missing)\n```\n")

    assert execute(["good.py"]) == 0
    assert execute(["bad.py", "--on", "colab-t4"]) == 1
    assert execute(["bad.py", "--on", "colab-t4", "--exit-zero"]) == 0
    assert execute(["page.md"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "no such file or folder"),
        (["--select", "BY999"], "unknown rule"),
        (["--select", "kept-grph"], "kept-graph"),
        (["--on", "colab-t5"], "colab-t4"),
        (["-", "--fix"], "`-` with --fix"),
        (["-", "--diff"], "`-` with --diff"),
        (["-", "good.py"], "checked alone"),
        (["--form", "json"], "did you mean `--format`?"),
        (["--select", "BY1", "nowhere.py"], "no such file or folder"),
    ],
)
def test_wrong_usage_says_what_to_do(folder: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        execute(arguments)

    assert words in str(caught.value) and caught.value.exit_code == 2


def test_a_folder_is_searched_and_hidden_ones_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".venv", "node_modules", "deep/er"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.py").write_text(BAD)

    execute(["--on", "colab-t4", ".", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert sorted(item["path"] for item in found["findings"]) == ["bad.py", "deep/er/x.py"]
    assert found["files"] == 3


def test_standard_input_is_a_script_or_a_notebook(folder: Path) -> None:
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": "print(missing)"}]})
    for text, place in (("import os\nprint(missing)", "-:2:7"), (notebook, "stdin.ipynb:cell 1:1:7")):
        done = subprocess.run(
            [sys.executable, "-m", "buoy", "check", "-", "--format", "concise"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )

        assert (done.returncode, done.stdout.splitlines()[0].split(": ")[0]) == (1, place)


def test_select_and_ignore_take_codes_starts_names_and_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.py").write_text(BAD + "print(missing)\n")
    for arguments, expected in (
        (["--select", "BY2"], ["BY206"]),
        (["--select", "undefined-name"], ["BY102"]),
        (["--select", "all", "--ignore", "BY1,BY2"], []),
        (["--ignore", "removed-data-api"], ["BY102"]),
    ):
        execute(["bad.py", "--on", "colab-t4", "--format", "json", *arguments])

        assert codes(capsys) == expected


def test_settings_come_from_the_nearest_file_and_the_command_line_wins(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").write_text(
        '[tool.buoy.check]\nignore = ["BY206"]\non = ["colab-t4"]\nexclude = ["old"]\n'
    )
    (folder / "old").mkdir()
    (folder / "old" / "x.py").write_text("import os\nprint(os, missing)\n")

    assert execute(["--format", "json"]) == 0
    monkeypatch.setenv("BUOY_CHECK_IGNORE", "BY1")
    assert read_settings().ignore == ["BY1"]
    assert read_settings().on == ["colab-t4"]


def test_every_mistake_in_the_settings_is_named_at_once(folder: Path) -> None:
    (folder / "buoy.toml").write_text('[check]\nselekt = ["BY1"]\nignore = "BY2"\nbaseline = "known.json"\n')

    with pytest.raises(UsageError) as caught:
        read_settings()
    assert all(
        words in str(caught.value)
        for words in ("did you mean `select`", "'ignore' is 'BY2'", "unknown key 'baseline'")
    )


@pytest.mark.parametrize(
    ("name", "text"), [("buoy.toml", "[chek]\n"), ("pyproject.toml", "[tool.buoy.chek]\n")]
)
def test_an_unknown_section_is_an_error_with_the_nearest_name(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)

    with pytest.raises(UsageError, match=r"did you mean `\[(tool\.buoy\.)?check\]`"):
        read_settings()


def test_what_is_excluded_does_not_depend_on_the_working_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patterns of a settings file are seen from its folder, those of the command line from here."""
    (folder / "buoy.toml").write_text('[check]\nexclude = ["src/old", "bad.py"]\non = ["colab-t4"]\n')
    for name in ("src/old", "src/new"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.py").write_text(BAD)

    for here, path in ((folder, "."), (folder / "src", "."), (folder / "src" / "old", "../..")):
        monkeypatch.chdir(here)
        execute([path, "--format", "json"])
        found = json.loads(capsys.readouterr().out)["findings"]
        assert [Path(item["path"]).resolve() for item in found] == [folder / "src" / "new" / "x.py"]
    monkeypatch.chdir(folder / "src")
    execute(["--exclude", "new", "--format", "json"])
    assert codes(capsys) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--on", "colab-t4,kaggle-t4x2", "bad.py"],
        ["--select", "BY206", "bad.py", "--on", "colab-t4"],
        ["--select", "BY206,BY1", "bad.py", "--on", "colab-t4"],
        ["--ignore", "BY1", "bad.py", "--on", "colab-t4"],
    ],
)
def test_lists_take_commas_and_leave_the_path_behind_them(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "also.py").write_text(BAD)
    execute([*arguments, "--format", "json"])

    assert codes(capsys) == ["BY206"]


def test_an_empty_folder_is_not_passed_over_in_silence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()

    assert execute(["empty"]) == 0
    assert "no script and no notebook to check in empty" in capsys.readouterr().err


def test_broken_settings_are_an_error_with_the_path(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("[tool.buoy\n")

    with pytest.raises(UsageError, match=r"pyproject\.toml"):
        read_settings()


def check(source: str) -> list[str]:
    return [item.code for item in engine.check_source("a.py", source.encode(), TARGET, ALL)]


def test_ignore_comments_hide_their_line_and_unneeded_ones_are_reported() -> None:
    line = "import numpy as np\nx = np.float(3)"

    assert check(f"{line}  # buoy: ignore[BY206]\n") == []
    assert check(f"{line}  # buoy: ignore\n") == []
    assert check(f"{line}  # buoy: ignore[BY101]\n") == ["BY206", "BY002"]
    assert check("x = 1  # buoy: ignore[BY206, BY401]\n") == ["BY002"]
    assert check("x = 1  # buoy: ignore[NP001]\n") == ["BY002"]
    assert check("x = 'text # buoy: ignore[BY206]'\n") == []


def test_an_ignore_hides_its_own_use_and_no_later_one() -> None:
    """A removed or undefined name is one finding for all its uses: those that are hidden do not count."""
    ignore = "  # buoy: ignore[BY206]"
    three = "import numpy as np\na = np.float(1){}\nb = np.float(2){}\nc = np.float(3)\n"

    def lines(source: str) -> list[tuple[str, int]]:
        found = engine.check_source("a.py", source.encode(), TARGET, ALL)
        return [(item.code, item.start.line) for item in found]

    assert lines(three.format(ignore, "")) == [("BY206", 3)]
    assert lines(three.format(ignore, ignore)) == [("BY206", 4)]
    assert lines(three.format("", ignore)) == [("BY206", 2)]
    assert lines("import os\nprint(x, os)  # buoy: ignore[BY102]\nprint(x)\n") == [("BY102", 3)]
    late = "import torch\nprint(x)  # buoy: ignore[BY102]\nfor i in range(9):\n    torch.ones(1).backward()\nprint(x)\n"
    assert lines(late) == [("BY101", 5)]


def test_one_ignore_hides_code_of_another_age_as_a_whole() -> None:
    source = "import tensorflow as tf\nx = tf.placeholder(1){}\ny = tf.log(x)\nprint(tf.Session().run(y))\n"

    assert check(source.format("")) == ["BY201"]
    assert check(source.format("  # buoy: ignore[BY201]")) == []


@pytest.mark.parametrize("word", ["BY2", "removed-data-api", "BY206, BY4", "all"])
def test_ignores_take_names_and_starts_of_codes(word: str) -> None:
    found = check(f"import numpy as np\nx = np.float(3)  # buoy: ignore[{word}]\n")

    assert found == (["BY002"] if "BY4" in word else [])


@pytest.mark.parametrize("word", ["BY999", "kept-grph"])
def test_an_unknown_rule_in_an_ignore_is_named(word: str) -> None:
    (found,) = engine.check_source("a.py", f"x = 1  # buoy: ignore[{word}]\n".encode(), TARGET, ALL)

    assert found.code == "BY002" and f"unknown rule in `# buoy: ignore`: {word}" in found.message


def test_an_ignore_for_a_rule_that_did_not_run_is_not_called_unused() -> None:
    source = b"import numpy as np\nx = np.float(3)  # buoy: ignore\n"

    assert engine.check_source("a.py", source, TARGET, rules.choose([], ["BY206"])) == []


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("x = 1  # buoy: ignore[BY206]", "x = 1"),
        ("x = 1  # buoy: ignore[BY206] because of X", "x = 1  # because of X"),
        ("x = 1  # buoy: ignore[BY206]  # noqa", "x = 1  # noqa"),
        ("x = 1  # noqa  # buoy: ignore", "x = 1  # noqa"),
    ],
)
def test_an_unused_ignore_is_removed_by_its_fix(line: str, mended: str) -> None:
    from buoy.lint import fixer

    data = f"{line}\n".encode()
    changed, _ = fixer.apply("a.py", data, engine.check_source("a.py", data, TARGET, ALL), False)

    assert changed.decode() == f"{mended}\n"


def test_the_list_of_rules_says_which_are_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--rules"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ALL)
    assert any(line.startswith("BY401 on  kept-graph") for line in lines)
    assert any(line.startswith("BY103 off defined-in-later-cell") for line in lines)


def test_nothing_heavy_is_imported_and_nothing_asks_the_network(folder: Path) -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('network')\n"
        "socket.socket = refuse\n"
        "from buoy.cli.check import execute, read_settings\n"
        "execute(['bad.py', '--format', 'concise'])\n"
        "print(sorted(set(sys.modules) & {'torch', 'tensorflow', 'keras', 'numpy', 'rich', 'psutil'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_the_size_of_the_target_decides() -> None:
    source = "import numpy as np\nx = np.zeros((1000, 1000, 1000))\n"
    for ram, expected in ((4 << 30, ["error"]), (16 << 30, ["warning"]), (64 << 30, [])):
        target = Target("colab-t4", (ram, None, "the test"))

        assert [
            item.severity for item in engine.check_source("a.py", source.encode(), target, ALL)
        ] == expected


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("np.eye(1_000_000)", ["BY301"]),
        ("np.identity(1_000_000, 'int8')", ["BY301"]),
        ("np.eye(1_000_000, 10)", []),
        ("np.eye(1_000_000, M=10)", []),
    ],
)
def test_a_matrix_with_columns_of_its_own_is_no_square(made: str, found: list[str]) -> None:
    assert check(f"import numpy as np\nx = {made}\n") == found


def test_several_targets_mean_the_tightest() -> None:
    from buoy.lint.target import target_for

    assert target_for(["colab-t4", "colab-t4-highram"]).name == "colab-t4"
    assert target_for([]).name == "this"
