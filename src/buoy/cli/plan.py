"""`buoy plan`: will it fit, how many bytes, and the cheapest way to make it fit."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from buoy.cli.parser import Parser
from buoy.errors import ExitCode, UsageError
from buoy.estimate.child import Request
from buoy.planner.plan import make_plan, parse_source
from buoy.planner.session import Session, Wishes
from buoy.planner.targets import THIS, targets
from buoy.planner.traces import Workshop
from buoy.view import plan as view

_USAGE = "buoy plan FILE[:FUNCTION] [--on ID ...] [options]"
_DESCRIPTION = """\
Say whether a training step fits, before it runs: the peak with its parts, the largest batch, and what makes it fit.
FILE:FUNCTION names a function that returns a model and a batch, and optionally an optimizer and a loss.
FILE alone is a training script: it is run in a child process up to its first optimizer steps."""
_EPILOG = "exit codes: 0 fits everywhere asked for, 1 does not (or only tightly), 2 error."


def execute(arguments: list[str]) -> int:
    """Run the verb: 0 fits, 1 does not, 2 error."""
    if "--" in arguments:
        split = arguments.index("--")
        arguments, passed = arguments[:split], arguments[split + 1 :]
    else:
        passed = []
    options = _parser().parse_args(arguments)
    # `--on colab-t4 train.py:build`: what is a file is no platform.
    names = options.on or [THIS]
    if options.source is None and options.on:
        *names, options.source = options.on
        if not (":" in options.source or options.source.endswith((".py", ".ipynb"))):
            names, options.source = options.on, None
    request, script = _request(options)
    wishes = cast(Wishes, {name: getattr(options, name) for name in Wishes.__annotations__})
    places, session = targets(names or [THIS]), Session.of(wishes)
    say = _progress()
    # Ended from outside (`timeout`, a closed terminal) it still takes its child and its files with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Workshop(timeout=options.timeout) as workshop:
        if script is not None:
            sys.stderr.write(f"buoy: running {script} in a child process up to its first optimizer steps\n")
            found = workshop.run_script(script, passed, request.framework)
            request = replace(
                request, accumulate=found["accumulate"], autocast=request.autocast or found["autocast"]
            )
        words = options.source or options.hf_config or options.keras
        plan = make_plan(workshop, request, words, places, session, remedies=options.remedies, say=say)
    say("")
    if options.format == "json":
        text = json.dumps(view.as_values(plan), indent=1)
    else:
        text = view.full(plan) if options.format == "full" else view.concise(plan)
    sys.stdout.write(text + "\n")
    return int(ExitCode.OK if plan.fits else ExitCode.FOUND)


def _request(options: argparse.Namespace) -> tuple[Request, str | None]:
    """What to trace, and the script to run first where there is one."""
    ways = [way for way in (options.source, options.hf_config, options.keras) if way]
    if len(ways) != 1:
        raise UsageError("nothing to plan" if not ways else "more than one thing to plan",
                         received=" and ".join(ways) or None,
                         expected="one of FILE:FUNCTION, FILE, --hf-config FILE, --keras FILE",
                         hint="`buoy plan train.py:build --on colab-t4`")  # fmt: skip
    script = None
    if options.hf_config:
        _must_exist(options.hf_config)
        request = Request("torch", {"hf_config": options.hf_config, "seq": options.seq})
    elif options.keras:
        _must_exist(options.keras)
        request = Request("keras", {"keras": options.keras})
    elif options.source.endswith(".ipynb"):
        raise UsageError("a notebook is planned from inside", received=options.source,
                         expected="train.py or train.py:build",
                         hint='in a cell: `buoy.plan(model, next(iter(loader)), on="colab-t4")`')  # fmt: skip
    elif options.source.endswith(".py"):
        _must_exist(options.source)
        script = options.source
        framework = options.framework or _framework(script)
        request = Request(framework, {"script": script})
        if framework == "torch":
            request = Request(framework, {"build": "buoy.torch.plan.script:build"})
    else:
        request = parse_source(options.source, options.framework or _framework(options.source))
    request = replace(request, batch=options.batch, autocast=options.autocast, optimizer=options.optimizer)
    return request, script


def _framework(source: str) -> str:
    """Which framework a script or build function uses, by what its file imports."""
    import ast

    path = source if source.endswith(".py") else source.rpartition(":")[0]
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return "torch"
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    return "keras" if names & {"keras", "tensorflow"} and "torch" not in names else "torch"


def _must_exist(path: str) -> None:
    if not os.path.isfile(path):
        raise UsageError("no such file", received=path, hint="`buoy plan --help` shows the ways in")


def _progress() -> Callable[[str], None]:
    """Tell what is being done on a terminal, and take the line away at the end."""
    shown = sys.stderr.isatty() and not os.environ.get("BUOY_NO_PROGRESS")

    def say(text: str) -> None:
        if shown:
            sys.stderr.write(f"\r\x1b[K{text + ' ...' if text else ''}")
            sys.stderr.flush()

    return say


def _whole(text: str) -> int:
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is {'negative' if value < 0 else 'nothing'}: at least 1 is needed"
        )
    return value


def _parser() -> Parser:
    parser = Parser("buoy plan", _USAGE, _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("source", nargs="?", metavar="FILE[:FUNCTION]", help="train.py:build, or a training script")
    add("--on", nargs="+", metavar="ID", help="colab-t4, kaggle-t4x2, rtx-3090, ..., this (default)")
    add("--hf-config", metavar="FILE", help="a Hugging Face config.json instead of FILE")
    add(
        "--seq",
        type=_whole,
        default=512,
        metavar="N",
        help="tokens of a sequence, with --hf-config (default: 512)",
    )
    add("--keras", metavar="FILE", help="a saved .keras model instead of FILE")
    add("--framework", choices=("torch", "keras"), help="of FILE:FUNCTION (default: by its imports)")
    add("--batch", type=_whole, metavar="N", help="samples in a batch, instead of the sample batch's")
    add("--autocast", choices=("fp16", "bf16"), help="mixed precision around forward and loss")
    add("--optimizer", metavar="NAME", help="AdamW, SGD, Adafactor, ... instead of the code's own")
    add(
        "--remedies",
        action=argparse.BooleanOptionalAction,
        help="try them (default: where it does not surely fit)",
    )
    add("--data", metavar="SIZE|PATH", help="the data set: `20GB`, a file or a folder")
    add("--in-memory", action="store_true", help="the data set is loaded into RAM as a whole")
    add("--workers", type=int, default=0, metavar="N", help="of the DataLoader (default: 0)")
    add("--prefetch", type=int, default=2, metavar="N", help="batches each worker makes ahead (default: 2)")
    add("--pin-memory", action="store_true", help="the DataLoader pins its batches")
    add("--samples", type=_whole, metavar="N", help="samples in the data set, for --cache")
    add("--cache", choices=("ram", "disk"), help="decoded samples are kept: Dataset.cache(), or in files")
    add("--shuffle", type=int, default=0, metavar="N", help="samples in a shuffle buffer")
    add(
        "--augmented",
        type=int,
        default=0,
        metavar="N",
        help="augmented copies of each sample made beforehand",
    )
    add("--steps", type=_whole, metavar="N", help="optimizer steps of the whole training")
    add("--step-time", metavar="TIME", help="of one step, measured: `0.4s`")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints kept (default: 3)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one trace (default: 300)")
    add("--format", choices=("full", "concise", "json"), default="full", help="default: full")
    return parser
