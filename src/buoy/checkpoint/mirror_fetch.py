"""The way back: the newest good checkpoint of the second home, brought into the run folder, every byte verified.

Runs in the mirror's own process and answers with JSON lines on stdout.
"""

from __future__ import annotations

import errno
import filecmp
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from buoy.checkpoint.copies import Copy, survey
from buoy.checkpoint.homes import Home, open_home
from buoy.checkpoint.manifest import MANIFEST, STATE, VALUES
from buoy.checkpoint.owner import adopt, claim, owner_there, refuse_anothers
from buoy.checkpoint.passed_over import Unusable
from buoy.checkpoint.reader import open_checkpoint
from buoy.errors import BuoyError
from buoy.machine import files
from buoy.units import format_bytes


def fetch(orders: dict[str, Any]) -> None:
    """Bring the newest good checkpoint (or the step asked for) back; what cannot be used on the way is named."""
    is_told = orders["life"] is None  # by a person, who named the very folder; a training takes nobody else's
    home = open_home(str(orders["where"]), str(orders["name"]), orders["mount"], anyones=is_told)
    checkpoints = os.path.join(str(orders["run"]), "checkpoints")
    if orders["life"] is not None and not _is_ours(home, orders):
        return
    for candidate in _newest_first(*survey(home)):
        if orders["step"] is not None and candidate.step != orders["step"]:
            continue
        if orders["newer_than"] is not None and candidate.step <= orders["newer_than"]:
            break
        if isinstance(candidate, Unusable):
            answer(unusable=asdict(candidate))
            continue
        try:
            folder = _bring(home, candidate, checkpoints)
        except BuoyError as error:
            what = error.received or error.message
            answer(unusable=asdict(Unusable(candidate.step, candidate.name, what)))
            continue
        if os.path.basename(str(orders["run"])) == orders["name"]:
            _adopt_quietly(home, str(orders["run"]))
        answer(step=candidate.step, folder=folder)
        return
    answer(step=None)


def answer(**values: object) -> None:
    """One line to whoever asked."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _is_ours(home: Home, orders: dict[str, Any]) -> bool:
    """Make the home this training's before anything is taken from it; who had it, or why not, is answered."""
    run, place = str(orders["run"]), f"{orders['shown']}/{orders['name']}"
    there = owner_there(home)
    try:
        refuse_anothers(there, home, run, place)
        answer(owner=there["run"] if there is not None else None)
        claim(home, run, str(orders["life"]), place)
    except BuoyError as error:
        answer(refused=[error.message, error.received, error.expected, error.hint])
        return False
    except OSError:
        pass  # a full drive can still be read; the process that copies claims it again, and says what is wrong
    return True


def _adopt_quietly(home: Home, run: str) -> None:
    try:
        adopt(home, run)
    except OSError:
        pass  # the checkpoint is here: the next start finds its content in the mirror, which is as good


def _newest_first(copies: list[Copy], unusable: list[Unusable]) -> list[Copy | Unusable]:
    """Of one step the whole one comes first: what stands beside it is of no interest then."""
    everything: list[Copy | Unusable] = [*copies, *unusable]
    return sorted(everything, key=lambda one: (one.step, isinstance(one, Copy)), reverse=True)


def _bring(home: Home, copy: Copy, checkpoints: str) -> str:
    """The folder that it is now; `DamagedCheckpoint` when a byte is not as it was written."""
    files.make_folder(os.path.dirname(checkpoints))
    files.make_folder(checkpoints)
    part = os.path.join(checkpoints, f".{copy.name}.part-{os.getpid()}")
    os.mkdir(part, files.FOLDER_MODE)
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        answer(progress=[done, copy.bytes])

    try:
        home.get(copy.name, MANIFEST, os.path.join(part, MANIFEST), progress)
        if (here := _same_here(part, copy.step, checkpoints)) is not None:
            files.remove_folder(part)
            return here
        for file in (STATE, VALUES):
            home.get(copy.name, file, os.path.join(part, file), progress)
        open_checkpoint(part)
        final, count = os.path.join(checkpoints, copy.name), 1
        while os.path.lexists(final):  # a damaged one of that name may be here: it is not touched
            count += 1
            final = os.path.join(checkpoints, f"step-{copy.step:09d}.{count}")
        files.sync_folder(part)
        os.rename(part, final)
        files.sync_folder(checkpoints)
    except BuoyError:
        files.remove_folder(part)
        raise
    except OSError as error:
        files.remove_folder(part)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, f"no room here for its {format_bytes(copy.bytes)}") from error
        raise
    return final


def _same_here(part: str, step: int, checkpoints: str) -> str | None:
    """A good checkpoint with the manifest that was brought, and so with the same bytes."""
    for name in sorted(os.listdir(checkpoints)):
        if name.partition(".")[0] != f"step-{step:09d}":
            continue
        folder = os.path.join(checkpoints, name)
        try:
            if filecmp.cmp(os.path.join(part, MANIFEST), os.path.join(folder, MANIFEST), shallow=False):
                open_checkpoint(folder)
                return folder
        except (OSError, BuoyError):
            continue  # cut short or damaged: the one from the mirror comes beside it
    return None
