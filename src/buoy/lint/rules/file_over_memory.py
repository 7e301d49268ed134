"""BY307: a data file that is here, and is too large to be read whole where the code will run."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target
from buoy.units import format_bytes, format_share

RULE = Rule("BY307", "file-over-memory", "a data file is read whole and does not fit into memory")

# Each takes at least the size of its file. Measured peaks of read_csv (pandas 3.1): 1.9 for long floats,
# 4.7 for text, 9 for
# one-digit integers, .npy is read one to one. `np.loadtxt` was not measured and is left out.
_READERS = ("pandas.read_csv", "pandas.read_table", "numpy.load")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Reading calls whose file exists beside the code, with its size; no file, no finding."""
    if facts.document.path == "-":
        return
    folder = os.path.dirname(os.path.abspath(facts.document.path))
    for name in _READERS:
        for call in facts.called(name):
            path = call.node.args[0] if call.node.args else None
            if not isinstance(path, ast.Constant) or not isinstance(path.value, str) or _in_pieces(call):
                continue
            if path.value.endswith(".npz"):  # opened only; its arrays are read one by one
                continue
            size = _size(os.path.join(folder, path.value))
            limit = target.ram
            if size is None or limit is None or size < limit:
                continue
            message = (
                f"{path.value} has {format_bytes(size)}; read whole it takes at least "
                f"{format_share(size, limit)} of {target.words}"
            )
            yield Finding(facts.document.span(call.node), "error", message, _hint(name))


def _in_pieces(call: Call) -> bool:
    return any(
        call.keyword(word) is not None
        for word in ("chunksize", "nrows", "iterator", "mmap_mode", "usecols", "max_rows")
    )


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size if os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


def _hint(name: str) -> str:
    return (
        "`np.load(path, mmap_mode='r')`"
        if name == "numpy.load"
        else "`chunksize=100_000`, or `usecols=` and `dtype=` for what you need"
    )
