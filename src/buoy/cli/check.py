"""`buoy check`: the lines that will kill the session, and the fix."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from buoy.cli.parser import Parser
from buoy.errors import ExitCode, UsageError
from buoy.lint import engine, rules
from buoy.lint.sources import MAX_FILE
from buoy.lint.target import target_for
from buoy.text import visible

_DESCRIPTION = "Find the lines that will kill a training session, before it starts."
_EPILOG = """\
exit codes: 0 nothing (or notes only), 1 findings, 2 error; with --diff: 0 nothing to change, 1 changes.
Hide a finding with `# buoy: ignore[BY401]` on its line. `buoy explain BY401` prints its page."""
FORMATS = ("full", "concise", "json", "github", "sarif")


def execute(arguments: list[str]) -> int:
    """Run the verb: 0 clean (or notes only), 1 findings, 2 error."""
    options = _parser().parse_args(arguments)
    _take_back_paths(options)
    settings = read_settings()
    selected = options.select or settings.select
    codes = rules.choose(selected, [*settings.ignore, *options.ignore])
    if options.rules:
        return _list_rules(codes)
    target = target_for(options.on or settings.on)
    fixing = options.fix or options.unsafe_fixes or options.diff
    if "-" in options.paths:
        _refuse_with_stdin(options)
        data = sys.stdin.buffer.read(MAX_FILE + 1)
        name = options.stdin_name or ("-" if not data.lstrip().startswith(b"{") else "stdin.ipynb")
        report = engine.Report(engine.check_source(name, data, target, codes), files=1)
    else:
        paths = options.paths or ["."]
        exclude = [engine.Exclude(word, settings.folder) for word in settings.exclude]
        exclude += [engine.Exclude(word) for word in options.exclude or ()]
        report = engine.check_files(engine.find_files(paths, exclude), target, codes)
        if not report.files:
            sys.stderr.write(f"buoy: no script and no notebook to check in {visible(', '.join(paths))}\n")
    unwritten = False
    if fixing:
        from buoy.lint.fixer import fix

        report, outcome = fix(report, target, codes, unsafe=options.unsafe_fixes, diff=options.diff)
        if options.diff:
            return int(ExitCode.FOUND if outcome.fixed and not options.exit_zero else ExitCode.OK)
        unwritten = outcome.unwritten
    _print(report, options.format)
    if report.broken or unwritten:
        return int(ExitCode.ERROR)
    return int(ExitCode.FOUND if report.failed and not options.exit_zero else ExitCode.OK)


def _parser() -> Parser:
    parser = Parser("buoy check", "buoy check [PATH ...] [options]", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="scripts, notebooks, Markdown files, folders; `-` for standard input (default: .)",
    )
    parser.add_argument(
        "--on",
        nargs="+",
        type=_words,
        metavar="ID",
        help="where it will run: colab-t4, kaggle-t4x2, ..., this (default)",
    )
    parser.add_argument("--format", choices=FORMATS, default="full", help="default: full")
    parser.add_argument("--fix", action="store_true", help="apply the safe fixes")
    parser.add_argument(
        "--unsafe-fixes", action="store_true", help="apply also those that change what the program does"
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="print the changes of --fix as a patch and make none; exit 1 if there are any",
    )
    parser.add_argument(
        "--select",
        nargs="+",
        type=_words,
        metavar="RULE",
        help="codes, starts of codes, names, `default`, `all`",
    )
    parser.add_argument(
        "--ignore", nargs="+", type=_words, action="extend", metavar="RULE", help="leave these out"
    )
    parser.add_argument(
        "--exclude",
        type=_words,
        action="extend",
        metavar="PATTERN",
        help="paths or folder names to leave out",
    )
    parser.add_argument(
        "--stdin-name", metavar="NAME", help="the name that decides how `-` is read (x.ipynb, x.md)"
    )
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 even with findings")
    parser.add_argument("--rules", action="store_true", help="list the rules and exit")
    return parser


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _take_back_paths(options: argparse.Namespace) -> None:
    """`--on colab-t4 train.py`: a list also swallows the path behind it. What is no id or rule and looks like a
    path is one.
    """
    for name, known in (("on", _is_place), ("select", rules.matching), ("ignore", rules.matching)):
        kept: list[str] = []
        for words in getattr(options, name) or ():
            path = words[0] if len(words) == 1 else ""
            looks_like_one = os.path.exists(path) or path.endswith((".py", ".ipynb"))
            if looks_like_one and not known(path):
                options.paths.append(path)
            else:
                kept += words
        setattr(options, name, kept)


def _is_place(word: str) -> bool:
    from buoy.machine import platforms

    return word == "this" or word in {row.id for row in platforms.all_platforms()}


def _refuse_with_stdin(options: argparse.Namespace) -> None:
    given = {"--fix": options.fix, "--unsafe-fixes": options.unsafe_fixes, "--diff": options.diff}
    asked = [word for word in given if given[word]]
    if asked:
        raise UsageError(
            "standard input cannot be fixed",
            received=f"`-` with {' '.join(asked)}",
            expected="a path",
            hint=f"`buoy check FILE {' '.join(asked)}`",
        )
    if options.paths != ["-"]:
        raise UsageError(
            "standard input is checked alone",
            received=" ".join(options.paths),
            expected="`-`, or paths",
            hint="run the command twice",
        )


def _list_rules(codes: set[str]) -> int:
    for code in rules.all_codes():
        rule = rules.rule(code)
        sys.stdout.write(f"{code} {'on ' if code in codes else 'off'} {rule.name}: {rule.summary}\n")
    return int(ExitCode.OK)


def _print(report: engine.Report, style: str) -> None:
    from buoy.view import findings

    if style in ("full", "concise"):
        paint = findings.Paint(sys.stdout)
        sys.stdout.write(findings.full(report, paint) if style == "full" else findings.concise(report, paint))
        if style == "full" and report.diagnostics:
            code = report.diagnostics[0].code
            sys.stderr.write(
                f"hint: `buoy explain {code}` says more; `# buoy: ignore[{code}]` on the line hides it\n"
            )
        return
    machine = {"json": findings.as_json, "github": findings.github, "sarif": findings.sarif}
    sys.stdout.write(machine[style](report))


KEYS = ("select", "ignore", "on", "exclude")
SECTIONS = ("check",)


@dataclass(slots=True)
class Settings:
    """What can be set for a project."""

    select: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    on: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    folder: str = "."
    """What `exclude` is relative to: the folder of the file that says it."""


def read_settings() -> Settings:
    """The settings for this folder; every error in them is reported at once."""
    settings = Settings()
    path, table = _nearest_settings()
    if table is not None:
        settings.folder = os.path.dirname(path)
        _take_settings(settings, table, path)
    for key in KEYS:
        text = os.environ.get(f"BUOY_CHECK_{key.upper()}")
        if text is not None:
            setattr(settings, key, [word for word in text.replace(",", " ").split() if word])
            if key == "exclude":
                settings.folder = "."
    return settings


def _nearest_settings() -> tuple[str, Any]:
    folder = os.getcwd()
    while True:
        for name in ("buoy.toml", "pyproject.toml"):
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue
            import tomllib

            try:
                with open(path, "rb") as file:
                    content: dict[str, Any] = tomllib.load(file)
            except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"cannot read {path}",
                    received=str(error),
                    expected="TOML",
                    hint="fix or remove the file",
                ) from None
            tools = content.get("tool", {})
            tools = tools if isinstance(tools, dict) else {}
            own = content if name == "buoy.toml" else tools.get("buoy", {})
            if name == "buoy.toml" or "buoy" in tools:
                _refuse_unknown_sections(own, path)
                return path, own.get("check", {}) if isinstance(own, dict) else own
        parent = os.path.dirname(folder)
        if parent == folder:
            return "", None
        folder = parent


def _refuse_unknown_sections(table: Any, path: str) -> None:
    from difflib import get_close_matches

    unknown = [key for key in table if key not in SECTIONS] if isinstance(table, dict) else []
    if unknown:
        before = "" if path.endswith("buoy.toml") else "tool.buoy."
        near = get_close_matches(unknown[0], SECTIONS, n=1)
        raise UsageError(
            f"{path} has a section that buoy does not know",
            received=", ".join(f"[{before}{key}]" for key in unknown),
            expected=" or ".join(f"[{before}{key}]" for key in SECTIONS),
            hint=f"did you mean `[{before}{near[0]}]`?" if near else "`buoy explain check` shows an example",
        )


def _take_settings(settings: Settings, table: Any, path: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(
            f"`check` in {path} is not a table",
            received=repr(table),
            expected="a table",
            hint="write `[tool.buoy.check]`",
        )
    from difflib import get_close_matches

    problems = []
    for key, value in table.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            problems.append(
                f"unknown key {key!r}"
                + (f": did you mean `{near[0]}`?" if near else f": the keys are {', '.join(KEYS)}")
            )
        elif not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            problems.append(f"{key!r} is {value!r}; expected a list of strings")
        else:
            setattr(settings, key, value)
    if problems:
        raise UsageError(
            f"{path} has settings that buoy cannot use",
            received="; ".join(problems),
            expected="[tool.buoy.check] with select, ignore, on, exclude",
            hint="`buoy explain check` shows an example",
        )
