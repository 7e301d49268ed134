"""Runs the rules: files in, diagnostics out. One bad file, cell or rule never hides the rest."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from buoy.errors import UsageError
from buoy.lint import ignores, rules
from buoy.lint.collector import collect
from buoy.lint.facts import Facts
from buoy.lint.model import Diagnostic, Finding, Place, Rule, Span, fingerprint
from buoy.lint.sources import MAX_FILE, Document, Problem, Unreadable, read_document
from buoy.lint.target import Target
from buoy.machine.files import read_bounded

UNREADABLE = Rule("BY001", "unreadable-file", "the file cannot be read as what its name says")
INTERNAL = Rule("BY000", "internal-error", "a rule of buoy failed on this file; the others ran")
_SUFFIXES = (".py", ".ipynb")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})
_SOURCE_LINES = 6
_UNREAD_HINT = "exclude it, or repair it and run `buoy check` again"


@dataclass(slots=True)
class Report:
    """What a check found."""

    diagnostics: list[Diagnostic] = field(default_factory=list)
    files: int = 0
    cells: int = 0
    """Cells that were read as they were run, in place of files."""

    @property
    def failed(self) -> bool:
        """Whether there is anything beyond notes."""
        return any(item.severity != "note" for item in self.diagnostics)

    @property
    def broken(self) -> bool:
        """Whether buoy itself failed somewhere."""
        return any(item.code == INTERNAL.code for item in self.diagnostics)


@dataclass(frozen=True, slots=True)
class Exclude:
    """A path, a pattern of one or the name of a folder to leave out, seen from the folder it was written for."""

    pattern: str
    folder: str = "."

    def matches(self, path: str) -> bool:
        """Whether it speaks of this file."""
        from fnmatch import fnmatch

        seen = os.path.relpath(os.path.abspath(path), os.path.abspath(self.folder))
        pattern, parts = os.path.normpath(self.pattern), seen.split(os.sep)
        above = [os.path.join(*parts[: index + 1]) for index in range(len(parts))]
        return any(fnmatch(text, pattern) for text in (*parts, *above))


def find_files(paths: Sequence[str], exclude: Sequence[Exclude] = ()) -> Iterator[str]:
    """Scripts and notebooks below the given paths, each once, in order; a path given by name is taken as it is."""
    seen: set[str] = set()
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(
                "no such file or folder",
                received=repr(path),
                expected="a script, a notebook or a folder",
                hint="`buoy check .` reads everything below this folder",
            )
        for found in _walk(path) if os.path.isdir(path) else [path]:
            below = os.path.isabs(found) and found.startswith(os.getcwd() + os.sep)
            shown = os.path.relpath(found) if below else os.path.normpath(found)
            # A link and its target are one file: fixed twice it would be damaged.
            real = os.path.realpath(found)
            if real not in seen and not any(item.matches(shown) for item in exclude):
                seen.add(real)
                yield shown


def _walk(folder: str) -> Iterator[str]:
    for here, folders, files in os.walk(folder):  # does not follow links, so a loop of links cannot hold us
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        yield from (os.path.join(here, name) for name in sorted(files) if name.endswith(_SUFFIXES))


def read_file(path: str) -> bytes:
    """The file's bytes; raises Unreadable for what cannot or must not be read (a pipe would wait for ever)."""
    try:
        return read_bounded(path, MAX_FILE + 1, follow=True)
    except OSError as error:
        raise Unreadable(f"it cannot be opened: {error.strerror or error}") from None


def check_files(paths: Iterable[str], target: Target, codes: set[str]) -> Report:
    """Check files by path."""
    report = Report()
    # Syntax trees are many small objects: looking for garbage among them costs a third of the time and finds none.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for path in paths:
            report.files += 1
            try:
                report.diagnostics += check_source(path, read_file(path), target, codes)
            except Unreadable as error:
                report.diagnostics.append(_unreadable(path, str(error)))
    finally:
        if collecting:
            gc.enable()
    return report


def check_source(path: str, data: bytes, target: Target, codes: set[str]) -> list[Diagnostic]:
    """Check one file's bytes; `path` decides how they are read and is what the diagnostics show."""
    try:
        document = read_document(path, data)
    except Unreadable as error:
        return [_unreadable(path, str(error))]
    try:
        facts = collect(document)
    except RecursionError:
        return [_unreadable(path, "its code is nested too deeply")]
    found = list(_run(facts, target, codes))
    found += [
        (UNREADABLE, _unread(document, cell.problem))
        for cell in document.cells
        if cell.problem and cell.problem.unread
    ]
    found += _apply_ignores(found, facts, codes)
    diagnostics = _diagnostics(document, found)
    facts.release()
    return diagnostics


def _run(facts: Facts, target: Target, codes: set[str]) -> Iterator[tuple[Rule, Finding]]:
    for rule, find in rules.load(codes):
        try:
            for finding in find(facts, target):
                yield rule, finding
        except Exception as error:  # noqa: BLE001 - a bug in one rule is reported and must not hide the others' findings
            message = f"{rule.code} {rule.name} failed: {type(error).__name__}: {error}"
            yield (
                INTERNAL,
                Finding(
                    Span(1, 0, 1, 0),
                    "error",
                    message,
                    "please report this with the file, if you can share it",
                ),
            )


def _apply_ignores(
    found: list[tuple[Rule, Finding]], facts: Facts, codes: set[str]
) -> list[tuple[Rule, Finding]]:
    """Take out of `found` what comments hide; return findings about comments that hide nothing."""
    comments = facts.ignores
    if not comments:
        return []
    found[:] = [item for item in found if not comments.hides(item[0].code, item[1].span)]
    if ignores.RULE.code not in codes:
        return []
    return [(ignores.RULE, finding) for finding in comments.unused(codes)]


def _diagnostics(document: Document, found: list[tuple[Rule, Finding]]) -> list[Diagnostic]:
    found.sort(key=lambda item: (item[1].span, item[0].code))
    count: Counter[tuple[str, str]] = Counter()
    shown: set[tuple[Span, str]] = set()
    diagnostics = []
    for rule, finding in found:
        if (finding.span, rule.code) in shown:
            continue
        shown.add((finding.span, rule.code))
        span = finding.span
        lines = tuple(
            document.line(number)
            for number in range(span.line, min(span.end_line, span.line + _SOURCE_LINES - 1) + 1)
        )
        key = (rule.code, lines[0].strip() if lines else "")
        diagnostics.append(
            Diagnostic(
                document.path,
                rule.code,
                rule.name,
                finding.severity,
                finding.message,
                finding.hint,
                document.place(span.line, span.column),
                document.place(span.end_line, span.end_column),
                lines,
                fingerprint(*key, count[key]),
                span,
                finding.fix,
            )
        )
        count[key] += 1
    return diagnostics


def _unread(document: Document, problem: Problem) -> Finding:
    """A cell or script that was not looked at; the rest of the file was."""
    what = "cell" if document.kind == "notebook" else "code" if document.kind == "markdown" else "file"
    span = Span(problem.line, 0, problem.line, 0)
    return Finding(span, "error", f"this {what} was not checked: {problem.message}", _UNREAD_HINT)


def _unreadable(path: str, why: str) -> Diagnostic:
    place = Place(1, 1)
    return Diagnostic(
        path,
        UNREADABLE.code,
        UNREADABLE.name,
        "error",
        f"this file was not checked: {why}",
        _UNREAD_HINT,
        place,
        place,
        (),
        fingerprint(UNREADABLE.code, why, 0),
        Span(1, 0, 1, 0),
    )
