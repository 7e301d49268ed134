"""`buoy check`: the lines that will kill the session, and the fix."""

from __future__ import annotations

import argparse
import os
import sys

from buoy.errors import ExitCode, UsageError
from buoy.lint import baseline, config, engine, fixer, rules
from buoy.lint.model import Diagnostic
from buoy.lint.sources import MAX_FILE, Unreadable
from buoy.lint.target import Target, target_for

FORMATS = ("full", "concise", "json", "github", "sarif")
_MOST_ROUNDS = 10


def execute(arguments: list[str]) -> int:
    """Run the verb: 0 clean (or notes only), 1 findings, 2 error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _take_back_paths(options)
    settings = config.load()
    selected = [code for word in options.select or () for code in word.split(",") if code]
    codes = rules.choose(selected or settings.select, [*settings.ignore, *(options.ignore or [])])
    if options.rules:
        return _list_rules(codes)
    target = target_for(options.on or settings.on)
    mending = options.fix or options.unsafe_fixes or options.diff
    if options.paths == ["-"]:
        if mending:
            raise UsageError(
                "standard input cannot be mended",
                received="`-` with --fix",
                expected="a path",
                hint="`buoy check FILE --fix`",
            )
        data = sys.stdin.buffer.read(MAX_FILE + 1)
        name = options.stdin_name or ("-" if not data.lstrip().startswith(b"{") else "stdin.ipynb")
        report = engine.Report(engine.check_source(name, data, target, codes), files=1)
    else:
        files = list(engine.find_files(options.paths or ["."], [*settings.exclude, *(options.exclude or [])]))
        report = engine.check_files(files, target, codes)
    if options.write_baseline:
        baseline.write(options.write_baseline, report)
        sys.stderr.write(f"wrote {options.write_baseline}: {len(report.diagnostics)} known findings\n")
        return int(ExitCode.OK)
    if known := options.baseline or settings.baseline:
        baseline.hide(report, baseline.read(known))
    if mending:
        report = _mend(report, target, codes, options.unsafe_fixes, options.diff)
        if options.diff:
            return int(ExitCode.FOUND if report.failed else ExitCode.OK)
    _print(report, options.format)
    if report.broken:
        return int(ExitCode.ERROR)
    return int(ExitCode.FOUND if report.failed and not options.exit_zero else ExitCode.OK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="buoy check",
        description="Find the lines that will kill a training session, before it starts.",
        epilog=(
            "exit codes: 0 nothing (or notes only), 1 findings, 2 error. Hide one with `# buoy: "
            "ignore[BY401]`. Rules: docs/rules/."
        ),
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="scripts, notebooks, Markdown files, folders; `-` for standard input (default: .)",
    )
    parser.add_argument(
        "--on", nargs="+", metavar="ID", help="where it will run: colab-t4, kaggle-t4x2, ..., this (default)"
    )
    parser.add_argument("--format", choices=FORMATS, default="full", help="default: full")
    parser.add_argument("--fix", action="store_true", help="apply the safe fixes")
    parser.add_argument(
        "--unsafe-fixes", action="store_true", help="apply also those that change what the program does"
    )
    parser.add_argument("--diff", action="store_true", help="show what --fix would change; change nothing")
    parser.add_argument(
        "--select", nargs="+", metavar="RULE", help="codes, starts of codes, names, `default`, `all`"
    )
    parser.add_argument("--ignore", type=_words, action="extend", metavar="RULE", help="leave these out")
    parser.add_argument(
        "--exclude",
        type=_words,
        action="extend",
        metavar="PATTERN",
        help="paths or folder names to leave out",
    )
    parser.add_argument("--baseline", metavar="FILE", help="report only what this file does not know")
    parser.add_argument("--write-baseline", metavar="FILE", help="write the present findings as known")
    parser.add_argument(
        "--stdin-name", metavar="NAME", help="the name that decides how `-` is read (x.ipynb, x.md)"
    )
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 even with findings")
    parser.add_argument("--rules", action="store_true", help="list the rules and exit")
    return parser


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _take_back_paths(options: argparse.Namespace) -> None:
    """`--on colab-t4 train.py`: a list of ids also swallows the path behind it; what exists as a path
    and is no id is one.
    """
    for word in [word for word in options.on or () if os.path.exists(word)]:
        from buoy.machine import platforms

        if word != "this" and word not in {row.id for row in platforms.all_platforms()}:
            options.on.remove(word)
            options.paths.append(word)


def _list_rules(codes: set[str]) -> int:
    for code in rules.all_codes():
        rule = rules.rule(code)
        sys.stdout.write(f"{code} {'on ' if code in codes else 'off'} {rule.name}: {rule.summary}\n")
    return int(ExitCode.OK)


def _mend(report: engine.Report, target: Target, codes: set[str], unsafe: bool, diff: bool) -> engine.Report:
    """Apply fixes file by file until none is left; with `diff` only show the change."""
    mended = 0
    by_path: dict[str, list[Diagnostic]] = {}
    for item in report.diagnostics:
        by_path.setdefault(item.path, []).append(item)
    result = engine.Report(files=report.files, hidden=report.hidden)
    for path, diagnostics in by_path.items():
        if not fixer.fixable(diagnostics, unsafe):
            result.diagnostics += diagnostics
            continue
        before = data = engine.read_file(path)
        for _ in range(_MOST_ROUNDS):
            try:
                data, done = fixer.apply(path, data, diagnostics, unsafe)
            except Unreadable:
                break
            if not done:
                break
            mended += len(done)
            diagnostics = engine.check_source(path, data, target, codes)
        if data != before:
            _show_or_write(path, before, data, diff)
        result.diagnostics += diagnostics
    sys.stderr.write(f"{'would mend' if diff else 'mended'} {mended} finding{'s' if mended != 1 else ''}\n")
    return result


def _show_or_write(path: str, before: bytes, after: bytes, diff: bool) -> None:
    if diff:
        from difflib import unified_diff

        old, new = (text.decode("utf-8", "replace").splitlines(keepends=True) for text in (before, after))
        sys.stdout.writelines(
            line if line.endswith("\n") else line + "\n" for line in unified_diff(old, new, path, path)
        )
        return
    try:
        fixer.write(path, after)
    except OSError as error:
        raise UsageError(
            "cannot write the mended file",
            received=f"{path}: {error.strerror}",
            expected="a file that can be written",
            hint=f"`buoy check {path} --diff` shows the change",
        ) from None


def _print(report: engine.Report, style: str) -> None:
    if style in ("full", "concise"):
        from buoy.view import findings

        paint = findings.Paint(sys.stdout)
        sys.stdout.write(findings.full(report, paint) if style == "full" else findings.concise(report, paint))
        if style == "full" and report.diagnostics:
            code = report.diagnostics[0].code
            sys.stderr.write(
                f"hint: docs/rules/{code}.md tells more; `# buoy: ignore[{code}]` on the line hides it\n"
            )
        return
    from buoy.view import findings_machine as machine

    sys.stdout.write(
        {"json": machine.as_json, "github": machine.github, "sarif": machine.sarif}[style](report)
    )


if __name__ == "__main__":
    from buoy.errors import BuoyError

    try:
        sys.exit(execute(sys.argv[1:]))
    except BuoyError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(int(error.exit_code))
    except BrokenPipeError:
        os._exit(0)
