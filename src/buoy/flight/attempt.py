"""The run folder on disk: making one, adding an attempt to it, finding the last one again, and the disk it is on.

Nothing heavy is imported here: the recorder inside a training process and the sidecar both use this file.
"""

from __future__ import annotations

import os
import time
from collections import namedtuple

from buoy.errors import RunFolderError, in_notebook
from buoy.machine import disk, files
from buoy.machine.files import open_regular, parse_json, read_bounded, read_json
from buoy.text import whole_number

RUN_SCHEMA = "buoy.run/1"
ATTEMPT_SCHEMA = "buoy.attempt/1"

_PARTS = ("attempts", "checkpoints")
_RECORDS = ("attempt.json", "events.jsonl", "death.json", "verdict.json")
_IDENTITY = ("wall", "boot_id", "pid")
"""What of attempt.json distinguishes one attempt from every other, wherever its folder is copied."""

Attempt = namedtuple("Attempt", "run_folder folder number")


def new_attempt(run_folder: str) -> Attempt:
    """Make the next attempt's folder, and the run's own if it is new. Folders are 0700."""
    run_folder = os.path.abspath(run_folder)
    is_new = not os.path.lexists(run_folder)
    try:
        _make_run(run_folder)
        return _next_attempt(run_folder)
    except OSError as error:
        if is_new:
            _remove_empty(run_folder)
        raise RunFolderError(
            "cannot write the run folder",
            received=f"{run_folder} ({error.strerror or error})",
            expected="a folder on a local disk that this user can write",
            hint=_name_another(),
        ) from error


def _make_run(run_folder: str) -> None:
    try:
        files.make_folder(run_folder)
    except FileExistsError:
        pass  # a file or a dead link, as is said now
    refuse_foreign(run_folder)
    marker = os.path.join(run_folder, "run.json")
    if not os.path.exists(marker):
        files.write_json(marker, new_marker(run_folder))
    files.make_folder(os.path.join(run_folder, "attempts"))


def _remove_empty(run_folder: str) -> None:
    """Leave no run that never was: a full disk took the folder and nothing in it, or its one attempt never began."""
    try:
        if os.path.isdir(os.path.join(run_folder, "attempts")):
            os.rmdir(os.path.join(run_folder, "attempts"))
        if os.path.exists(os.path.join(run_folder, "run.json")):
            os.unlink(os.path.join(run_folder, "run.json"))
        os.rmdir(run_folder)
    except OSError:
        pass


def new_marker(run_folder: str) -> dict:  # type: ignore[type-arg]
    """What run.json holds of a run that begins."""
    return {"schema": RUN_SCHEMA, "name": os.path.basename(run_folder), "created": time.time()}


def refuse_foreign(run_folder: str) -> None:
    """Raise `RunFolderError` where the folder, or one of ours in it, is another user's: nothing of it is trusted."""
    for folder in (run_folder, *(os.path.join(run_folder, part) for part in _PARTS)):
        what = files.foreign(folder)
        if what is not None:
            raise RunFolderError(
                "the run folder cannot be used",
                received=f"{folder} ({what})",
                expected="a folder of this user",
                hint=_name_another(),
            )


def _name_another() -> str:
    if in_notebook():
        return "choose another with `buoy.Run(DIR)` or `buoy.watch(DIR)`"
    return "choose another with `--run DIR`, or in Python with `buoy.Run(DIR)` or `buoy.watch(DIR)`"


def _next_attempt(run_folder: str) -> Attempt:
    attempts = os.path.join(run_folder, "attempts")
    number = max(attempt_numbers(run_folder), default=0) + 1
    while True:
        folder = os.path.join(attempts, f"{number:04d}")
        try:
            os.mkdir(folder, 0o700)  # atomic: two starters get two numbers
            return Attempt(run_folder, folder, number)
        except FileExistsError:
            number += 1


def discard(attempt: Attempt) -> bool:
    """Remove an attempt that never began, and its run if that has no other; whether the attempt is gone."""
    try:
        files.remove_folder(attempt.folder)
        if sorted(os.listdir(attempt.run_folder)) == ["attempts", "run.json"]:
            _remove_empty(attempt.run_folder)
    except OSError:
        return False
    return True


def attempt_numbers(run_folder: str) -> list[int]:
    """The attempts of a run in order; empty when there are none."""
    try:
        names = os.listdir(os.path.join(run_folder, "attempts"))
    except OSError:
        return []
    return sorted({number for name in names if (number := whole_number(name)) is not None})


def find_attempt(run: str | None = None, number: int | None = None) -> Attempt:
    """The attempt a user means: of this run (the newest run below the working directory), this number (the last)."""
    run_folder = find_run(run)
    numbers = attempt_numbers(run_folder)
    if run is not None and number is None:  # the folder of one attempt was named
        name = os.path.basename(os.path.abspath(run))
        number = whole_number(name) if os.path.abspath(run) != run_folder else None
    known = attempts_of(run_folder)
    if known and number is None:
        return known[-1]
    # Recorded by others only: their numbers are meant, where they recorded this run.
    if known and not numbers:
        numbers = sorted({attempt.number for attempt in known})
        meant = [attempt for attempt in known if attempt.number == number]
        if meant:
            return meant[-1]
    if not known:
        lacking = "; ".join(missing_of(run_folder))
        raise RunFolderError(
            "this run has no attempt yet" if not lacking else "no attempt of this run can be read",
            received=f"{run_folder} ({lacking})" if lacking else run_folder,
            expected="an attempt that can be read" if lacking else "a run that was started at least once",
            hint=_bring(run_folder) if lacking else _begin_one(),
        )
    if number is not None and number not in numbers:
        from shlex import quote  # this file is loaded in every training: only where it is needed

        ask = f"buoy.why({run_folder!r})" if in_notebook() else f"buoy why {quote(run_folder)}"
        raise RunFolderError(
            "no such attempt",
            received=f"attempt {number} of {run_folder}",
            expected=f"attempt 1 to {numbers[-1]}" if len(numbers) > 1 else f"attempt {numbers[0]}",
            hint=f"`{ask}` takes the last",
        )
    return _attempt(run_folder, numbers[-1] if number is None else number)


def attempts_of(run_folder: str) -> list[Attempt]:
    """Every attempt that recorded this run, oldest first: its own, and those of the notebooks that trained it."""
    own = [_attempt(run_folder, number) for number in attempt_numbers(run_folder)]
    others = _recorded_elsewhere(run_folder)
    return sorted([*own, *others], key=_began) if others else own


def _attempt(run_folder: str, number: int) -> Attempt:
    return Attempt(run_folder, os.path.join(run_folder, "attempts", f"{number:04d}"), number)


def point_to(run_folder: str, attempt: Attempt) -> None:
    """Note in a run folder that this attempt of another run records it: a notebook's, whose recorder ran already."""
    marker_path = os.path.join(run_folder, "run.json")
    marker = read_json(marker_path) or new_marker(run_folder)
    pointers = marker.get("recorded")
    pointers = pointers if isinstance(pointers, list) else []
    here = {"run": os.path.relpath(attempt.run_folder, run_folder), "attempt": attempt.number}
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    here |= {key: about[key] for key in _IDENTITY if about.get(key) is not None}
    if here not in pointers:
        files.make_folder(run_folder)
        files.write_json(marker_path, {**marker, "recorded": [*pointers, here]})


def _pointers(run_folder: str) -> list:  # type: ignore[type-arg]
    pointers = (read_json(os.path.join(run_folder, "run.json")) or {}).get("recorded")
    return pointers if isinstance(pointers, list) else []


def _recorded_elsewhere(run_folder: str) -> list[Attempt]:
    """The attempts of other runs that recorded this one, as far as they are still there."""
    found = []
    for pointer in _pointers(run_folder):
        if isinstance(pointer, dict) and isinstance(pointer.get("attempt"), int):
            folder = os.path.normpath(os.path.join(run_folder, str(pointer.get("run"))))
            attempt = _attempt(folder, pointer["attempt"])
            if attempt.number in attempt_numbers(folder) and _is_meant(pointer, attempt, run_folder):
                found.append(attempt)
    return found


def _is_meant(pointer: dict, attempt: Attempt, run_folder: str) -> bool:  # type: ignore[type-arg]
    """Whether the attempt of this number is the one that was pointed to: numbers begin again in a new folder."""
    about = read_json(os.path.join(attempt.folder, "attempt.json")) or {}
    both = [key for key in _IDENTITY if pointer.get(key) is not None and about.get(key) is not None]
    if "wall" in both:
        return all(pointer[key] == about[key] for key in both)
    # Written before pointers said more than a number, or attempt.json is lost: the recording must name the run.
    from buoy.flight.log import read_events
    from buoy.flight.trainings import training_of

    own = training_of(read_events(attempt.folder), attempt.run_folder, run_folder)
    return own.opened or own.began


def _bring(run_folder: str) -> str:
    lost = lost_recording(run_folder)
    if lost is not None and read_json(os.path.join(run_folder, "run.json")) is not None:
        return f"bring {lost} here too; if that was removed, only its checkpoints are left: `buoy ckpt list`"
    return f"make it readable, or copy {run_folder} here whole"


def lost_recording(run_folder: str) -> str | None:
    """The folder of the last recording that a run names, if that is not here and none is that may be later."""
    pointers = [pointer for pointer in _pointers(run_folder) if isinstance(pointer, dict)]
    if not pointers:
        return None
    last, found = pointers[-1], attempts_of(run_folder)
    folder = os.path.normpath(os.path.join(run_folder, str(last.get("run"))))
    if any((each.run_folder, each.number) == (folder, last.get("attempt")) for each in found):
        return None
    return folder if not found or _began(found[-1]) < (last.get("wall") or float("inf")) else None


def _began(attempt: Attempt) -> float:
    began = (read_json(os.path.join(attempt.folder, "attempt.json")) or {}).get("wall")
    return float(began) if isinstance(began, int | float) else 0.0


def is_run(folder: str) -> bool:
    """Whether this folder is a run of ours. One whose run.json is torn or lost is recognised by what lies beside it."""
    path = os.path.join(folder, "run.json")
    marker = read_json(path)
    if marker is not None:
        return str(marker.get("schema", "")).startswith("buoy.run/")
    if os.path.lexists(path) and any(os.path.isdir(os.path.join(folder, name)) for name in _PARTS):
        return True
    if _holds_checkpoints(folder):
        return True
    return any(
        os.path.exists(os.path.join(folder, "attempts", f"{number:04d}", name))
        for number in attempt_numbers(folder)[-3:]
        for name in _RECORDS
    )


def _holds_checkpoints(folder: str) -> bool:
    """Whether checkpoints of ours lie in it, by what the newest says of itself."""
    try:
        names = sorted(
            name for name in os.listdir(os.path.join(folder, "checkpoints")) if name[:5] == "step-"
        )
    except OSError:
        return False
    manifests = [read_json(os.path.join(folder, "checkpoints", name, "manifest.json")) for name in names[-3:]]
    return any(str((each or {}).get("schema", "")).startswith("buoy.checkpoint/") for each in manifests)


def missing_of(run_folder: str) -> list[str]:
    """What of a run cannot be read, in words; empty when all is there."""
    lacking = []
    path = os.path.join(run_folder, "run.json")
    if read_json(path) is None:
        lacking.append(_what_is_wrong(path))
    elif (lost := lost_recording(run_folder)) is not None:
        is_all = not attempts_of(run_folder)
        named = os.path.relpath(lost, os.path.dirname(os.path.abspath(run_folder)))
        lacking.append(f"the {'' if is_all else 'last '}recording that it names is not here ({named})")
    attempts = os.path.join(run_folder, "attempts")
    try:
        os.listdir(attempts)
    except FileNotFoundError:
        pass
    except OSError as error:
        lacking.append(f"attempts cannot be read ({error.strerror})")
    numbers = attempt_numbers(run_folder)
    if numbers and read_json(os.path.join(attempts, f"{numbers[-1]:04d}", "attempt.json")) is None:
        lacking.append(f"attempt.json of attempt {numbers[-1]} cannot be read")
    return lacking


def _what_is_wrong(path: str) -> str:
    name = os.path.basename(path)
    try:
        os.close(open_regular(path))
        return f"{name} is damaged"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def find_run(run: str | None = None) -> str:
    """The run folder that a user means: by its path or by the name below `runs/`, else the newest from here."""
    start = os.path.abspath(run or ".")
    if run is not None and not os.path.isdir(start):
        start = os.path.abspath(os.path.join("runs", run))
    if run is not None and not os.path.isdir(start):
        raise RunFolderError(
            "no such run folder",
            received=run,
            expected="a folder that holds a run",
            hint=_begin_one() if in_notebook() else "`buoy runs` shows what is there",
        )
    run_folder, attempts, _ = start.rpartition(os.sep + "attempts")  # a user may point at one attempt
    for named in (start, run_folder if attempts else start):
        if is_run(named):
            return named
    folders = [*_children(start), *_children(os.path.join(start, "runs"))]
    runs = [folder for folder in folders if is_run(folder)]
    if not runs:
        raise RunFolderError(
            "no run found",
            received=start,
            expected="a run folder, or a folder with `runs/` in it",
            hint=_begin_one() if in_notebook() else f"name its folder, as in `runs/train`; {_begin_one()}",
        )
    return max(runs, key=_last_touched)


def _begin_one() -> str:
    if in_notebook():
        return '`%load_ext buoy` records this notebook; so does a training with `buoy.Run("runs/cats")`'
    return "`buoy run -- python train.py` makes one"


def is_kernel(command: object) -> bool:
    """Whether a recorded command is that of a notebook's kernel: Jupyter's `ipykernel_launcher`, Colab's own.

    >>> is_kernel(["python", "/usr/lib/colab_kernel_launcher.py", "-f", "kernel-1.json"])
    True
    """
    words = command if isinstance(command, list) else []
    return any("ipykernel" in str(word) or "kernel_launcher" in str(word) for word in words)


def _children(folder: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder) if os.path.isdir(entry.path)]
    except OSError:
        return []


def _last_touched(run_folder: str) -> float:
    numbers = attempt_numbers(run_folder)
    # Without an attempt of its own, when it was last opened: a report that was written to it is no sign of life.
    newest = _attempt(run_folder, numbers[-1]).folder if numbers else os.path.join(run_folder, "run.json")
    try:
        return os.stat(newest).st_mtime
    except OSError:
        return 0.0


_COUNTED_PERIOD = 60.0
"""Where a quota makes us count files instead of asking the file system."""
_MOST_BYTES = 256 << 10


class RunDisk:
    """Read on by the sidecar; which disk it is, the training says in its events (`disk`)."""

    def __init__(self, attempt_folder: str, run_folder: str) -> None:
        self.path = run_folder
        self._events = os.path.join(attempt_folder, "events.jsonl")
        self._offset = 0
        self._due = 0.0
        self._known: disk.Space | None = None

    def space(self, now: float) -> disk.Space | None:
        """Room there; None when it cannot be asked."""
        path = self._named_last()
        if path is not None and path != self.path:
            self.path, self._due = path, 0.0
        if now >= self._due:
            self._known = disk.space(self.path)
            is_asked = self._known is not None and self._known.source == "statvfs"
            self._due = now + (0.0 if is_asked else _COUNTED_PERIOD)
        return self._known

    def _named_last(self) -> str | None:
        try:
            if os.stat(self._events).st_size <= self._offset:
                return None
            data = read_bounded(self._events, _MOST_BYTES, at=self._offset)
        except OSError:
            return None
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole) or (len(data) if len(data) == _MOST_BYTES else 0)
        paths = [_path(line) for line in whole.splitlines() if b'"disk"' in line]
        return next((path for path in reversed(paths) if path is not None), None)


def _path(line: bytes) -> str | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    path = event.get("path") if isinstance(event, dict) and event.get("kind") == "disk" else None
    return path if isinstance(path, str) else None


def on_another_disk(folder: str, device: int | None) -> int | None:
    """The device of a folder on a local disk that is not `device`; None of one on the same disk, or on a mounted drive.

    What a mounted drive says of its room is not what may be put there, and asking it may take forever.
    """
    try:
        found = os.stat(folder).st_dev
    except OSError:
        return None
    return found if found != device and disk.is_remote(folder) is False else None
