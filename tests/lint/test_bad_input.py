"""Bad input: a clear diagnostic, never a traceback, never a hang."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from buoy.lint import engine, fixer, rules
from buoy.lint.sources import Unreadable
from buoy.lint.target import Target
from tests.lint.pairs import pairs

ALL = set(rules.all_codes())
TARGET = Target("colab-t4", (12 << 30, None, "the test"))


def check(data: bytes, name: str) -> list[str]:
    found = engine.check_source(name, data, TARGET, ALL)
    assert not [item.message for item in found if item.code == "BY000"]
    return [item.code for item in found]


@pytest.mark.parametrize("name", ["a.py", "a.ipynb", "a.md"])
@pytest.mark.parametrize(
    "data",
    [b"\x00\x01\x02\xff", b"\xff\xfe\xfa", b"\x89PNG\r\n\x1a\n" + bytes(100), "ä".encode("latin-1")],
    ids=["zeros", "bytes", "png", "latin"],
)
def test_what_is_no_text_is_said_to_be_none(name: str, data: bytes) -> None:
    assert check(data, name) == ["BY001"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"cells": 3}',
        b'{"worksheets": [3]}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
)
def test_what_is_no_notebook_is_said_to_be_none(data: bytes) -> None:
    assert check(data, "a.ipynb") in (["BY001"], [])


@pytest.mark.parametrize(
    "cell",
    [
        None,
        3,
        [],
        {"cell_type": "code"},
        {"cell_type": "code", "source": None},
        {"cell_type": "code", "source": [1, None, "x=1"]},
        {"cell_type": ["code"], "source": "x"},
        {"cell_type": "code", "source": {"a": 1}},
    ],
)
def test_odd_cells_are_named_and_the_rest_is_checked(cell: object) -> None:
    good = {"cell_type": "code", "source": "print(missing)"}
    data = json.dumps({"cells": [cell, good], "metadata": 3}).encode()
    odd, found = engine.check_source("a.ipynb", data, TARGET, ALL)

    assert (odd.code, odd.start.cell, found.code, found.start.cell) == ("BY001", 1, "BY102", 2)
    assert "this cell was not checked: its source is not text" in odd.message


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000,
        "[" * 300 + "]" * 300,
        "x = " + "-" * 50_000 + "1",
        "x = " + "1+" * 20_000 + "1",
        "a" + ".b" * 20_000,
        "if 1:\n" + "".join(" " * i + "if 1:\n" for i in range(1, 120)) + " " * 120 + "pass",
        "f(" * 2000 + ")" * 2000,
        "x = 10 ** 10 ** 10 ** 10\nimport numpy as np\nnp.zeros((x, x))",
        "\\" * 1000,
        "'''" * 999,
        "\x0c\n\x0cx = 1\n",
        "x = 1\r\ry = 2\r",
    ],
    ids=range(12),
)
def test_deep_and_odd_code_ends_in_a_diagnostic(source: str) -> None:
    start = time.process_time()
    check(source.encode(), "a.py")

    assert time.process_time() - start < 20


def test_a_huge_notebook_is_read_in_a_few_seconds() -> None:
    """20 MB, nearly all of it in outputs, as notebooks with pictures are."""
    picture = {"output_type": "display_data", "data": {"image/png": "iVBOR" * 800_000}}
    cells = [
        {"cell_type": "code", "source": "import numpy as np\nx = np.float(3)", "outputs": [picture]}
        for _ in range(5)
    ]
    data = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}).encode()
    assert len(data) > 20_000_000

    start = time.process_time()
    found = engine.check_source("a.ipynb", data, TARGET, ALL)
    mended, _ = fixer.apply("a.ipynb", data, found, False)
    assert time.process_time() - start < 20
    assert mended == data.replace(b"np.float", b"float")


@pytest.mark.parametrize(
    ("data", "words"), [(b"x = 1\n" * 1_000_000, "6,000,000 characters"), (b"(" * 5000, "nested too deeply")]
)
def test_what_is_too_much_to_parse_is_said_to_be_unread_not_wrong(data: bytes, words: str) -> None:
    (found,) = engine.check_source("a.py", data, TARGET, ALL)

    assert found.code == "BY001" and words in found.message and found.source


@pytest.mark.parametrize("name", ["table.csv", "notes.txt", "run.sh"])
def test_a_file_that_is_no_code_by_its_name_is_not_silently_clean(name: str) -> None:
    assert check(b"print(1)\n", name) == ["BY001"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A pipe (which would wait for ever), a loop of links, a folder named like a script, no permission."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "self").symlink_to(tmp_path)
    (tmp_path / "secret.py").write_text("import os\nprint(os, missing)")
    (tmp_path / "secret.py").chmod(0)
    (tmp_path / "good.py").write_text("import os\nprint(os, missing)")

    found = engine.check_files(engine.find_files([str(tmp_path)]), TARGET, ALL)
    by_name = {Path(item.path).name: item.code for item in found.diagnostics}
    assert by_name["pipe.py"] == by_name["loop.py"] == by_name["gone.py"] == "BY001"
    assert by_name["good.py"] == "BY102"
    assert by_name["secret.py"] in ("BY001", "BY102")  # root may read everything


def test_a_rule_that_fails_is_reported_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from buoy.lint.rules import removed

    def broken(facts: object, target: object) -> object:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(removed, "find_removed_data_api", broken)
    found = engine.check_source("a.py", b"import numpy\nprint(missing)\n", TARGET, ALL)

    assert [item.code for item in found] == ["BY000", "BY102"]
    assert "BY206" in found[0].message and "on purpose" in found[0].message


SEEDS = [pair.bad for pair in pairs()] + [pair.mended for pair in pairs()]


@pytest.mark.parametrize("seed", range(6))
def test_damaged_programs_never_bring_down_a_rule(seed: int) -> None:
    """Lines and words of real examples shuffled, cut and doubled: any result is fine, an exception is not."""
    dice = random.Random(seed)
    for _ in range(60):
        lines = dice.choice(SEEDS).split("\n") + dice.choice(SEEDS).split("\n")
        for _ in range(dice.randrange(1, 6)):
            place = dice.randrange(len(lines))
            match dice.randrange(5):
                case 0:
                    lines.pop(place)
                    lines = lines or ["x"]
                case 1:
                    lines[place] = " " * dice.randrange(5) + lines[place].lstrip()
                case 2:
                    words = lines[place].split(" ")
                    dice.shuffle(words)
                    lines[place] = " ".join(words)
                case 3:
                    lines.insert(place, dice.choice(lines))
                case 4:
                    cut = dice.randrange(len(lines[place]) + 1)
                    lines[place] = (
                        lines[place][:cut]
                        + dice.choice(["", "(", "'", "%", "!", "é", "\t", "\\"])
                        + lines[place][cut:]
                    )
        text = "\n".join(lines)
        name = dice.choice(["a.py", "a.ipynb", "a.md"])
        data = text.encode()
        if name == "a.ipynb":
            data = json.dumps(
                {"cells": [{"cell_type": "code", "source": part} for part in text.split("\n\n")]}
            ).encode()
        elif name == "a.md":
            data = b"```python\n" + data + b"\n```\n"
        found = engine.check_source(name, data, TARGET, ALL)
        assert not [item.message for item in found if item.code == "BY000"], text
        try:
            fixer.apply(name, data, found, True)
        except Unreadable:
            pass


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_never_bring_it_down(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        data = dice.randbytes(dice.randrange(400))
        for name in ("a.py", "a.ipynb", "a.md"):
            check(data, name)


def test_the_command_never_shows_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"\xff\xfe")
    (tmp_path / "b.ipynb").write_bytes(b"{")
    done = subprocess.run(
        [sys.executable, "-m", "buoy", "check", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )

    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout
    assert done.stdout.count("BY001") == 2


_MOST_MEMORY = 200 << 20
_LARGE = {
    "script.py": b"x = 1\n" * (45 << 20 >> 3),
    "list.ipynb": b"[" + b"[]," * (45 << 20 >> 2) + b"[]]",
    "cell.ipynb": b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": "'
    + b"x" * (45 << 20)
    + b'"}]}',
}


@pytest.mark.parametrize("name", _LARGE)
def test_a_file_of_45_megabytes_is_refused_before_it_fills_the_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(_LARGE[name])
    code = (
        "import sys; from buoy.cli import main; main(['check', sys.argv[1], '--format', 'concise'])\n"
        "print(int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]) << 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, check=True
    )

    assert "BY001" in done.stdout and int(done.stdout.split()[-1]) < _MOST_MEMORY
