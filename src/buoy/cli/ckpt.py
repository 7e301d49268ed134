"""`buoy ckpt`: the checkpoints of a run: listed, verified, shown, exported, pruned, brought back."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from buoy.checkpoint import lock
from buoy.checkpoint.export import refuse_checkpoints_folder, tensors_of, write_safetensors
from buoy.checkpoint.mirror.mirror import Mirror, read_status
from buoy.checkpoint.mirror.storage import is_url, place_of
from buoy.checkpoint.reader import Checkpoint
from buoy.checkpoint.retention import Keep, best_of, last_finite, metrics_of, surplus
from buoy.checkpoint.store import DamagedCheckpoint, Entry, Store, restore_command
from buoy.cli.parser import Parser, agreed
from buoy.errors import BuoyError, ExitCode, RunFolderError, UsageError
from buoy.machine.disk import folders_to_make
from buoy.machine.files import make_folder
from buoy.text import json_text, printable, visible, whole_number
from buoy.units import format_bytes
from buoy.view import checkpoints as view

_DESCRIPTION = """\
The checkpoints of a run. RUN is its folder (default: the newest run here or in runs/), STEP a step number
(default: the newest).

  list     [RUN]                     what there is, newest first
  verify   [RUN] [STEP]              read every byte; exit 1 if any is not as it was written
  show     [RUN] [STEP]              what is in one
  export   [RUN] [STEP] -o FILE      the weights as a plain .safetensors (or .weights.h5, Keras)
  prune    [RUN] [--keep N]          remove what need not stay; asks first
  restore  MIRROR/RUN [STEP] [--to RUN]
                                     bring one back from a mirror (a folder or a URL), or out of another run"""
_USAGE = "buoy ckpt list|verify|show|export|prune|restore [RUN] [STEP] [options]"
_EPILOG = "exit codes: 0 fine, 1 damage found (`verify`) or nothing to bring back (`restore`), 2 error"


_OPTIONS = {"export": ("output", "only"), "prune": ("keep", "best", "every", "yes"), "restore": ("to",)}
"""What each action takes beside --format; the others take nothing."""


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    if not arguments:
        sys.stdout.write(f"usage: {_USAGE}\n\n{_DESCRIPTION}\n\nfor example: buoy ckpt list runs/cats\n")
        return ExitCode.OK
    options = _parser().parse_intermixed_args(arguments)
    _refuse_what_is_of_another(options)
    actions = {
        "list": _list,
        "verify": _verify,
        "show": _show,
        "export": _export,
        "prune": _prune,
        "restore": _restore,
    }
    return int(actions[options.action](options))


def _refuse_what_is_of_another(options: argparse.Namespace) -> None:
    """An option that would be ignored is a wish that would be forgotten."""
    for action, names in _OPTIONS.items():
        for name in names:
            if action != options.action and getattr(options, name) not in (None, False):
                takes = [f"--{own}" for own in (*_OPTIONS.get(options.action, ()), "format")]
                raise UsageError(f"--{name} is for `buoy ckpt {action}`", received=f"{options.action} --{name}",
                                 expected=f"{options.action} with {', '.join(takes)}",
                                 hint="leave it out")  # fmt: skip


def _list(options: argparse.Namespace) -> ExitCode:
    run = _run_alone(options.action, options.words)
    entries, mirror = Store(run).list(), read_status(run)
    if options.format == "json":
        _print_json(view.listed_json(run, entries, mirror))
        return ExitCode.OK
    sys.stdout.write(view.listed(_short(run), entries, mirror) + "\n")
    if (finite := last_finite(entries)) is not None:
        back = f"`{restore_command(run, finite.step)}`"
        _hint(
            f"to go back to step {finite.step}, the last with a finite loss: {back}, and train in that folder"
        )
    elif any(entry.complete for entry in entries):
        _hint(f"`buoy ckpt verify {shlex.quote(_short(run))}` reads every byte")
    elif entries:
        verify = f"`buoy ckpt verify {shlex.quote(_short(run))}`"
        _hint(f"{verify} names the damage; `buoy ckpt restore` brings one out of a mirror")
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
            words = f"good, {format_bytes(entry.bytes)}" if damage is None else f"damaged: {visible(damage)}"
            sys.stdout.write(f"step {entry.step}: {words}\n")
    if options.format == "json":
        _print_json({"run": run, "checkpoints": results})
    if all(result["good"] for result in results):
        return ExitCode.OK
    good = next((result["step"] for result in results if result["good"]), None)
    if good is not None:
        _hint(f"training in this folder resumes from step {good}, the newest good one")
    elif step is None:
        _hint("if the run has a mirror: `buoy ckpt restore MIRROR/RUN` brings the newest good one back")
    else:
        _hint(f"`buoy ckpt verify {shlex.quote(_short(run))}` shows which others are good")
    return ExitCode.FOUND


def _damage(store: Store, entry: Entry) -> str | None:
    try:
        _open(store, entry)
        return None
    except BuoyError as error:
        return error.received or error.message


def _show(options: argparse.Namespace) -> ExitCode:
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
    path = os.path.expanduser(options.output)
    refuse_checkpoints_folder(path)
    checkpoint = _open(Store(run), _chosen(run, step))
    if path.endswith(".h5"):
        if options.only:
            raise UsageError("a .weights.h5 file holds the model", received=f"--only {options.only}",
                             expected="no --only", hint="export to .safetensors to choose")  # fmt: skip
        _write_h5(checkpoint, path)
        result: dict[str, object] = {"step": checkpoint.step, "file": path, "bytes": os.path.getsize(path)}
        words = f"wrote {printable(path)}: the weights of step {checkpoint.step}"
    else:
        name = options.only or _weights_name(checkpoint)
        tensors, size = _write_safetensors(checkpoint, name, path)
        result = {"step": checkpoint.step, "file": path, "name": name, "tensors": tensors, "bytes": size}
        words = f"wrote {printable(path)}: {name} of step {checkpoint.step}, {tensors} tensors, {format_bytes(size)}"
    if options.format == "json":
        _print_json(result)
    else:
        sys.stdout.write(visible(words) + "\n")
    return ExitCode.OK


def _write_safetensors(checkpoint: Checkpoint, name: str, path: str) -> tuple[int, int]:
    if not path.endswith(".safetensors"):
        raise UsageError("unknown format", received=path, expected="a name that ends in .safetensors or .h5",
                         hint="`-o weights.safetensors`")  # fmt: skip
    bar = view.Progress("writing", sum(stored.nbytes for stored in tensors_of(checkpoint, name).values()))
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
        write = import_module("buoy.keras.state.tensors").write_weights_h5
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
    raise UsageError("it is unclear which weights are meant", received="no --only, and nothing called `model`",
                     expected="one of " + ", ".join(with_tensors), hint="`--only NAME`")  # fmt: skip


def _prune(options: argparse.Namespace) -> ExitCode:
    run = _run_alone(options.action, options.words)
    store = Store(run)
    entries = store.list()
    keep = 3 if options.keep is None else options.keep
    if keep < 1:
        raise UsageError("too few checkpoints to keep", received=f"--keep {keep}", expected="1 or more",
                         hint="`--keep 3`")  # fmt: skip
    wish = Keep(last=keep, best=options.best, every=options.every)
    if entries and wish.best is not None and best_of(entries, wish) is None:
        raise _no_such_metric(options.best, entries)
    going = surplus(entries, wish)
    size = sum(entry.bytes for entry in going)
    steps = ", ".join(str(entry.step) for entry in going)
    done = False
    if going:
        what = f"{len(going)} of {len(entries)} (steps {steps}), {format_bytes(size)}"
        done = options.yes or _confirmed(f"to be removed from {_short(run)}: {what}")
        _remove_all(store, going if done else [])
    removed = [entry.step for entry in going] if done else []
    if options.format == "json":
        _print_json({"run": run, "removed": removed, "bytes": size if done else 0})
    else:
        words = f"removed {len(removed)}, {format_bytes(size)} freed" if done else "nothing removed"
        left = len(entries) - len(removed)
        sys.stdout.write(f"{words}; {left} {'stays' if left == 1 else 'stay'}\n")
    return ExitCode.OK


def _no_such_metric(best: str, entries: list[Entry]) -> UsageError:
    """Without it the best one would go like any other."""
    known = sorted({name for entry in entries for name in metrics_of(entry)})
    return UsageError(
        "no checkpoint of this run has that metric",
        received=f"--best {best}",
        expected=f"one of {', '.join(known)}"
        if known
        else "a run whose checkpoints have metrics: these have none",
        hint=f"`--best {known[0]}`, or `--best max:{known[0]}` where more is better"
        if known
        else "leave --best out",
    )


def _remove_all(store: Store, going: list[Entry]) -> None:
    """Remove them; where one cannot go, say which are gone already."""
    for number, entry in enumerate(going):
        try:
            store.remove(entry)
        except (OSError, BuoyError) as error:
            gone = ", ".join(str(other.step) for other in going[:number])
            _say(f"removed before that: step {gone}" if gone else "nothing was removed before that")
            if isinstance(error, BuoyError):
                raise
            raise RunFolderError(
                f"step {entry.step} could not be removed",
                received=f"{entry.folder}: {error.strerror}",
                expected="a folder that may be changed",
            ) from None


def _confirmed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("no terminal to ask on", received=f"standard input is not a terminal; {what}",
                         expected="a yes", hint="add `--yes` to remove them")  # fmt: skip
    return agreed(f"{visible(what)}\nremove them?")


def _open(store: Store, entry: Entry) -> Checkpoint:
    bar = view.Progress(f"verifying step {entry.step}", entry.bytes)
    try:
        return store.open(entry, bar.advance)
    except DamagedCheckpoint as error:
        if not any(other.complete for other in store.list() if other.folder != entry.folder):
            error.hint = "no other is left here; if the run has a mirror: `buoy ckpt restore MIRROR/RUN`"
        raise
    finally:
        bar.close()


def _print_json(value: dict[str, object]) -> None:
    sys.stdout.write(json_text({"schema": view.SCHEMA, **value}) + "\n")


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
    parser.add_argument("--keep", type=int, metavar="N", help="prune: keep the last N (default: 3)")
    parser.add_argument("--best", metavar="METRIC", help="prune: keep the best too: val_loss or max:accuracy")
    parser.add_argument("--every", metavar="6h", help="prune: keep one of each such period too")
    parser.add_argument("--yes", action="store_true", help="prune: do not ask")
    parser.add_argument("--to", metavar="RUN", help="restore: the run folder to fill (default: runs/<name>)")
    parser.add_argument("--format", choices=("full", "json"), default="full", help="json: for programs")
    return parser


def _restore(options: argparse.Namespace) -> ExitCode:
    """Bring one back, and say what a training will make of it."""
    words = list(options.words)
    step = _step_number(words.pop()) if len(words) == 2 else None
    if len(words) != 1:
        raise UsageError("one mirror to restore from", received=" ".join(words) or "nothing",
                         expected="MIRROR/RUN [STEP]",
                         hint="`buoy ckpt restore /content/drive/MyDrive/runs/cats`")  # fmt: skip
    if (one := _one_checkpoint(words[0])) is not None and step is None:
        words[0], step = one
    full = place_of(words[0])
    where, _, name = full.rstrip("/").rpartition("/")
    if not is_url(full):
        where = where or "/"
        if not os.path.isdir(os.path.join(full, "checkpoints")):
            raise RunFolderError("no checkpoints in this mirror", received=words[0],
                                 expected="the folder of a run in a mirror, with checkpoints/ in it",
                                 hint=_runs_in(full) or _runs_in(where)
                                 or "check that the drive is mounted")  # fmt: skip
    elif not where.partition("://")[2]:
        raise UsageError("which run of this mirror?", received=words[0], expected="MIRROR/RUN",
                         hint=f"`buoy ckpt restore {shlex.quote(words[0].rstrip('/') + '/cats')}`")  # fmt: skip
    to = os.path.abspath(os.path.expanduser(options.to or os.path.join("runs", name)))
    if not is_url(full) and _holds(to, full):
        return _already_there(to, full, words[0], step, options.format)
    mirror = Mirror(to, where, Keep(), name)
    bar = view.Progress("fetching", 0)
    made = folders_to_make(os.path.join(to, "checkpoints"))
    brought = None
    try:
        make_folder(to)
        held = Store(to).saver(_say, lambda kind, **values: None)  # refused while a training writes there
        before = {entry.folder for entry in Store(to).list()}
        try:
            brought = mirror.bring_back(None, _say, step, bar.show)
        finally:
            held.close()
    except OSError as error:
        raise RunFolderError("cannot write the run folder", received=f"{to} ({error.strerror})",
                             expected="a folder that can be written", hint="`--to DIR`") from error  # fmt: skip
    finally:
        bar.close()
        if brought is None:
            _remove_empty(made)
    if brought is None:
        return _tell_none(to, words[0], step, options.format)
    if options.format == "json":
        _print_json({"run": to, "step": brought})
    else:
        new = before != {entry.folder for entry in Store(to).list()}
        there = mirror.newest_there if os.path.basename(to) == name else None
        _tell_restored(to, brought, "is" if new else "was already", f"{mirror.shown}/{name}", there)
    return ExitCode.OK


def _holds(folder: str, other: str) -> bool:
    folder, other = os.path.realpath(folder), os.path.realpath(other)
    return os.path.commonpath([folder, other]) == folder


def _already_there(to: str, source: str, given: str, step: int | None, output: str) -> ExitCode:
    """From a run folder into itself: there is nothing to bring, only to say how one goes back to that step."""
    if os.path.realpath(to) != os.path.realpath(source):
        aside = f"{given.rstrip('/')}-restored"
        raise UsageError("a run cannot be restored into a folder that holds it", received=f"{given} to {_short(to)}",
                         expected="a run folder of its own", hint=f"`--to {shlex.quote(aside)}`")  # fmt: skip
    store = Store(to)
    for entry in store.list():
        if step is not None and entry.step != step:
            continue
        try:
            store.open(entry)
        except BuoyError as error:
            _say(f"{error.message}: {error.received}")
            continue
        if output == "json":
            _print_json({"run": to, "step": entry.step})
        else:
            _tell_restored(to, entry.step, "is already", _short(to), None)
        return ExitCode.OK
    return _tell_none(to, given, step, output)


def _tell_none(to: str, given: str, step: int | None, output: str) -> ExitCode:
    if output == "json":
        _print_json({"run": to, "step": None})
    _say(f"{given} has no good checkpoint" + (f" of step {step}" if step is not None else ""))
    return ExitCode.FOUND


def _tell_restored(to: str, step: int, verb: str, source: str, there: int | None) -> None:
    """What a training will make of it: the newest wins, here or in a mirror folder of the same name (`there`)."""
    here = next(entry.step for entry in Store(to).list() if entry.complete)
    if here > step:
        after = f", which has newer ones too: training in it resumes from step {here}"
    elif there is not None and there > step:
        after = (
            f"; training in this folder resumes from it without a mirror, and from step {there} with "
            f"the mirror {os.path.dirname(source)}"
        )
    else:
        after = "; training in this folder resumes from it"
    sys.stdout.write(visible(f"step {step} {verb} in {_short(to)}{after}") + "\n")
    if max(here, there or 0) > step:
        aside = f"{shlex.quote(source)} {step} --to {shlex.quote(f'{_short(to)}-from-{step}')}"
        apart = ", which has its own mirror" if there is not None else ""
        _hint(f"to resume from step {step}, train in a folder with another name{apart}: "
             f"`buoy ckpt restore {aside}`")  # fmt: skip


def _remove_empty(folders: list[str]) -> None:
    """What was made for a checkpoint that did not come, and has nothing else in it."""
    try:
        for folder in folders:
            if os.listdir(folder) == [lock.NAME]:
                os.unlink(os.path.join(folder, lock.NAME))
            os.rmdir(folder)
    except OSError:
        pass  # it was never made, or somebody has put something there


def _run_alone(action: str, words: list[str]) -> str:
    """The run that an action on all of its checkpoints is about."""
    run, step = _run_and_step(words)
    if step is not None:
        raise UsageError(
            f"`buoy ckpt {action}` covers all checkpoints of a run",
            received=" ".join(words),
            expected="[RUN]",
            hint="`--keep N` says how many stay"
            if action == "prune"
            else f"`buoy ckpt show {shlex.join(words)}`",
        )
    return run


def _run_and_step(words: list[str]) -> tuple[str, int | None]:
    """`runs/cats 1200`, either left out; the folder of one checkpoint means both."""
    if len(words) > 2:
        raise UsageError("one run and one step at a time", received=" ".join(words), expected="[RUN] [STEP]",
                         hint="`buoy ckpt --help`")  # fmt: skip
    rest, step = list(words), None
    if len(rest) == 2 and os.path.isdir(rest[1]) and not _is_number(rest[1]):
        raise UsageError("one run at a time", received=" ".join(words), expected="[RUN] [STEP]",
                         hint=f"`buoy ckpt list {shlex.quote(rest[0])}`")  # fmt: skip
    if len(rest) == 2 or (rest and _is_number(rest[0]) and not os.path.isdir(rest[0])):
        step = _step_number(rest.pop())
    if not rest:
        return _newest_run(), step
    if is_url(rest[0]):
        raise UsageError("only `buoy ckpt restore` reads a URL", received=rest[0], expected="a run folder here",
                         hint=f"`buoy ckpt restore {shlex.quote(rest[0])} --to DIR` brings the newest one here, "
                         "with its step for another")  # fmt: skip
    run = os.path.abspath(os.path.expanduser(rest[0]))
    parent, name = os.path.split(run)
    if (one := _one_checkpoint(run)) is not None:
        return one[0], one[1] if step is None else step
    if name == "checkpoints" and os.path.isdir(run):
        run = parent
    if not os.path.isdir(run):
        raise RunFolderError("no such run folder", received=rest[0], expected="a run folder",
                             hint=_runs_in(parent) or "`ls runs` shows what is there")  # fmt: skip
    if not os.path.isdir(os.path.join(run, "checkpoints")):
        raise _nothing_in(run)
    return run, step


def _one_checkpoint(place: str) -> tuple[str, int | None] | None:
    """The run and the step of a checkpoint's own folder; None where the place is something else.

    >>> _one_checkpoint("runs/cats/checkpoints/step-000001200")
    ('runs/cats', 1200)
    """
    parent, _, name = place.rstrip("/").rpartition("/")
    run, _, above = parent.rpartition("/")
    if above != "checkpoints" or not name.startswith("step-"):
        return None
    digits = name.removeprefix("step-").partition(".")[0]
    return run or ".", whole_number(digits)


def _step_number(word: str) -> int:
    """`1200` or `step-000001200`.

    >>> _step_number("step-000001200")
    1200
    """
    step = whole_number(word.removeprefix("step-"))
    if step is None:
        raise UsageError("this is not a step", received=word, expected="a step's number, 0 or more",
                         hint="`buoy ckpt list` shows the steps that are there")  # fmt: skip
    return step


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


def _runs_in(folder: str) -> str | None:
    """The runs in a folder, as a hint."""
    names = sorted(os.path.basename(run) for run in _with_checkpoints(folder))
    return f"there are: {', '.join(names[:8])}" if names else None


def _nothing_in(run: str) -> RunFolderError:
    """The run has no checkpoint."""
    return RunFolderError("this run has no checkpoint", received=run, expected="a run that saved at least once",
                          hint=_runs_in(run) or "`buoy.Run` and `buoy.keras.Guard` make them")  # fmt: skip


def _short(path: str) -> str:
    """As a user would type it from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else path


def _hint(text: str) -> None:
    """What to type next, beside the result."""
    sys.stderr.write(f"hint: {visible(text)}\n")


def _say(text: str) -> None:
    """A line for users, beside the result."""
    sys.stderr.write(f"buoy: {visible(text)}\n")


def _is_number(word: str) -> bool:
    return word.removeprefix("step-").lstrip("+-").replace(".", "", 1).isdigit()


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
