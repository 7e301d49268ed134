"""`# buoy: ignore[BY101]`: which findings a comment hides, and which comments hide nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.sources import Document

RULE = Rule("BY002", "unused-ignore", "a `# buoy: ignore` comment hides nothing")
_COMMENT = re.compile(r"#\s*buoy:\s*ignore(?:\[(?P<words>[^\]]*)\])?")
# A comment counts for every line of the statement it ends, but not for a whole function or class.
_MOST_LINES = 50


@dataclass(slots=True)
class Ignore:
    """One ignore comment."""

    line: int
    column: int
    end: int
    words: dict[str, frozenset[str]] | None
    """Each word in the brackets with the codes it stands for; None: every rule."""
    used: set[str] = field(default_factory=set)
    """The words that hid something; any code when there are no brackets."""

    def hides(self, code: str) -> bool:
        """Whether it speaks of this rule; remembers that it was needed."""
        if self.words is None:
            self.used.add(code)
            return True
        found = [word for word, codes in self.words.items() if code in codes]
        self.used.update(found)
        return bool(found)


class Ignores:
    """The ignore comments of a document; asked by the engine, and by rules that join several places in one finding."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._by_line = {comment.line: comment for comment in _find(document)}

    def __bool__(self) -> bool:
        return bool(self._by_line)

    def hides(self, code: str, span: Span) -> bool:
        """Whether a comment on one of the span's lines speaks of this rule."""
        if not self._by_line:
            return False
        lines = range(span.line, min(span.end_line, span.line + _MOST_LINES - 1) + 1)
        found = [self._by_line[line].hides(code) for line in lines if line in self._by_line]
        return any(found)

    def unused(self, ran: set[str]) -> list[Finding]:
        """A finding per comment (or word in it) that was not needed; rules that did not run are left out of account."""
        return [
            finding for ignore in self._by_line.values() for finding in _unused(ignore, ran, self._document)
        ]


def _find(document: Document) -> list[Ignore]:
    """All ignore comments; a mention inside a string is none."""
    found: list[Ignore] = []
    for cell in document.cells:
        if "buoy:" not in cell.text or (
            cell.tree is None and document.kind == "python" and len(document.cells) > 1
        ):
            continue
        comments = _comment_starts(cell.python)
        for index, line in enumerate(cell.lines()):
            match = _COMMENT.search(line)
            if match and (comments is None or any(row == index + 1 for row, _ in comments)):
                words = match.group("words")
                wanted = (
                    None
                    if words is None
                    else {word: _codes(word) for part in words.split(",") if (word := part.strip())}
                )
                found.append(Ignore(cell.first_line + index, match.start(), match.end(), wanted))
    return found


def _codes(word: str) -> frozenset[str]:
    from buoy.lint import rules

    return frozenset(rules.matching(word))


def _unused(ignore: Ignore, ran: set[str], document: Document) -> list[Finding]:
    idle: list[str] = []
    unknown: list[str] = []
    if ignore.words is None:
        from buoy.lint import rules

        # A rule that was switched off may be the one this comment is for.
        if ignore.used or not ran >= rules.matching("default"):
            return []
        message = "nothing here for `# buoy: ignore` to hide"
    else:
        unknown = [word for word, codes in ignore.words.items() if not codes]
        idle = [word for word, codes in ignore.words.items() if codes & ran and word not in ignore.used]
        if ignore.words and not idle and not unknown:
            return []
        message = f"nothing here for `# buoy: ignore` to hide ({', '.join(idle) or 'no rule is named'})"
        if unknown:
            message = f"unknown rule in `# buoy: ignore`: {', '.join(unknown)}"
    span = Span(ignore.line, ignore.column, ignore.line, ignore.end)
    hint = "remove the comment, or the rules that are not needed; `buoy check --rules` lists them all"
    return [Finding(span, "warning", message, hint, _removal(ignore, {*idle, *unknown}, document))]


def _removal(ignore: Ignore, idle: set[str], document: Document) -> Fix:
    rest = [word for word in ignore.words or () if word not in idle]
    line = document.line(ignore.line)
    tail = line[ignore.end :]
    after = ignore.end + len(tail) - len(tail.lstrip())
    start = len(line[: ignore.column].rstrip())
    if rest:
        edit = Edit(
            Span(ignore.line, ignore.column, ignore.line, ignore.end), f"# buoy: ignore[{', '.join(rest)}]"
        )
    elif tail.lstrip().startswith("#"):  # another comment behind it takes its place
        edit = Edit(Span(ignore.line, ignore.column, ignore.line, after), "")
    elif tail.strip():  # a reason in words: it stays, and stays a comment
        edit = Edit(Span(ignore.line, ignore.column, ignore.line, after), "# ")
    else:
        edit = Edit(Span(ignore.line, start, ignore.line, len(line)), "")
    return Fix("remove the unused ignore", (edit,), "safe")


def _comment_starts(source: str) -> set[tuple[int, int]] | None:
    """Places of comments; None when the source cannot be tokenised (then every match counts)."""
    import io
    import tokenize  # 4 ms, and few files have such a comment

    try:
        return {
            token.start
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None
