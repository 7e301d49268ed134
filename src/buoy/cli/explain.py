"""`buoy explain`: a page of the manual, without a network: a rule, a cause of death, or a guide."""

from __future__ import annotations

import os
import re
import sys

from buoy.cli.parser import Parser
from buoy.errors import ExitCode, UsageError

_DESCRIPTION = (
    "Print what buoy knows about a rule (BY401), a cause of death (kernel-oom) or a subject (checkpoints)."
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# In the wheel the pages are inside the package; in a checkout they are where users read them.
_FOLDERS = (os.path.join(_PACKAGE, "docs"), os.path.join(os.path.dirname(os.path.dirname(_PACKAGE)), "docs"))
_VERDICTS = "verdicts.md"


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    parser = Parser("buoy explain", "buoy explain [TOPIC]", _DESCRIPTION)
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="without one: lists all there are")
    chosen = parser.parse_args(arguments)
    sys.stdout.write(_overview() if chosen.topic is None else page(chosen.topic))
    return int(ExitCode.OK)


def page(topic: str) -> str:
    """The page or section about a rule's code or name, a cause's id, or a subject."""
    word = topic.lower()
    rules, sections, guides = _rules(), _sections(), _guides()
    for code, name in rules.items():
        if word in (code.lower(), name):
            return _plain(_read("rules", f"{code}.md"))
    if word in sections:
        return _plain(f"# {word}\n\n{sections[word]}\n\n{_evidence(word)}")
    if word in guides:
        return _plain(_read(f"{word}.md"))
    from difflib import get_close_matches

    known = [*rules, *rules.values(), *sections, *guides]
    near = get_close_matches(topic.upper(), rules, n=1, cutoff=0.8) or get_close_matches(word, known, n=1)
    raise UsageError(
        "no page about that",
        received=repr(topic),
        expected="a rule, a cause of death or a subject",
        hint=f"did you mean `buoy explain {near[0]}`?" if near else "`buoy explain` lists them",
    )


def _overview() -> str:
    rules = "\n".join(f"  {code}  {name}" for code, name in _rules().items())
    return (
        f"Rules of `buoy check`:\n{rules}\n\nCauses of death, as `buoy why` names them:\n{_listed(_sections())}\n\n"
        f"Subjects:\n{_listed(_guides())}\n"
    )


def _listed(names: dict[str, str] | list[str]) -> str:
    from textwrap import fill

    return fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _folder() -> str:
    for folder in _FOLDERS:
        if os.path.isfile(os.path.join(folder, _VERDICTS)):
            return folder
    raise UsageError("the pages are not there", received=_FOLDERS[0], expected="the manual that comes with buoy",
                     hint="install buoy again")  # fmt: skip


def _read(*names: str) -> str:
    with open(os.path.join(_folder(), *names), encoding="utf-8") as file:
        return file.read()


def _rules() -> dict[str, str]:
    """Code -> name, by the first line of each page: `# BY401 kept-graph`."""
    found = {}
    for name in sorted(os.listdir(os.path.join(_folder(), "rules"))):
        code, _, rest = _read("rules", name).partition("\n")[0].removeprefix("# ").partition(" ")
        found[code] = rest
    return found


def _guides() -> list[str]:
    return sorted(name.removesuffix(".md") for name in os.listdir(_folder()) if name.endswith(".md"))


def _sections() -> dict[str, str]:
    """What is written about each cause: its heading is its id."""
    parts = re.split(r"^### ([a-z-]+)$", _read(_VERDICTS), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _evidence(cause: str) -> str:
    """The cause's row of the table, in words."""
    row = re.search(rf"^\| `{cause}` \| (.*?) \| (.*?) ?\| .*\|$", _read(_VERDICTS), re.MULTILINE)
    if row is None:
        return f"When buoy says so: `buoy explain {_VERDICTS.removesuffix('.md')}`"
    graded = [f"certain: {row[1]}", row[2]]
    return "## Evidence\n\n" + "\n\n".join(f"{words[0].upper()}{words[1:]}." for words in graded if words)


def _plain(text: str) -> str:
    """For a terminal: no notes to our own tests, and links as what to type."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)?(?:rules/)?([\w-]+)\.md[^)]*\)", r"\1 (`buoy explain \2`)", text)
    return text.rstrip("\n") + "\n"
