"""Fixes touch the source under the finding and nothing else, are sound, and are done once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from buoy.cli.check import execute
from buoy.lint import engine, fixer, rules
from buoy.lint.model import Edit, Fix, Span
from buoy.lint.target import Target
from tests.lint.pairs import pairs

ALL = set(rules.all_codes())
TARGET = Target("colab-t4", (12 << 30, None, "the test"))


def mend(name: str, data: bytes, unsafe: bool = False) -> bytes:
    """Apply fixes until nothing is left to mend, as the command does."""
    for _ in range(10):
        data, done = fixer.apply(name, data, engine.check_source(name, data, TARGET, ALL), unsafe)
        if not done:
            return data
    raise AssertionError("the fixes never come to rest")


def test_only_the_bytes_of_the_finding_change() -> None:
    source = b"# coding: utf-8\r\nimport numpy as np\r\nx = np.float( 3 )  # \xe2\x82\xac  \r\n\r\ny='unstyled'   ;z=1"

    assert mend("a.py", source) == source.replace(b"np.float", b"float")


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"# coding: latin-1\n# \xe9\n"], ids=["bom", "latin"])
def test_other_encodings_are_kept(head: bytes) -> None:
    body = b"import numpy as np\nx = np.float(3)\n"

    assert mend("a.py", head + body) == head + body.replace(b"np.float", b"float")


STYLES = [
    {"indent": 1},
    {"indent": None, "separators": (",", ":")},
    {"indent": 4, "ensure_ascii": False, "sort_keys": True},
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("as_list", [True, False])
def test_a_notebook_keeps_its_outputs_metadata_and_formatting(
    style: dict[str, object], as_list: bool
) -> None:
    source = "# ä: first\nimport numpy as np\nx = np.float(3)\nprint(x)"
    cell = {
        "cell_type": "code",
        "execution_count": 7,
        "metadata": {"x": [1.50, 1e3]},
        "outputs": [{"text": ["np.float\n", "ü"], "output_type": "stream"}],
        "source": source.splitlines(keepends=True) if as_list else source,
    }
    content = {"cells": [cell], "metadata": {"np.float": 1}, "nbformat": 4}
    data = json.dumps(content, **style).encode() + b"\n\n"  # type: ignore[arg-type]

    mended = mend("a.ipynb", data)
    assert mended == data.replace(b"np.float(3)", b"float(3)")


@pytest.mark.parametrize("source", [["print(os.getcwd())"], ["x = 1\n", "print(os.getcwd(), x)"]])
def test_a_line_can_be_added_to_a_cell(source: list[str]) -> None:
    data = json.dumps(
        {"cells": [{"cell_type": "code", "source": source, "outputs": []}], "nbformat": 4}, indent=1
    ).encode()

    mended = json.loads(mend("a.ipynb", data))
    assert mended["cells"][0]["source"] == ["import os\n", *source]
    assert mended["cells"][0]["outputs"] == []


def test_an_import_goes_behind_the_magic_the_docstring_and_the_future() -> None:
    cell = {"cell_type": "code", "source": ["%%time\n", "print(os.getcwd())"]}
    data = json.dumps({"cells": [cell], "nbformat": 4}).encode()
    one_line = b'"""Doc."""; print(os.getcwd())\n'
    script = b'"""Doc."""\nfrom __future__ import annotations\n\nprint(os.getcwd())\n'

    assert json.loads(mend("a.ipynb", data))["cells"][0]["source"] == [
        "%%time\n",
        "import os\n",
        "print(os.getcwd())",
    ]
    assert mend("a.py", script) == script.replace(b"\n\nprint", b"\n\nimport os\nprint")
    assert mend("a.py", b"import sys\ndef f():\n    " + one_line).startswith(b"import os\nimport sys")
    assert (
        mend("a.md", b"- x\n\n  ```python\n  print(os.getcwd())\n  ```\n").split(b"\n")[3] == b"  import os"
    )
    assert mend("a.md", b"```python\n" + one_line + b"```\n").split(b"\n")[1] == one_line.strip().replace(
        b"; print", b"; import os; print"
    )


def test_unsafe_fixes_wait_to_be_asked_for() -> None:
    source = b"import keras\nmodel = keras.Sequential()\nmodel.compile(loss='mse')\n"
    source += b"model.fit([1], [1], epochs=2, workers=4)\n"

    assert mend("a.py", source) == source
    assert mend("a.py", source, unsafe=True) == source.replace(b", workers=4", b"")


def test_a_file_reached_by_two_names_is_mended_once(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("from keras.optimizers import Adam\no = Adam(lr=0.1)\n")
    (tmp_path / "link.py").symlink_to(script)
    execute([str(tmp_path), "--fix"])

    assert script.read_text() == "from keras.optimizers import Adam\no = Adam(learning_rate=0.1)\n"


def test_a_kept_loss_is_detached_so_that_later_uses_still_work() -> None:
    """`.item()` would break `(total / 3).item()` after the training; `.detach()` breaks nothing but a backward."""
    loop = (
        "import torch\nmodel = torch.nn.Linear(1, 1)\ntotal = 0\nfor x in [torch.ones(1)] * 3:\n"
        "    loss = model(x)\n    loss.backward()\n    total += loss\n"
    )

    for later in ("print(total)", "average = total / 3\nprint(average.item())", "print(total.item())"):
        mended = mend("a.py", f"{loop}{later}\n".encode())
        assert b"total += loss.detach()" in mended
        exec(compile(mended, "mended", "exec"), {})
    assert b"total += loss\n" in mend("a.py", f"{loop}total.backward()\n".encode())


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.code)
def test_a_mended_example_still_parses_and_mending_again_changes_nothing(pair: object) -> None:
    source = pair.bad.encode()  # type: ignore[attr-defined]
    mended = mend("a.py", source, unsafe=True)

    assert mend("a.py", mended, unsafe=True) == mended
    if pair.code != "BY981":  # type: ignore[attr-defined]
        compile(mended, "a.py", "exec")


def test_overlapping_and_unsound_fixes_are_not_applied() -> None:
    """Two edits of the same place wait for each other, and an edit that breaks the syntax is dropped."""
    data = b"import numpy as np\nx = np.float(3)\n"
    (found,) = engine.check_source("a.py", data, TARGET, ALL)
    bad = Fix("break it", (Edit(Span(2, 4, 2, 12), "((("),), "safe")
    assert fixer.apply("a.py", data, [replace(found, fix=bad)], False) == (data, [])
    mended, _ = fixer.apply("a.py", data, [found, found], False)
    assert mended == data.replace(b"np.float", b"float")


def test_the_file_is_replaced_whole_and_keeps_its_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link = tmp_path / "a.py", tmp_path / "link.py"
    path.write_text("import numpy as np\nx = np.float(3)\n")
    path.chmod(0o640)
    link.symlink_to(path)

    assert execute([str(link), "--fix"]) == 0
    assert path.read_text() == "import numpy as np\nx = float(3)\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.py", "link.py"]
    assert "fixed 1 finding" in capsys.readouterr().err


def test_a_fix_that_cannot_be_applied_stops_no_other() -> None:
    """The bad one is first, in the middle and last; each time the good ones are done."""
    data = b"import numpy as np\na = np.float(1)\nb = np.int(2)\nc = np.object()\n"
    good = engine.check_source("a.py", data, TARGET, ALL)
    bad = Fix("break it", (Edit(Span(1, 0, 1, 6), "((("),), "safe")
    assert len(good) == 3
    for place in range(4):
        found = [*good[:place], replace(good[0], fix=bad), *good[place:]]
        mended, done = fixer.apply("a.py", data, found, False)

        assert mended == b"import numpy as np\na = float(1)\nb = int(2)\nc = object()\n" and done == good


def test_a_fix_that_was_refused_is_not_offered_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("import numpy as np\na = np.float(1)\n")
    monkeypatch.setattr(fixer, "_as_sound", lambda before, data: False)

    assert execute([str(tmp_path / "a.py"), "--fix"]) == 1
    out, err = capsys.readouterr()
    assert "fixed 0 findings" in err and "--fix" not in out


def test_a_notebook_is_mended_however_its_source_is_cut(tmp_path: Path) -> None:
    """nbformat also cuts at U+2028 and form feeds, and some tools cut anywhere."""
    for parts in (
        ["import numpy as np\n", "t = 'a\u2028", "b'\n", "x = np.float(3)"],
        ["import nu", "mpy as np\nx = np.fl", "oat(3)\n", "print(x)"],
    ):
        data = json.dumps({"cells": [{"cell_type": "code", "source": parts}], "nbformat": 4}).encode()
        mended = json.loads(mend("a.ipynb", data))["cells"][0]["source"]

        assert "".join(mended) == "".join(parts).replace("np.float", "float")


def test_a_read_only_file_is_left_alone_and_the_others_are_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import numpy as np\na = np.float(1)\n"
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.py").chmod(0o444)

    assert execute([str(tmp_path), "--fix"]) == 2
    assert (tmp_path / "a.py").read_text() == text
    assert (tmp_path / "b.py").read_text() == text.replace("np.float", "float")
    assert "read-only" in capsys.readouterr().err


def test_ignored_uses_are_not_rewritten() -> None:
    source = b"import numpy as np\na = np.float(1)  # buoy: ignore[BY206]\nb = np.float(2)\n"

    assert mend("a.py", source) == source.replace(b"b = np.float", b"b = float")


@pytest.mark.parametrize(
    ("key", "fit", "mended"),
    [
        ("val_acc", "epochs=2", False),
        ("val_acc", "epochs=2, validation_split=0.1", True),
        ("acc", "epochs=2", True),
    ],
)
def test_a_validation_key_is_only_renamed_where_something_validates(key: str, fit: str, mended: bool) -> None:
    source = (
        "import keras\nmodel = keras.Sequential()\nmodel.compile(loss='mse', metrics=['accuracy'])\n"
        f"h = model.fit([1], [1], {fit})\nprint(h.history['{key}'])\n"
    )

    assert (b"accuracy']" in mend("a.py", source.encode()).splitlines()[-1]) == mended


@pytest.mark.parametrize(
    "text",
    [
        b"import numpy as np\nx = np.float(3)",
        b"import numpy as np\nt = 'a\xe2\x80\xa8b'\nx = np.float(3)\n\x0c\ny = 1\n",
        b"import numpy as np\r\nx = np.float(3)\r\n",
        b"# coding: latin-1\n# \xe9\nimport numpy as np\nx = np.float(3)\n",
    ],
    ids=["no final newline", "separators", "crlf", "latin-1"],
)
def test_a_diff_is_a_patch_that_applies(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(text)
    command = [sys.executable, "-m", "buoy", "check", "a.py", "--on", "colab-t4"]
    shown = subprocess.run([*command, "--diff"], cwd=tmp_path, capture_output=True, check=False)
    applied = subprocess.run(
        ["git", "apply", "-p0", "-"], cwd=tmp_path, input=shown.stdout, capture_output=True, check=False
    )

    assert (shown.returncode, applied.returncode) == (1, 0), applied.stderr
    assert (tmp_path / "a.py").read_bytes() == text.replace(b"np.float", b"float")
    again = subprocess.run([*command, "--diff"], cwd=tmp_path, capture_output=True, check=False)
    assert (again.returncode, again.stdout) == (0, b"")


def test_diff_shows_the_change_and_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text("import numpy as np\nx = np.float(3)\n")

    execute([str(path), "--diff"])
    assert "+x = float(3)" in capsys.readouterr().out
    assert path.read_text() == "import numpy as np\nx = np.float(3)\n"
