"""Whose a mirror is. Two runs whose folders have the same last name must not write over each other there.

A run folder and its place in the mirror hold the same `owner.json`. Its `id` is made once and stays with the run, also
on a new machine. Its `life` is of one training process: the last claim wins, and who was there before says so and
copies nothing more. Beside it the process that copies renews `alive.json`: a start is refused while another machine
does.
"""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from buoy.checkpoint import lock
from buoy.checkpoint.lock import is_held
from buoy.checkpoint.mirror.storage import Storage
from buoy.checkpoint.store import Store
from buoy.errors import BuoyError, UsageError
from buoy.machine import host
from buoy.machine.files import make_folder, parse_json, read_json, write_json
from buoy.units import format_duration

FILE, ALIVE = "owner.json", "alive.json"
SCHEMA = "buoy.owner/1"
BEAT_SECONDS = 45.0
"""Between two signs of life in the mirror."""
_MOST_BYTES = 1 << 16

_lives: dict[str, str] = {}


class NotOurs(OSError):  # noqa: N818 - says what happened
    """The mirror is another run's, or another training has made it its own since."""


def life_of(run: str) -> str:
    """This process's training of this folder: a notebook's cell that is run again is the same one."""
    return _lives.setdefault(os.path.realpath(run), uuid.uuid4().hex)


def short_name(run: str) -> str:
    """The last two names of a run folder's path, by which its user knows it.

    >>> short_name("/content/exp3/cats")
    'exp3/cats'
    """
    return "/".join(os.path.abspath(run).split(os.sep)[-2:]).lstrip("/")


def owner_of(storage: Storage) -> dict[str, Any] | None:
    """What the mirror says of its owner; None where it says nothing, as mirrors of an older buoy do."""
    owner = _read(storage, FILE)
    if owner is None or not isinstance(owner.get("id"), str):
        return None
    return {**owner, **{key: str(owner.get(key) or "n/a") for key in ("life", "run", "path")}}


def refuse_anothers(there: dict[str, Any] | None, run: str, place: str) -> None:
    """Raise `UsageError` when the mirror (`place`, for the message) is of another run than this folder's.

    A folder without checkpoints is a new machine for the run that is there, unless that one is trained on this machine.
    """
    if there is None:
        return
    mine = _id_here(run)
    who = there["run"]
    if mine is None and _is_trained_here(there, run):
        raise _refusal(place, f"{who}, which is being trained at this moment")
    if mine is None and any(each.complete for each in Store(run).list()):
        raise _refusal(place, who, f", or copy its {FILE} here if they are the same run")
    if mine not in (None, there["id"]):
        raise _refusal(place, who)


def refuse_two_machines(storage: Storage, life: str, place: str, say: Callable[[str], object]) -> None:
    """Raise `UsageError` while another machine trains this run; looks a while where one did a moment ago."""
    seen = _read(storage, ALIVE)
    age = time.time() - _wall(seen)
    if seen is None or not _is_elsewhere(seen, life) or abs(age) > 3 * BEAT_SECONDS:
        return
    longest = 1.5 * BEAT_SECONDS
    say(
        f"{seen.get('run')} was trained on another machine {format_duration(max(0.0, age))} ago; "
        f"checking for {format_duration(longest)} whether it still is"
    )
    until = time.monotonic() + longest
    while time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 20)
        now = _read(storage, ALIVE)
        if now is not None and now != seen:
            if not _is_elsewhere(now, life):
                return
            raise UsageError(
                "this run is being trained on another machine",
                received=f"{place}, where {now.get('run')} writes at this moment",
                expected="one training at a time",
                hint="end the other one first, or name another mirror or another run folder",
            )


def sign_of_life(storage: Storage, run: str, life: str, *, ended: bool) -> None:
    """Show other machines that this training lives, or that it has ended."""
    sign = {"life": life, "machine": _machine(), "run": short_name(run), "wall": time.time(), "ended": ended}
    storage.write_beside(ALIVE, json.dumps(sign).encode())


def claim(storage: Storage, run: str, life: str, place: str) -> str | None:
    """Make the mirror this run's, in writing; who had it before, None when nobody or this very training."""
    there = owner_of(storage)
    if there is not None and there["life"] == life:
        return None
    refuse_anothers(there, run, place)
    mine = there["id"] if there is not None else _id_here(run) or uuid.uuid4().hex
    owner = {"schema": SCHEMA, "id": mine, "life": life, "run": short_name(run), "path": os.path.realpath(run),
             "since": time.time()}  # fmt: skip
    storage.write_beside(FILE, json.dumps(owner).encode())
    make_folder(run)
    # After the other: that our life is here means that it was there.
    write_json(os.path.join(run, FILE), owner)
    return there["run"] if there is not None else None


def expect_ours(storage: Storage, run: str, life: str, place: str) -> None:
    """Before anything is written there: `NotOurs` when it is another's, or was ours and no longer is."""
    there = owner_of(storage)
    if there is not None and there["life"] == life:
        return
    mine = read_json(os.path.join(run, FILE)) or {}
    if there is not None and (mine.get("id"), mine.get("life")) == (there["id"], life):
        raise NotOurs(errno.EBUSY, f"the run {there['run']} has taken it over")
    try:
        claim(storage, run, life, place)
    except BuoyError as error:
        raise NotOurs(errno.EPERM, f"{error.message} ({error.received})") from None


def adopt(storage: Storage, run: str) -> None:
    """A checkpoint was brought into an empty run folder: it is the mirror's run from now on."""
    there = owner_of(storage)
    if there is not None and _id_here(run) is None:
        write_json(os.path.join(run, FILE), there)


def _read(storage: Storage, file: str) -> dict[str, Any] | None:
    data = storage.read_beside(file, _MOST_BYTES)
    try:
        found = parse_json(data) if data else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _id_here(run: str) -> str | None:
    found = (read_json(os.path.join(run, FILE)) or {}).get("id")
    return found if isinstance(found, str) else None


def _is_trained_here(there: dict[str, Any], run: str) -> bool:
    """Whether the owner is another folder of this machine in which a training runs now."""
    other = there["path"]
    return (
        other != os.path.realpath(run)
        and _id_here(other) == there["id"]
        and is_held(os.path.join(other, "checkpoints", lock.NAME)) is True
    )


def _is_elsewhere(sign: dict[str, Any], life: str) -> bool:
    return sign.get("ended") is not True and sign.get("life") != life and sign.get("machine") != _machine()


def _wall(sign: dict[str, Any] | None) -> float:
    wall = (sign or {}).get("wall")
    return float(wall) if isinstance(wall, int | float) else 0.0


def _machine() -> str:
    return f"{host.boot_id()}/{host.hostname()}"  # containers of one machine have names of their own


def _refusal(place: str, who: str, otherwise: str = "") -> UsageError:
    return UsageError(
        f"{place} holds the checkpoints of another run",
        received=f"a mirror folder that belongs to {who}",
        expected="a mirror folder of this run's own, which has the name of the run folder",
        hint=f"name another mirror, or another run folder{otherwise}",
    )
