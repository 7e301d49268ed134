"""Whose a second home is. Two runs whose folders have the same last name must not write over each other there.

A run folder and its place in the mirror hold the same `owner.json`. Its `id` is made once and stays with the run, also
on a new machine. Its `life` is of one training process: whoever writes there last with another life has taken over.
"""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from typing import Any

from buoy.checkpoint import lock
from buoy.checkpoint.copies import local_copies, remote_copies
from buoy.checkpoint.held import is_held
from buoy.checkpoint.homes import Home
from buoy.errors import BuoyError, UsageError
from buoy.machine.files import make_folder
from buoy.machine.records import parse_json, read_json, write_json

FILE = "owner.json"
SCHEMA = "buoy.owner/1"
_MOST_BYTES = 1 << 16

_lives: dict[str, str] = {}


class NotOurs(OSError):  # noqa: N818 - says what happened
    """The home is another run's, or another training has made it its own since."""


def life_of(run: str) -> str:
    """This process's training of this folder: a notebook's cell that is run again is the same one."""
    return _lives.setdefault(os.path.realpath(run), uuid.uuid4().hex)


def short_name(run: str) -> str:
    """The last two words of a run folder's path, by which people know it.

    >>> short_name("/content/exp3/cats")
    'exp3/cats'
    """
    return "/".join(os.path.abspath(run).split(os.sep)[-2:]).lstrip("/")


def owner_there(home: Home) -> dict[str, str] | None:
    """What the home says of its owner; None where it says nothing, as mirrors of an older buoy do."""
    return _known(home.read_beside(FILE, _MOST_BYTES))


def refuse_anothers(there: dict[str, str] | None, home: Home, run: str, place: str) -> None:
    """Raise `UsageError` when the home (`place`, in words) is of another run than this folder's."""
    if there is None:
        return
    mine = _id_here(run)
    who = there["run"]
    if mine is None and _trains_elsewhere(there, run):
        raise _refusal(place, f"{who}, which is being trained at this moment")
    if mine is None and _is_of_another_by_content(home, run):
        raise _refusal(place, who)
    if mine is not None and mine != there["id"]:
        raise _refusal(place, who)


def claim(home: Home, run: str, life: str, place: str) -> str | None:
    """Make the home this run's, in writing; who had it before, None when nobody or this very training."""
    there = owner_there(home)
    if there is not None and there["life"] == life:
        return None
    refuse_anothers(there, home, run, place)
    mine = there["id"] if there is not None else _id_here(run) or uuid.uuid4().hex
    owner = {"schema": SCHEMA, "id": mine, "life": life, "run": short_name(run), "path": os.path.realpath(run),
             "since": time.time()}  # fmt: skip
    home.write_beside(FILE, json.dumps(owner).encode())
    make_folder(run)
    # After the other: that our life is here means that it was there.
    write_json(os.path.join(run, FILE), owner)
    return there["run"] if there is not None else None


def expect_ours(home: Home, run: str, life: str, place: str) -> None:
    """Before anything is written there: `NotOurs` when it is another's, or was ours and no longer is."""
    there = owner_there(home)
    if there is not None and there["life"] == life:
        return
    mine = read_json(os.path.join(run, FILE)) or {}
    if there is not None and (mine.get("id"), mine.get("life")) == (there["id"], life):
        raise NotOurs(errno.EBUSY, f"the run {there['run']} has taken it over")
    try:
        claim(home, run, life, place)
    except BuoyError as error:
        raise NotOurs(errno.EPERM, f"{error.message} ({error.received})") from None


def adopt(home: Home, run: str) -> None:
    """A checkpoint was brought into an empty run folder: it is the home's run from now on."""
    there = owner_there(home)
    if there is not None and _id_here(run) is None:
        write_json(os.path.join(run, FILE), there)


def name_before(run: str) -> str | None:
    """What this run's folder was called when a training last used its mirror, if it is no longer there."""
    here = read_json(os.path.join(run, FILE)) or {}
    name, path = str(here.get("run") or "").rpartition("/")[2], here.get("path")
    is_gone = isinstance(path, str) and not os.path.exists(path)
    return name if is_gone and name and name != os.path.basename(os.path.abspath(run)) else None


def is_home_of(there: dict[str, str] | None, run: str) -> bool:
    """Whether the home's owner is the run that this folder holds."""
    return there is not None and there["id"] == _id_here(run)


def _known(data: bytes | None) -> dict[str, str] | None:
    try:
        owner: Any = parse_json(data) if data else None
    except ValueError:
        return None
    if not isinstance(owner, dict) or not isinstance(owner.get("id"), str):
        return None
    return {key: str(owner.get(key) or "n/a") for key in ("schema", "id", "life", "run", "path")}


def _id_here(run: str) -> str | None:
    found = (read_json(os.path.join(run, FILE)) or {}).get("id")
    return found if isinstance(found, str) else None


def _trains_elsewhere(there: dict[str, str], run: str) -> bool:
    """Whether the owner is another folder of this machine in which a training goes on now."""
    other = there["path"]
    return (
        other != os.path.realpath(run)
        and _id_here(other) == there["id"]
        and is_held(os.path.join(other, "checkpoints", lock.NAME)) is True
    )


def _is_of_another_by_content(home: Home, run: str) -> bool:
    """A folder without an id that has checkpoints, none of which is there: it was never mirrored there."""
    here = {copy.digest for copy in local_copies(run)}
    there = {copy.digest for copy in remote_copies(home)} if here else set()
    return bool(here and there) and not here & there


def _refusal(place: str, who: str) -> UsageError:
    return UsageError(
        f"{place} holds the checkpoints of another run",
        received=f"a mirror folder that belongs to {who}",
        expected="a mirror folder of this run's own, which has the name of the run folder",
        hint="name another mirror, or another run folder",
    )
