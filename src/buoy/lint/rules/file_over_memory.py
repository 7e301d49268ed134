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

# Bytes in memory per byte of file: text becomes numbers and Python strings (measured 2 to 10 for CSV; 5 is the
# usual guess,
# 2 is what even a purely numeric file needs), .npy is mapped one to one.
_READERS = {
    "pandas.read_csv": 2,
    "pandas.read_table": 2,
    "numpy.loadtxt": 2,
    "numpy.genfromtxt": 2,
    "numpy.load": 1,
}


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Reading calls whose file exists beside the code, with its size; no file, no finding."""
    if facts.document.path == "-":
        return
    folder = os.path.dirname(os.path.abspath(facts.document.path))
    for name, growth in _READERS.items():
        for call in facts.called(name):
            path = call.node.args[0] if call.node.args else None
            if not isinstance(path, ast.Constant) or not isinstance(path.value, str) or _in_pieces(call):
                continue
            size = _size(os.path.join(folder, path.value))
            limit = target.ram
            if size is None or limit is None or size * growth < limit:
                continue
            message = (
                f"{path.value} has {format_bytes(size)}; read whole it takes at least "
                f"{format_share(size * growth, limit)} of {target.words}"
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
