"""Machines we do not have, as text: each file in trees/ unpacks into a folder that stands in for `/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TREES = Path(__file__).parent / "trees"


def unpack(name: str, into: Path) -> str:
    """Write the files of one tree: `== path` starts one, `-> target` makes a link, `\\0` is a zero byte."""
    target: Path | None = None
    lines: list[str] = []

    def finish() -> None:
        if target is None:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if lines and lines[0].startswith("-> "):
            target.symlink_to(lines[0][3:].strip())
        else:
            target.write_text("".join(lines).replace("\\0\n", "\0").replace("\\0", "\0"))

    for line in (TREES / f"{name}.tree").read_text().splitlines(keepends=True):
        if line.startswith("== "):
            finish()
            target, lines = into / line[3:].strip(), []
        elif target is not None:
            lines.append(line)
    finish()
    return str(into)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str], str]:
    """Unpack a tree by name and give its root."""
    return lambda name: unpack(name, tmp_path / name)
