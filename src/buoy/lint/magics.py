"""IPython's additions to Python, made harmless: each line keeps its number, and code inside a magic stays code."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Cell magics whose body runs in this interpreter and whose names stay defined afterwards.
_CODE_CELLS = frozenset(
    {
        "time",
        "capture",
        "prun",
        "wandb",
        "tensorboard",
        "memit",
        "mprun",
        "lprun",
        "heat",
        "debug",
        "snakeviz",
        "notify",
        "skip",
        "matplotlib",
        "warnings",
        "no_capture",
        "scalene",
        "memray_flamegraph",
    }
)
# `%%timeit` runs the body in a function of its own: code, but its names do not stay.
_SCOPED_CELLS = frozenset({"timeit"})
# Cell magics whose body is another language or another process.
_FOREIGN_CELLS = frozenset(
    {
        "bash",
        "sh",
        "script",
        "writefile",
        "file",
        "html",
        "HTML",
        "javascript",
        "js",
        "latex",
        "markdown",
        "svg",
        "SVG",
        "perl",
        "ruby",
        "pypy",
        "python",
        "python2",
        "python3",
        "cmd",
        "R",
        "sql",
        "bigquery",
        "cython",
        "cu",
        "cuda",
        "writetemplate",
        "shell",
        "system",
        "sx",
        "!",
        "bigquery_sql",
        "julia",
        "spark",
        "local",
    }
)
# Line magics that take a statement.
_CODE_LINES = frozenset({"time", "timeit", "prun", "memit", "capture", "lprun", "mprun"})
# Line magics after which names may exist that no source here defines.
_OPAQUE_LINES = frozenset(
    {
        "run",
        "pylab",
        "load",
        "loadpy",
        "store",
        "macro",
        "recall",
        "rerun",
        "edit",
        "R",
        "octave",
        "import_ipynb",
    }
)
# Words that IPython takes as commands without a `%` (automagic and shell aliases).
_COMMANDS = frozenset(
    {
        "cd",
        "ls",
        "ll",
        "pwd",
        "mkdir",
        "rmdir",
        "cp",
        "mv",
        "rm",
        "cat",
        "pip",
        "conda",
        "mamba",
        "less",
        "man",
        "env",
        "pip3",
        "wget",
        "git",
        "unzip",
        "apt",
        "who",
        "whos",
        "clear",
        "more",
    }
)

BARE_COMMANDS = frozenset({"ls", "pwd", "ll", "whos", "who", "clear", "cls", "hist", "history"})
"""Commands even alone on a line, where they would be a name."""

_ASSIGNED = re.compile(r"^(\s*)([A-Za-z_][\w.\[\], '\"]*?)\s*=\s*([!%])(?!=)")
_CELL_MAGIC = re.compile(r"^\s*%%\s*(!|\w+)(.*)$")
_LINE_MAGIC = re.compile(r"^(\s*)%\s*([\w.]+)(.*)$")
_HELP = re.compile(r"^\s*(\?{1,2}[\w.*%]+|%{0,2}[\w.*\[\]()]+\?{1,2})\s*;?\s*$")
_COMPOUND = re.compile(r"(?:for|while|if|with|try|def|class|async)\b")
_TIMEIT_OPTIONS = re.compile(r"^(\s*-[a-zA-Z]\s*\d*)*\s*")


@dataclass(slots=True)
class Plain:
    """A cell without magics."""

    python: str | None
    """None when the cell is not Python at all."""
    binds: tuple[str, ...] = ()
    opaque: bool = False
    shell: tuple[str, ...] = ()


def strip_magics(source: str) -> Plain:
    """The cell's Python, line for line; columns of code inside `%time` stay where they were.

    >>> strip_magics("!pip install keras\\nfiles = !ls\\n%time fit()").python.splitlines()
    ['pass', 'files = []', 'if 1: fit()']
    """
    lines = source.split("\n")
    shell: list[str] = []
    opaque = False
    start = 0
    while (first := _first_code(lines, start)) is not None and (found := _CELL_MAGIC.match(lines[first])):
        name, rest = found.group(1), found.group(2)
        shell.append(lines[first].strip())
        if name in _FOREIGN_CELLS or (name not in _CODE_CELLS and name not in _SCOPED_CELLS):
            # An unknown cell magic may do anything with its body, and may define names.
            return Plain(
                None,
                opaque=name not in _FOREIGN_CELLS,
                binds=_words(rest),
                shell=tuple(line.strip() for line in lines),
            )
        lines[first] = "pass" if name != "capture" or not _words(rest) else f"{_words(rest)[0]} = None"
        start = first + 1  # the body may begin with a cell magic of its own: `%%time`, then `%%capture`
    if not any(mark in source for mark in "!%?") and not any(_is_command(line) for line in lines):
        return Plain("\n".join(lines), shell=tuple(shell))
    out: list[str] = []
    scan = _LineState()
    skip_continuation = False
    for line in lines:
        if skip_continuation:  # the rest of `!cmd \` on several lines
            skip_continuation = line.rstrip().endswith("\\")
            out.append("")
            continue
        if scan.open:
            scan.feed(line)
            out.append(line)
            continue
        plain, is_magic, is_opaque = _plain_line(line)
        if is_magic:
            shell.append(line.strip())
            opaque = opaque or is_opaque
            skip_continuation = line.rstrip().endswith("\\")
            if skip_continuation and plain.rstrip().endswith("\\"):
                plain = plain.rstrip()[:-1]
        else:
            scan.feed(line)
        out.append(plain)
    return Plain("\n".join(out), opaque=opaque, shell=tuple(shell))


def _first_code(lines: list[str], start: int) -> int | None:
    """The first line that is neither blank nor a comment."""
    return next(
        (
            index
            for index in range(start, len(lines))
            if lines[index].strip() and not lines[index].lstrip().startswith("#")
        ),
        None,
    )


def _plain_line(line: str) -> tuple[str, bool, bool]:
    stripped = line.lstrip()
    indent = line[: len(line) - len(stripped)]
    if stripped.startswith("!") or _HELP.match(line):
        return indent + "pass", True, False
    if found := _LINE_MAGIC.match(line):
        name, rest = found.group(2), found.group(3)
        if name in _CODE_LINES and rest.strip():
            return _inline_code(line, indent, rest), True, False
        return indent + "pass", True, name in _OPAQUE_LINES
    if found := _ASSIGNED.match(line):
        return f"{found.group(1)}{found.group(2)} = []", True, False
    if _is_command(line):
        return indent + "pass", True, False
    return line, False, False


def _inline_code(line: str, indent: str, rest: str) -> str:
    """`%time x = f()` as `if 1: x = f()`, with the code in its own column."""
    code = rest.lstrip()
    options = _TIMEIT_OPTIONS.match(code)
    if options:
        code = code[options.end() :]
    if not code or code.startswith("-") or _COMPOUND.match(code):  # `if 1: for ...` would not parse
        return indent + "pass"
    room = len(line) - len(code)
    return (indent + "if 1:").ljust(room) + code


def _is_command(line: str) -> bool:
    word, _, rest = line.strip().partition(" ")
    if word not in _COMMANDS:
        return False
    rest = rest.strip()
    if rest.startswith(("..", "./", "~")):  # `cd ..`: no attribute begins like that
        return True
    return not rest.startswith(
        ("=", "(", ".", "[", ",", ":", "in ", "+", "==", "is ", "if ", "and ", "or ")
    ) and bool(rest or word in BARE_COMMANDS)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split() if word.isidentifier())


class _LineState:
    """Whether the next line continues a bracket, a string or a backslash: such a line cannot be a magic."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._backslash = False

    @property
    def open(self) -> bool:
        """True when the next line is not the start of a statement."""
        return self._depth > 0 or bool(self._quote) or self._backslash

    def feed(self, line: str) -> None:
        """Read one line."""
        self._backslash = False
        index, end = 0, len(line)
        while index < end:
            char = line[index]
            if self._quote:
                if char == "\\":
                    index += 2
                    continue
                if line.startswith(self._quote, index):
                    index += len(self._quote)
                    self._quote = ""
                    continue
                index += 1
                continue
            if char == "#":
                return
            if char in "\"'":
                self._quote = line[index : index + 3] if line[index : index + 3] in ('"""', "'''") else char
                index += len(self._quote)
                continue
            if char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth = max(0, self._depth - 1)
            elif char == "\\" and index == end - 1:
                self._backslash = True
            index += 1
        if len(self._quote) == 1 and not line.endswith("\\"):
            self._quote = (
                ""  # a one-line string cannot continue: the line is broken, not the rest of the cell
            )
