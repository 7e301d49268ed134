"""`--fix` and `--diff`: applies fixes file by file until none is left, and writes the files or shows the patch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from buoy.lint import engine, fixer
from buoy.lint.model import Diagnostic
from buoy.lint.sources import Unreadable
from buoy.lint.target import Target
from buoy.text import joined, visible

_MOST_ROUNDS = 10
_CONTEXT = 3


class Mender:
    """Mends the files of one report."""

    def __init__(
        self,
        target: Target,
        codes: set[str],
        *,
        unsafe: bool,
        diff: bool,
    ) -> None:
        self._target, self._codes = target, codes
        self._unsafe, self._diff = unsafe, diff
        self.mended = 0
        """Findings mended, or that would be."""
        self.unwritten = False
        """A mended file could not be written."""

    def mend(self, report: engine.Report) -> engine.Report:
        """Mend what can be mended; the report of what is left."""
        left = engine.Report(files=report.files)
        by_path: dict[str, list[Diagnostic]] = {}
        for item in report.diagnostics:
            by_path.setdefault(item.path, []).append(item)
        for path, diagnostics in by_path.items():
            if fixer.fixable(diagnostics, self._unsafe):
                diagnostics = self._file(path, diagnostics)
            left.diagnostics += diagnostics
        verb = "would mend" if self._diff else "mended"
        sys.stderr.write(f"{verb} {self.mended} finding{'s' if self.mended != 1 else ''}\n")
        return left

    def _file(self, path: str, found: list[Diagnostic]) -> list[Diagnostic]:
        left, done, before = found, 0, b""
        try:
            before = data = engine.read_file(path)
            for _ in range(_MOST_ROUNDS):
                data, mended = fixer.apply(path, data, left, self._unsafe)
                if not mended:
                    break
                done += len(mended)
                left = engine.check_source(path, data, self._target, self._codes)
        except Unreadable as error:
            sys.stderr.write(f"buoy: {visible(path)} was not mended: {error}\n")
            return found
        if data != before and self._diff:
            _show(path, before, data)
        elif data != before:
            try:
                fixer.write(path, data)
            except OSError as error:
                sys.stderr.write(
                    f"buoy: {visible(path)} was not mended: {error.strerror}; `--diff` shows the change\n"
                )
                self.unwritten = True
                return found
        self.mended += done
        return [self._without_refused_fix(item) for item in left]

    def _without_refused_fix(self, item: Diagnostic) -> Diagnostic:
        """A fix that was tried and did not fit is offered no more."""
        return replace(item, fix=None) if fixer.fixable([item], self._unsafe) else item


def _show(path: str, before: bytes, after: bytes) -> None:
    """Print a patch, byte for byte, so that `patch -p0` and `git apply -p0` take it; for a terminal one to read."""
    # Each byte as a character, so that no encoding and no exotic line end gets in the way.
    old, new = (data.decode("latin-1") for data in (before, after))
    text = "".join(_patch(_file_name(path), old, new)).encode("latin-1")
    sys.stdout.flush()
    if sys.stdout.isatty():
        sys.stdout.write(joined(text.decode("utf-8", "replace").split("\n")))
        return
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is not None:
        buffer.write(text)
    else:
        sys.stdout.write(text.decode("utf-8", "replace"))


def _file_name(path: str) -> str:
    """As patches write it, a character for each byte: with quotes and C's escapes where it is no plain name."""
    name = os.fsencode(path).decode("latin-1")
    if path.isprintable():
        return name
    return '"' + name.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def _patch(path: str, old: str, new: str) -> Iterator[str]:
    from difflib import unified_diff

    for line in unified_diff(_lines(old), _lines(new), path, path, n=_CONTEXT):
        yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """Cut at line feeds alone, as `patch` does."""
    pieces = text.split("\n")
    return [piece + "\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
