"""Reads the stacks that `faulthandler` writes."""

from __future__ import annotations

import os
import re
import sysconfig
from typing import NamedTuple

from buoy.text import whole_number

_LIBRARY = (os.path.dirname(os.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Where other interpreters than the one that reads keep theirs.
_INSTALLED = ("site-packages", "dist-packages", "/lib/python3", "<frozen", "<__array_function__")

_CELL = re.compile(r"(?:^|/)ipykernel_\d+/\d+\.py$|^<ipython-input-")
# What faulthandler calls the signals.
_HEADLINES = {
    "Segmentation fault": 11,
    "Aborted": 6,
    "Floating point exception": 8,
    "Floating-point exception": 8,
    "Illegal instruction": 4,
    "Bus error": 7,
}

DEEP = 60
"""faulthandler shows at most 100 frames; a stack this deep made of few places is a recursion."""


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        place = f"line {self.line} of a cell" if is_cell(self.file) else f"{self.file}:{self.line}"
        return place if is_cell(self.file) and self.function == "<module>" else f"{place} in {self.function}"


def last_stack(text: str) -> list[Frame]:
    """The frames of the thread that the last dump found at work (else the main one), innermost first."""
    stacks: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith(("Current thread", "Thread ", "Stack (")):
            stacks.append((line.startswith("Current"), []))
        elif stacks:
            frame = _frame(line)
            if frame is not None:
                stacks[-1][1].append(frame)
    current = [frames for is_current, frames in stacks if is_current]
    if current:
        return current[-1]
    # A dump of all threads without a current one lists the main thread last.
    return stacks[-1][1] if stacks else []


def user_frame(text: str) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in last_stack(text) if is_user_file(frame.file)), None)


def is_user_file(path: str) -> bool:
    """Whether a source file is the user's own, not Python's, an installed package's or ours."""
    return not any(part in path for part in _INSTALLED) and not path.startswith((*_LIBRARY, _OURS))


def is_cell(path: str) -> bool:
    """Whether this is what a kernel calls the code of a cell: a file that is not there, named by a number.

    >>> is_cell("/tmp/ipykernel_417/2888275880.py"), is_cell("<ipython-input-3-5f1a>"), is_cell("train.py")
    (True, True, False)
    """
    return _CELL.search(path) is not None


def cell_of(path: str, known: str) -> str | None:
    """The cell that a file is, by its name or by the lines `NUMBER FILE` that the kernel left; the last that fits.

    >>> cell_of("/tmp/ipykernel_417/28.py", "3 28.py\\n4 31.py\\n"), cell_of("<ipython-input-7-5f1a>", "")
    ('In [3]', 'In [7]')
    >>> cell_of("/tmp/ipykernel_417/99.py", "3 28.py\\n") is None
    True
    """
    if not is_cell(path):
        return None
    if (named := re.match(r"<ipython-input-(\d+)-", path)) is not None:
        return f"In [{named[1]}]"
    name = os.path.basename(path)
    numbers = [
        number for number, _, file in (line.partition(" ") for line in known.splitlines()) if file == name
    ]
    return f"In [{numbers[-1]}]" if numbers and numbers[-1].isdigit() else None


def is_recursion(text: str) -> bool:
    """Whether a stack text shows the same few places over and over, or says so itself."""
    if "stack overflow" in text.lower():
        return True
    frames = last_stack(text)
    return len(frames) >= DEEP and len(set(frames)) * 10 <= len(frames)


def headline(text: str) -> str | None:
    """`Fatal Python error: ...`, if the text says so."""
    for line in text.splitlines():
        if line.startswith("Fatal Python error"):
            return line
    return None


def signal_of(words: str) -> int | None:
    """The signal a headline speaks of; None for a fatal error of another kind."""
    return next((signal for name, signal in _HEADLINES.items() if words.endswith(name)), None)


def _frame(line: str) -> Frame | None:
    # `  File "train.py", line 12 in loss`
    if not line.startswith('  File "'):
        return None
    file, _, rest = line[8:].rpartition('", line ')
    digits, _, function = rest.partition(" in ")
    line_number = whole_number(digits)
    return Frame(file, line_number, function.strip()) if file and line_number is not None else None
