"""`# buoy: ignore[BY101]`: which findings a comment hides, and which comments hide nothing."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, field

from buoy.lint.document import Document
from buoy.lint.model import Edit, Finding, Fix, Rule, Span

RULE = Rule("BY002", "unused-ignore", "a `# buoy: ignore` comment hides nothing")
_COMMENT = re.compile(r"#\s*buoy:\s*ignore(?:\[(?P<codes>[^\]]*)\])?")


@dataclass(slots=True)
class Ignore:
    """One ignore comment."""

    line: int
    column: int
    end: int
    codes: frozenset[str] | None
    """None: every rule."""
    used: set[str] = field(default_factory=set)

    def hides(self, code: str) -> bool:
        """Whether it speaks of this rule; remembers that it was needed."""
        if self.codes is not None and code not in self.codes:
            return False
        self.used.add(code)
        return True


def find_ignores(document: Document) -> list[Ignore]:
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
            if match and (
                comments is None
                or (index + 1, match.start()) in comments
                or any(row == index + 1 for row, _ in comments)
            ):
                codes = match.group("codes")
                wanted = (
                    None
                    if codes is None
                    else frozenset(code.strip() for code in codes.split(",") if code.strip())
                )
                found.append(Ignore(cell.first_line + index, match.start(), match.end(), wanted))
    return found


def unused(ignores: list[Ignore], ran: set[str], document: Document) -> list[Finding]:
    """A finding per comment (or code in it) that was not needed; rules that did not run are left out of account."""
    findings = []
    for ignore in ignores:
        idle = sorted((ignore.codes or set()) - ignore.used) if ignore.codes is not None else []
        unknown = [code for code in idle if not re.fullmatch(r"BY\d{3}", code)]
        idle = [code for code in idle if code in ran or code in unknown]
        if not idle and (ignore.codes or ignore.used):
            continue
        span = Span(ignore.line, ignore.column, ignore.line, ignore.end)
        what = ", ".join(idle) if idle else "any rule"
        message = f"nothing here for `# buoy: ignore` to hide ({what})"
        if unknown:
            message = f"unknown rule in `# buoy: ignore`: {', '.join(unknown)}"
        findings.append(
            Finding(
                span,
                "warning",
                message,
                "remove the comment, or the codes that are not needed",
                _removal(ignore, idle, document),
            )
        )
    return findings


def _removal(ignore: Ignore, idle: list[str], document: Document) -> Fix:
    rest = sorted((ignore.codes or frozenset()) - set(idle))
    line = document.line(ignore.line)
    if rest:
        edit = Edit(
            Span(ignore.line, ignore.column, ignore.line, ignore.end), f"# buoy: ignore[{', '.join(rest)}]"
        )
    else:
        start = len(line[: ignore.column].rstrip())
        edit = Edit(Span(ignore.line, start, ignore.line, ignore.end), "")
    return Fix("remove the unused ignore", (edit,), "safe")


def _comment_starts(source: str) -> set[tuple[int, int]] | None:
    """Places of comments; None when the source cannot be tokenised (then every match counts)."""
    try:
        return {
            token.start
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None
