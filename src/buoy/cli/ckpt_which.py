"""Which run and which of its checkpoints the words of a `buoy ckpt` line mean."""

from __future__ import annotations

import os
import shlex
import sys

from buoy.checkpoint.homes import is_url
from buoy.checkpoint.store import Entry, Store
from buoy.errors import RunFolderError, UsageError
from buoy.text import visible, whole_number


def run_alone(action: str, words: list[str]) -> str:
    """The run that an action on all of its checkpoints is about."""
    run, step = run_and_step(words)
    if step is not None:
        raise UsageError(
            f"`buoy ckpt {action}` is about all checkpoints of a run",
            received=" ".join(words),
            expected="[RUN]",
            hint="`--keep N` says how many stay"
            if action == "prune"
            else f"`buoy ckpt show {shlex.join(words)}`",
        )
    return run


def run_and_step(words: list[str]) -> tuple[str, int | None]:
    """`runs/cats 1200`, either left out; the folder of one checkpoint means both."""
    if len(words) > 2:
        raise UsageError("one run and one step at a time", received=" ".join(words), expected="[RUN] [STEP]",
                         hint="`buoy ckpt --help`")  # fmt: skip
    rest, step = list(words), None
    if len(rest) == 2 and os.path.isdir(rest[1]) and not _is_number(rest[1]):
        raise UsageError("one run at a time", received=" ".join(words), expected="[RUN] [STEP]",
                         hint=f"`buoy ckpt list {shlex.quote(rest[0])}`")  # fmt: skip
    if len(rest) == 2 or (rest and _is_number(rest[0]) and not os.path.isdir(rest[0])):
        step = step_number(rest.pop())
    if not rest:
        return _newest_run(), step
    if is_url(rest[0]):
        raise UsageError("only `buoy ckpt restore` reads a URL", received=rest[0], expected="a run folder here",
                         hint=f"`buoy ckpt restore {shlex.quote(rest[0])} --to DIR` brings the newest one here, "
                         "with its step for another")  # fmt: skip
    run = os.path.abspath(os.path.expanduser(rest[0]))
    parent, name = os.path.split(run)
    if (one := one_checkpoint(run)) is not None:
        return one[0], one[1] if step is None else step
    if name == "checkpoints" and os.path.isdir(run):
        run = parent
    if not os.path.isdir(run):
        raise RunFolderError("no such run folder", received=rest[0], expected="a run folder",
                             hint=runs_in(parent) or "`ls runs` shows what is there")  # fmt: skip
    if not os.path.isdir(os.path.join(run, "checkpoints")):
        raise nothing_in(run)
    return run, step


def one_checkpoint(place: str) -> tuple[str, int | None] | None:
    """The run and the step of a checkpoint's own folder; None where the place is something else.

    >>> one_checkpoint("runs/cats/checkpoints/step-000001200")
    ('runs/cats', 1200)
    """
    parent, _, name = place.rstrip("/").rpartition("/")
    run, _, above = parent.rpartition("/")
    if above != "checkpoints" or not name.startswith("step-"):
        return None
    digits = name.removeprefix("step-").partition(".")[0]
    return run or ".", whole_number(digits)


def step_number(word: str) -> int:
    """`1200` or `step-000001200`.

    >>> step_number("step-000001200")
    1200
    """
    step = whole_number(word.removeprefix("step-"))
    if step is None:
        raise UsageError("this is no step", received=word, expected="a step's number, 0 or more",
                         hint="`buoy ckpt list` shows the steps that are there")  # fmt: skip
    return step


def chosen(run: str, step: int | None) -> Entry:
    """The checkpoint of this step, or the newest that looks whole."""
    entries = Store(run).list()
    if not entries:
        raise nothing_in(run)
    if step is None:
        return next((entry for entry in entries if entry.complete), entries[0])
    found = next((entry for entry in entries if entry.step == step), None)
    if found is None:
        near = sorted({entry.step for entry in entries}, key=lambda other: abs(other - step))[:3]
        raise RunFolderError("no checkpoint of this step", received=f"step {step} of {short(run)}",
                             expected="one of the steps that are there",
                             hint="the nearest are " + ", ".join(map(str, near)))  # fmt: skip
    return found


def runs_in(folder: str) -> str | None:
    """The runs in a folder, as a hint."""
    names = sorted(os.path.basename(run) for run in _with_checkpoints(folder))
    return f"there are: {', '.join(names[:8])}" if names else None


def nothing_in(run: str) -> RunFolderError:
    """The run has no checkpoint."""
    return RunFolderError("this run has no checkpoint", received=run, expected="a run that saved at least once",
                          hint=runs_in(run) or "`buoy.Run` and `buoy.keras.Guard` make them")  # fmt: skip


def short(path: str) -> str:
    """As a person would type it from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else path


def hint(text: str) -> None:
    """What to type next, beside the result."""
    sys.stderr.write(f"hint: {visible(text)}\n")


def say(text: str) -> None:
    """A line for people, beside the result."""
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
