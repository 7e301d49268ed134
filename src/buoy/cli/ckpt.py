"""`buoy ckpt`: the checkpoints of a run: listed, verified, shown, exported, pruned, brought back."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from buoy.checkpoint.mirror_worker import STATUS
from buoy.checkpoint.reader import Checkpoint
from buoy.checkpoint.store import Entry, Store
from buoy.cli.arguments import Parser
from buoy.errors import BuoyError, ExitCode, RunFolderError, UsageError
from buoy.flight.attempt import read_json
from buoy.units import format_bytes

_DESCRIPTION = """\
The checkpoints of a run. RUN is its folder (default: the newest run here or in runs/), STEP a step number
(default: the newest).

  list     [RUN]                     what there is, newest first
  verify   [RUN] [STEP]              read every byte; exit 1 if any is not as it was written
  show     [RUN] [STEP]              what is in one
  export   [RUN] [STEP] -o FILE      the weights as a plain .safetensors (or .weights.h5, Keras)
  prune    [RUN] [--keep N]          remove what need not stay; asks first
  restore  MIRROR/RUN [--to RUN]     bring the newest good one back from a mirror (a folder or a URL)"""
_USAGE = "buoy ckpt list|verify|show|export|prune|restore [RUN] [STEP] [options]"
_EPILOG = "exit codes: 0 fine, 1 damage found (`verify`) or nothing to bring back (`restore`), 2 error"


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    options = _parser().parse_args(arguments)
    actions = {
        "list": _list,
        "verify": _verify,
        "show": _show,
        "export": _export,
        "prune": _prune,
        "restore": _restore,
    }
    return int(actions[options.action](options))


def _list(options: argparse.Namespace) -> ExitCode:
    from buoy.view import checkpoints as view

    run, _ = _run_and_step(options.words)
    entries, mirror = Store(run).list(), _mirror_status(run)
    if options.format == "json":
        _print_json(view.listed_json(run, entries, mirror))
        return ExitCode.OK
    sys.stdout.write(view.listed(_short(run), entries, mirror) + "\n")
    if entries:
        _hint(f"`buoy ckpt verify {_short(run)}` reads every byte")
    return ExitCode.OK


def _verify(options: argparse.Namespace) -> ExitCode:
    run, step = _run_and_step(options.words)
    store = Store(run)
    entries = [_chosen(run, step)] if step is not None else store.list()
    if not entries:
        raise _nothing_in(run)
    results: list[dict[str, object]] = []
    for entry in entries:
        damage = _damage(store, entry)
        results.append({"step": entry.step, "folder": entry.folder, "good": damage is None, "damage": damage})
        if options.format != "json":
            words = f"good, {format_bytes(entry.bytes)}" if damage is None else f"damaged: {damage}"
            sys.stdout.write(f"step {entry.step}: {words}\n")
    if options.format == "json":
        _print_json({"schema": "buoy.checkpoints/1", "run": run, "checkpoints": results})
    return ExitCode.OK if all(result["good"] for result in results) else ExitCode.FOUND


def _damage(store: Store, entry: Entry) -> str | None:
    try:
        _open(store, entry)
        return None
    except BuoyError as error:
        return error.received or error.message


def _show(options: argparse.Namespace) -> ExitCode:
    from buoy.view import checkpoints as view

    run, step = _run_and_step(options.words)
    checkpoint = _open(Store(run), _chosen(run, step))
    if options.format == "json":
        _print_json(view.shown_json(checkpoint))
    else:
        sys.stdout.write(view.shown(checkpoint) + "\n")
    return ExitCode.OK


def _export(options: argparse.Namespace) -> ExitCode:
    if not options.output:
        raise UsageError("no file to export to", expected="`-o FILE`", hint="`-o weights.safetensors`")
    run, step = _run_and_step(options.words)
    checkpoint = _open(Store(run), _chosen(run, step))
    path = os.path.expanduser(options.output)
    if path.endswith(".h5"):
        _write_h5(checkpoint, path)
        result: dict[str, object] = {"step": checkpoint.step, "file": path, "bytes": os.path.getsize(path)}
        words = f"wrote {path}: the weights of step {checkpoint.step}"
    else:
        name = options.only or _weights_name(checkpoint)
        tensors, size = _write_safetensors(checkpoint, name, path)
        result = {"step": checkpoint.step, "file": path, "name": name, "tensors": tensors, "bytes": size}
        words = f"wrote {path}: {name} of step {checkpoint.step}, {tensors} tensors, {format_bytes(size)}"
    if options.format == "json":
        _print_json({"schema": "buoy.checkpoints/1", **result})
    else:
        sys.stdout.write(words + "\n")
    return ExitCode.OK


def _write_safetensors(checkpoint: Checkpoint, name: str, path: str) -> tuple[int, int]:
    from buoy.checkpoint.export import tensors_of, write_safetensors
    from buoy.view.progress import Progress

    if not path.endswith(".safetensors"):
        raise UsageError("cannot tell the format", received=path, expected="a name that ends in .safetensors or .h5",
                         hint="`-o weights.safetensors`")  # fmt: skip
    bar = Progress("writing", sum(len(stored.memory) for stored in tensors_of(checkpoint, name).values()))
    try:
        return write_safetensors(checkpoint, name, path, bar.advance)
    finally:
        bar.close()


def _write_h5(checkpoint: Checkpoint, path: str) -> None:
    if not path.endswith(".weights.h5"):
        raise UsageError("Keras would not load this name", received=path, expected="a name that ends in .weights.h5",
                         hint="`-o model.weights.h5`")  # fmt: skip
    from importlib import import_module

    try:
        write = import_module("buoy.keras.state").write_weights_h5
        write(checkpoint, path)
    except ModuleNotFoundError as error:
        raise UsageError(
            "a .weights.h5 file is written with Keras",
            received=f"{error.name} is not installed here",
            expected="the environment the model was trained in",
            hint="`pip install keras h5py`, or export to .safetensors",
        ) from None


def _weights_name(checkpoint: Checkpoint) -> str:
    if "model" in checkpoint.names:
        return "model"
    with_tensors = sorted({name.partition("/")[0] for name in checkpoint.tensors})
    if len(with_tensors) == 1:
        return with_tensors[0]
    raise UsageError("cannot tell which weights are meant", received="no --only, and nothing called `model`",
                     expected="one of " + ", ".join(with_tensors), hint="`--only NAME`")  # fmt: skip


def _prune(options: argparse.Namespace) -> ExitCode:
    from buoy.checkpoint.retention import Keep, surplus

    run, _ = _run_and_step(options.words)
    store = Store(run)
    entries = store.list()
    going = surplus(entries, Keep(last=options.keep, best=options.best, every=options.every))
    size = sum(entry.bytes for entry in going)
    steps = ", ".join(str(entry.step) for entry in going)
    done = False
    if going:
        sys.stderr.write(
            f"to be removed from {_short(run)}: {len(going)} of {len(entries)} (steps {steps}), {format_bytes(size)}\n"
        )
        done = options.yes or _confirmed()
        for entry in going if done else ():
            try:
                store.remove(entry)
            except OSError as error:
                raise RunFolderError(
                    f"step {entry.step} could not be removed",
                    received=f"{entry.folder}: {error.strerror}",
                    expected="a folder that may be changed",
                ) from None
    removed = [entry.step for entry in going] if done else []
    if options.format == "json":
        _print_json(
            {"schema": "buoy.checkpoints/1", "run": run, "removed": removed, "bytes": size if done else 0}
        )
    else:
        words = f"removed {len(removed)}, {format_bytes(size)} freed" if done else "nothing removed"
        sys.stdout.write(f"{words}; {len(entries) - len(removed)} stay\n")
    return ExitCode.OK


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask", received="standard input is no terminal", expected="a yes",
                         hint="add `--yes` to remove them")  # fmt: skip
    sys.stderr.write("remove them? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _restore(options: argparse.Namespace) -> ExitCode:
    from buoy.checkpoint.homes import is_url
    from buoy.checkpoint.mirror import Mirror
    from buoy.checkpoint.retention import Keep
    from buoy.view.progress import Progress

    words = list(options.words)
    step = int(words.pop()) if len(words) > 1 and words[-1].isdigit() else None
    if len(words) != 1:
        raise UsageError("one mirror to restore from", received=" ".join(words) or "nothing", expected="MIRROR/RUN",
                         hint="`buoy ckpt restore /content/drive/MyDrive/runs/cats`")  # fmt: skip
    where, _, name = words[0].rstrip("/").rpartition("/")
    if not is_url(words[0]):
        full = os.path.abspath(os.path.expanduser(words[0]))
        where, name = os.path.split(full)
        if not os.path.isdir(os.path.join(full, "checkpoints")):
            raise RunFolderError("no checkpoints in this mirror", received=words[0],
                                 expected="the folder of a run in a mirror, with checkpoints/ in it",
                                 hint=_runs_in(full) or _runs_in(where) or "is the drive mounted?")  # fmt: skip
    elif not where.partition("://")[2]:
        raise UsageError("which run of this mirror?", received=words[0], expected="MIRROR/RUN",
                         hint=f"`buoy ckpt restore {words[0].rstrip('/')}/cats`")  # fmt: skip
    to = os.path.abspath(os.path.expanduser(options.to or os.path.join("runs", name)))
    mirror = Mirror(to, where, Keep(), name)
    bar = Progress("fetching", 0)
    try:
        os.makedirs(to, exist_ok=True)
        held = Store(to).saver(_say, lambda kind, **values: None)  # refused while a training writes there
        try:
            brought = mirror.bring_back(None, _say, step, bar.show)
        finally:
            held.close()
    except OSError as error:
        raise RunFolderError("cannot write the run folder", received=f"{to} ({error.strerror})",
                             expected="a folder that can be written", hint="`--to DIR`") from error  # fmt: skip
    finally:
        bar.close()
    if options.format == "json":
        _print_json({"schema": "buoy.checkpoints/1", "run": to, "step": brought})
    elif brought is None:
        _say(f"{words[0]} has no good checkpoint" + (f" of step {step}" if step is not None else ""))
    else:
        on = next(entry.step for entry in Store(to).list() if entry.complete) == brought
        after = "; a training that uses this folder goes on from it" if on else ", which has newer ones too"
        sys.stdout.write(f"step {brought} is in {_short(to)}{after}\n")
    return ExitCode.OK if brought is not None else ExitCode.FOUND


def _run_and_step(words: list[str]) -> tuple[str, int | None]:
    """`runs/cats 1200`, either left out; the folder of one checkpoint means both."""
    rest, step = list(words), None
    if rest and not os.path.isdir(rest[-1]) and (number := rest[-1].removeprefix("step-")).isdigit():
        step = int(number)
        rest.pop()
    if len(rest) > 1:
        raise UsageError("one run at a time", received=" ".join(words), expected="[RUN] [STEP]",
                         hint="`buoy ckpt --help`")  # fmt: skip
    if not rest:
        return _newest_run(), step
    run = os.path.abspath(os.path.expanduser(rest[0]))
    parent, name = os.path.split(run)
    if os.path.basename(parent) == "checkpoints" and name.startswith("step-"):
        digits = name.removeprefix("step-").partition(".")[0]
        return os.path.dirname(parent), int(digits) if step is None and digits.isdigit() else step
    if name == "checkpoints" and os.path.isdir(run):
        run = parent
    if not os.path.isdir(run):
        raise RunFolderError("no such run folder", received=rest[0], expected="a run folder",
                             hint=_runs_in(parent) or "`ls runs` shows what is there")  # fmt: skip
    if not os.path.isdir(os.path.join(run, "checkpoints")):
        raise _nothing_in(run)
    return run, step


def _newest_run() -> str:
    folders = [*_with_checkpoints("."), *_with_checkpoints("runs")]
    if os.path.isdir("checkpoints"):
        folders.append(".")
    if not folders:
        raise RunFolderError("no run with checkpoints found", received=os.getcwd(),
                             expected="a run folder, or a folder with `runs/` in it",
                             hint="name one: `buoy ckpt list runs/cats`")  # fmt: skip
    return os.path.abspath(max(folders, key=lambda run: os.stat(os.path.join(run, "checkpoints")).st_mtime))


def _with_checkpoints(folder: str) -> list[str]:
    try:
        return [
            entry.path
            for entry in os.scandir(folder)
            if os.path.isdir(os.path.join(entry.path, "checkpoints"))
        ]
    except OSError:
        return []


def _runs_in(folder: str) -> str | None:
    names = sorted(os.path.basename(run) for run in _with_checkpoints(folder))
    return f"there are: {', '.join(names[:8])}" if names else None


def _nothing_in(run: str) -> RunFolderError:
    return RunFolderError("this run has no checkpoint", received=run, expected="a run that saved at least once",
                          hint=_runs_in(run) or "`buoy.Run` and `buoy.keras.Guard` make them")  # fmt: skip


def _chosen(run: str, step: int | None) -> Entry:
    """The checkpoint of this step, or the newest that looks whole."""
    entries = Store(run).list()
    if not entries:
        raise _nothing_in(run)
    if step is None:
        return next((entry for entry in entries if entry.complete), entries[0])
    found = next((entry for entry in entries if entry.step == step), None)
    if found is None:
        near = sorted({entry.step for entry in entries}, key=lambda other: abs(other - step))[:3]
        raise RunFolderError("no checkpoint of this step", received=f"step {step} of {_short(run)}",
                             expected="one of the steps that are there",
                             hint="the nearest are " + ", ".join(map(str, near)))  # fmt: skip
    return found


def _open(store: Store, entry: Entry) -> Checkpoint:
    from buoy.view.progress import Progress

    bar = Progress(f"verifying step {entry.step}", entry.bytes)
    try:
        return store.open(entry, bar.advance)
    finally:
        bar.close()


def _mirror_status(run: str) -> dict[str, Any]:
    return read_json(os.path.join(run, STATUS)) or {}


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else path


def _print_json(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _hint(text: str) -> None:
    sys.stderr.write(f"hint: {text}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"buoy: {text}\n")


def _parser() -> Parser:
    parser = Parser("buoy ckpt", _USAGE, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "action", choices=("list", "verify", "show", "export", "prune", "restore"), help="what to do"
    )
    parser.add_argument("words", nargs="*", metavar="RUN STEP", help="the run folder, and a step")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="export: weights.safetensors or model.weights.h5"
    )
    parser.add_argument("--only", metavar="NAME", help="export: this of what was saved (default: model)")
    parser.add_argument(
        "--keep", type=int, default=3, metavar="N", help="prune: keep the last N (default: 3)"
    )
    parser.add_argument("--best", metavar="METRIC", help="prune: keep the best too: val_loss or max:accuracy")
    parser.add_argument("--every", metavar="6h", help="prune: keep one of each such period too")
    parser.add_argument("--yes", action="store_true", help="prune: do not ask")
    parser.add_argument("--to", metavar="RUN", help="restore: the run folder to fill (default: runs/<name>)")
    parser.add_argument("--format", choices=("full", "json"), default="full", help="json: for programs")
    return parser
