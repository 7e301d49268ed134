"""`buoy ckpt restore`: a checkpoint out of a mirror, or out of another run, into a run folder."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from buoy.checkpoint import lock
from buoy.checkpoint.store import Store
from buoy.cli.ckpt import hint, one_checkpoint, runs_in, say, short, step_number
from buoy.errors import BuoyError, ExitCode, RunFolderError, UsageError
from buoy.machine.disk import folders_to_make
from buoy.machine.files import make_folder
from buoy.text import json_text, visible


def restore(options: argparse.Namespace) -> ExitCode:
    """Bring one back, and say what a training will make of it."""
    from buoy.checkpoint.mirror.mirror import Mirror
    from buoy.checkpoint.mirror.storage import is_url, place_of
    from buoy.checkpoint.retention import Keep
    from buoy.view.progress import Progress

    words = list(options.words)
    step = step_number(words.pop()) if len(words) == 2 else None
    if len(words) != 1:
        raise UsageError("one mirror to restore from", received=" ".join(words) or "nothing",
                         expected="MIRROR/RUN [STEP]",
                         hint="`buoy ckpt restore /content/drive/MyDrive/runs/cats`")  # fmt: skip
    if (one := one_checkpoint(words[0])) is not None and step is None:
        words[0], step = one
    full = place_of(words[0])
    where, _, name = full.rstrip("/").rpartition("/")
    if not is_url(full):
        where = where or "/"
        if not os.path.isdir(os.path.join(full, "checkpoints")):
            raise RunFolderError("no checkpoints in this mirror", received=words[0],
                                 expected="the folder of a run in a mirror, with checkpoints/ in it",
                                 hint=runs_in(full) or runs_in(where) or "is the drive mounted?")  # fmt: skip
    elif not where.partition("://")[2]:
        raise UsageError("which run of this mirror?", received=words[0], expected="MIRROR/RUN",
                         hint=f"`buoy ckpt restore {shlex.quote(words[0].rstrip('/') + '/cats')}`")  # fmt: skip
    to = os.path.abspath(os.path.expanduser(options.to or os.path.join("runs", name)))
    if not is_url(full) and _holds(to, full):
        return _already_there(to, full, words[0], step, options.format)
    mirror = Mirror(to, where, Keep(), name)
    bar = Progress("fetching", 0)
    made = folders_to_make(os.path.join(to, "checkpoints"))
    brought = None
    try:
        make_folder(to)
        held = Store(to).saver(say, lambda kind, **values: None)  # refused while a training writes there
        before = {entry.folder for entry in Store(to).list()}
        try:
            brought = mirror.bring_back(None, say, step, bar.show)
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
        _print_json(to, brought)
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
        raise UsageError("a run cannot be restored into a folder that holds it", received=f"{given} to {short(to)}",
                         expected="a run folder of its own", hint=f"`--to {shlex.quote(aside)}`")  # fmt: skip
    store = Store(to)
    for entry in store.list():
        if step is not None and entry.step != step:
            continue
        try:
            store.open(entry)
        except BuoyError as error:
            say(f"{error.message}: {error.received}")
            continue
        if output == "json":
            _print_json(to, entry.step)
        else:
            _tell_restored(to, entry.step, "is already", short(to), None)
        return ExitCode.OK
    return _tell_none(to, given, step, output)


def _print_json(to: str, step: int | None) -> None:
    answer = {"schema": "buoy.checkpoints/1", "run": to, "step": step}
    sys.stdout.write(json_text(answer) + "\n")


def _tell_none(to: str, given: str, step: int | None, output: str) -> ExitCode:
    if output == "json":
        _print_json(to, None)
    say(f"{given} has no good checkpoint" + (f" of step {step}" if step is not None else ""))
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
    sys.stdout.write(visible(f"step {step} {verb} in {short(to)}{after}") + "\n")
    if max(here, there or 0) > step:
        aside = f"{shlex.quote(source)} {step} --to {shlex.quote(f'{short(to)}-from-{step}')}"
        apart = ", which has its own mirror" if there is not None else ""
        hint(f"to resume from step {step}, train in a folder with another name{apart}: "
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
