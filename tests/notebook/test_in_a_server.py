"""As a person meets it: a notebook in a real Jupyter server whose kernel the machine kills for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import html
from tests.notebook.server import Server


@pytest.fixture
def server(tmp_path: Path, make_session: Callable[[int], Path]) -> Iterator[Server]:
    running = Server(tmp_path, make_session(600 << 20))
    yield running
    running.end()


def test_the_restarted_kernels_first_cell_says_what_killed_the_one_before(
    server: Server, tmp_path: Path
) -> None:
    notebook = server.open("Cats and dogs.ipynb")
    first = notebook.run("%load_ext buoy")
    before = notebook.run("import os; print(os.getpid())")[0]["text"]
    notebook.start("# load the images\nimages = [bytearray(b'x' * (20 << 20)) for _ in range(100)]")
    notebook.wait_for_restart()

    card = html(notebook.run("%load_ext buoy"))
    after = notebook.run("import os; print(os.getpid())")[0]["text"]
    notebook.close()

    assert html(first) == ""  # nothing had died before
    assert after != before
    assert "kernel-oom" in card
    assert ">certain<" in card or ">likely<" in card
    assert "Cats and dogs, attempt 1" in card
    assert "In [3] images = [bytearray" in card
    assert "<b>next</b>" in card
    assert (tmp_path / "runs" / "Cats and dogs" / "attempts" / "0002").is_dir()
