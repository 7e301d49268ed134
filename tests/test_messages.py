"""Every sentence that buoy can show, collected in `golden/messages.txt`: read as a whole, changed on purpose.

    $ python -m tests.test_messages     # writes the file anew from the source

A string with three or more words that is no docstring counts as a sentence; `{}` stands for what is filled in.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "buoy"
GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
TRANSLATED = re.compile(
    r"\b(anew|beside that|mend(s|ed)?|want of memory|second home|told to stop|(?<!cannot )tells?|goes on from"
    r"|going on from|put back|cannot be cut|begins? anew|the person|people)\b"
)
"""Words of a first version that spoke like a translation; the vocabulary is in docs/contributing.md."""


def sentences() -> list[str]:
    """`file: sentence`, sorted, each once."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        parts = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = _text(node) if id(node) not in parts else ""
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text.strip():
                found.add(f"{path.relative_to(PACKAGE).as_posix()}: {' '.join(text.split())}")
    return sorted(found)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def test_the_collected_sentences_are_those_of_the_source() -> None:
    known = GOLDEN.read_text().splitlines()
    new, gone = sorted(set(sentences()) - set(known)), sorted(set(known) - set(sentences()))

    assert not new and not gone, "read them, then `python -m tests.test_messages` collects them again"


def test_no_sentence_speaks_like_a_translation() -> None:
    """The vocabulary is in docs/contributing.md."""
    assert TRANSLATED.search("the parts are put back and begin anew"), "or the look finds nothing"
    assert [line for line in sentences() if TRANSLATED.search(line)] == []


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("".join(f"{line}\n" for line in sentences()))
    sys.stderr.write(f"{len(sentences())} sentences\n")
