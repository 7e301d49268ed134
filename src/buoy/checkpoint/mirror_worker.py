"""The mirror's own process: copies committed checkpoints to a second home, so that the training never waits for it.

Run as `python -I -S mirror_worker.py MODE` with its orders as JSON on stdin. `keep` detaches and copies until the
training is gone and its newest checkpoint is safe; `list` and `fetch` answer with JSON lines on stdout and end.
It looks at the run folder itself: nothing has to be handed over, and a checkpoint that the detached writer finishes
after the training's death is copied too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import sys
import time
from typing import Any, NoReturn

if __name__ == "__main__":  # started by path: make `import buoy` find the package this file belongs to, last
    sys.path[0:1] = []
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from buoy.checkpoint.budget import PASSING, is_enough
from buoy.checkpoint.copies import Copy, is_half, local_copies, names_in, remote_copies, step_of
from buoy.checkpoint.home_folder import is_drive
from buoy.checkpoint.homes import Home, is_url, open_home
from buoy.checkpoint.lock import writes_for
from buoy.checkpoint.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    STATE,
    VALUES,
    pieces_of,
    size_of,
    unseal,
)
from buoy.checkpoint.mirror_fetch import answer, fetch
from buoy.checkpoint.mirror_log import LogTail
from buoy.checkpoint.mirror_status import LOCK, Status
from buoy.checkpoint.moving import DamagedSource, GiveUp
from buoy.checkpoint.owner import NotOurs, expect_ours
from buoy.checkpoint.retention import Keep, surplus, to_make_room
from buoy.errors import BuoyError
from buoy.machine.files import open_old, read_bounded
from buoy.machine.priority import step_back

_LOOK_SECONDS = 0.25
_NICE = 10
_RETRY_MOST = 300.0
_AFTER_DEATH = 600.0
"""So long a home in trouble is tried again, and a writer waited for, after the training has ended."""


class Worker:
    """Copies until its training is gone and the newest checkpoint is safe."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self._orders = orders
        self._run = str(orders["run"])
        self._keep = Keep(**orders["keep"])
        self._home: Home | None = None
        self._there: dict[str, Copy] = {}
        self._unusable = set(orders["unusable"])
        """Names that were found damaged there when they were read, whatever their sizes say."""
        self._proven: set[object] = set()
        """What is there as it should be, by our own doing or by comparing it: only that is called safe."""
        self._left_out: set[object] = set()
        """What is damaged here, and what there is no room for beside newer ones there."""
        self._sent: set[tuple[object, str]] = set()
        """(checkpoint, file) that are there whole, by our own doing: not sent again after trouble."""
        self._refused = 0
        """So often in a row there was no room for a copy."""
        self._settled: list[str] | None = None
        """What the run folder held when there was nothing left to do: looking again costs one listing."""
        where = str(orders["where"])
        self._status = Status(self._run, str(orders["shown"]), not is_url(where) and is_drive(where))
        self._retry = float(orders["retry"])
        self._log = LogTail(self._run, orders["attempt"])
        self._ended: float | None = None
        try:
            self._training = os.pidfd_open(int(orders["pid"]))
        except OSError:
            self._training = -1
            self._ended = time.monotonic()

    def run(self) -> None:
        """The loop of this process."""
        while True:
            pause = _LOOK_SECONDS
            # Asked before the round: what is committed until then, this round copies.
            is_last = self._nothing_more_comes()
            try:
                done = self._round()
                if self._status.values["trouble"] is not None:
                    self._status.set(trouble=None, not_ours=False)
                self._retry = float(self._orders["retry"])
            except GiveUp:
                self._status.set(copying=None)
                continue
            except Exception as error:  # noqa: BLE001 - a home that fails is tried again; nobody waits for it
                done, pause = False, self._retry
                self._retry = min(_RETRY_MOST, 2 * self._retry)
                self._home, self._there, self._proven, self._settled = None, {}, set(), None
                self._status.set(trouble=_in_words(error, self._orders["where"]), copying=None)
                if isinstance(error, NotOurs):
                    none = dict.fromkeys(("newest", "newest_made", "newest_safe"))
                    self._status.set(there={}, not_ours=True, **none)
            if is_last and (done or self._hopeless()):
                self._copy_last_log()
                return
            self._wait(pause)

    def _nothing_more_comes(self) -> bool:
        """The training is gone, and so is the writer that it may have left busy with its newest checkpoint."""
        if not self._training_ended():
            return False
        checkpoints = os.path.join(self._run, "checkpoints")
        return self._is_late() or not writes_for(int(self._orders["pid"]), checkpoints)

    def _is_late(self) -> bool:
        return time.monotonic() - (self._ended or 0.0) > _AFTER_DEATH

    def _hopeless(self) -> bool:
        """Whether trying on is of no use: nothing is left to copy, it may not be copied, or trouble lasted too long."""
        return self._status.values["not_ours"] or not local_copies(self._run) or self._is_late()

    def _round(self) -> bool:
        """Copy what is missing, newest first; True when nothing was left to do."""
        if self._home is None:
            self._home = open_home(
                str(self._orders["where"]), os.path.basename(self._run), self._orders["mount"]
            )
            there = {copy.name: copy for copy in remote_copies(self._home)}
            self._there = {name: copy for name, copy in there.items() if name not in self._unusable}
            self._tell_there()
        if self._log.is_due(self._home):
            self._expect_ours(self._home)
            self._log.copy(self._home)
        names = names_in(self._run)
        if names == self._settled:
            self._status.beat()
            return True
        self._expect_ours(self._home)
        here = self._here()
        if here and self._has(here[0]) and here[0].key not in self._proven:
            self._prove(self._home, here[0])
        everything = {**self._there, **{copy.name: copy for copy in here}}
        unwanted = {copy.name for copy in surplus(list(everything.values()), self._keep)}
        missing = [copy for copy in here if not self._has(copy) and copy.name not in unwanted]
        if not missing:
            self._forget(self._home)
            self._remove_halves(self._home)
            self._settled = names
            return True
        self._copy(self._home, missing[0], newest=missing[0] is here[0])
        self._forget(self._home)
        return False

    def _copy(self, home: Home, copy: Copy, newest: bool) -> None:
        folder = os.path.join(self._run, "checkpoints", copy.name)
        began = time.monotonic()
        moved = {"step": copy.step, "done": 0, "bytes": copy.bytes, "moved": time.time()}
        self._status.set(copying=moved)
        checked = began

        def progress(count: int) -> None:
            nonlocal checked
            moved["done"] += count
            moved["moved"] = time.time()
            self._status.beat()
            if time.monotonic() - checked > _LOOK_SECONDS:
                checked = time.monotonic()
                self._still_wanted(copy, newest)

        try:
            manifest = read_bounded(os.path.join(folder, MANIFEST), MOST_MANIFEST_BYTES)
            if unseal(manifest, folder) != copy.fields:
                raise GiveUp  # another one has taken its name since the folder was read
            sizes = home.sizes().get(copy.name, {})
            if MANIFEST in sizes:
                # Of an earlier life, and maybe damaged. Its manifest must not stand beside files of this one.
                home.remove(copy.name)
                self._there.pop(copy.name, None)
                sizes = {}
            for file in (STATE, VALUES):
                # By our own doing: the size alone would also fit what an earlier life has left there.
                if (copy.key, file) not in self._sent or sizes.get(file) != size_of(copy.fields, file):
                    pieces = pieces_of(copy.fields, file)
                    home.put(os.path.join(folder, file), copy.name, file, pieces, progress)
                    self._sent.add((copy.key, file))
            home.write(copy.name, MANIFEST, manifest)
            if home.read(copy.name, MANIFEST, len(manifest) + 1) != manifest:
                raise OSError(errno.EIO, "the manifest did not read back as it was written")
        except (FileNotFoundError, BuoyError):
            if os.path.isdir(folder):
                raise
            raise GiveUp from None  # removed here while it was copied
        except DamagedSource as error:
            self._leave_out(copy, str(error.strerror))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._make_room(home, copy, error.errno):
                raise GiveUp from None  # tried again at once
            raise
        self._there[copy.name] = copy
        self._refused = 0
        self._unusable.discard(copy.name)
        self._proven.add(copy.key)
        self._status.set(copying=None, damaged_here=None, copy_seconds=time.monotonic() - began)
        self._tell_there()

    def _prove(self, home: Home, copy: Copy) -> None:
        """Compare what an earlier life has sent, before anybody is told that it is safe; else it is sent again."""
        folder = os.path.join(self._run, "checkpoints", copy.name)
        try:
            good = all(
                home.holds(os.path.join(folder, file), copy.name, file, pieces_of(copy.fields, file))
                for file in (STATE, VALUES)
            )
        except DamagedSource as error:
            self._leave_out(copy, str(error.strerror))
        except FileNotFoundError:
            raise GiveUp from None  # removed here meanwhile
        if good:
            self._proven.add(copy.key)
        else:
            del self._there[copy.name]
        self._tell_there()

    def _leave_out(self, copy: Copy, what: str) -> NoReturn:
        """The one here is damaged: what would arrive there would be so too."""
        self._left_out.add(copy.key)
        self._status.set(damaged_here=f"step {copy.step} here is damaged ({what})", copying=None)
        raise GiveUp

    def _here(self) -> list[Copy]:
        return [copy for copy in local_copies(self._run) if copy.key not in self._left_out]

    def _has(self, copy: Copy) -> bool:
        """Whether this very checkpoint is there: another life may have made one of the same name."""
        there = self._there.get(copy.name)
        return there is not None and there.key == copy.key

    def _still_wanted(self, copy: Copy, newest: bool) -> None:
        """An old one gives way to a new one; what was sent of it is gone on from later."""
        if newest:
            return
        here = self._here()
        if here and not self._has(here[0]) and here[0].name != copy.name:
            raise GiveUp

    def _forget(self, home: Home) -> None:
        """Retention there, never touching the newest."""
        for copy in surplus(list(self._there.values()), self._keep):
            home.remove(copy.name)
            del self._there[copy.name]
            self._tell_there()

    def _make_room(self, home: Home, copy: Copy, number: int) -> bool:
        """Free what this copy needs: two good ones stay there if that will do, else the newest; whether to go on."""
        self._refused += 1
        if number == errno.ENOSPC and is_enough(home.free(), copy.bytes) and self._refused <= PASSING:
            return False  # the place itself has room: it may pass
        there = list(self._there.values())
        if any(other.age > copy.age for other in there):
            self._left_out.add(copy.key)  # an older one does not drive out a newer
            return True
        found = home.sizes()
        halves = [name for name in self._halves(found) if step_of(name) <= copy.step and name != copy.name]
        # Where a quota is full the disk still has room, and so nothing seems to be missing: one is tried then.
        missing = max(1, copy.bytes - sum(found.get(copy.name, {}).values()) - home.free())
        going = to_make_room(there, self._keep, missing) or to_make_room(there, self._keep, missing, 1)
        self._left_out.update(old.key for old in going)
        for name in [*halves, *(old.name for old in going)]:
            home.remove(name)
            self._there.pop(name, None)
        return bool(halves or going)

    def _remove_halves(self, home: Home) -> None:
        """What nobody will finish: the step was made again, or the checkpoint removed here, while it was copied."""
        newest = max((copy.step for copy in self._there.values()), default=-1)
        for name in self._halves(home.sizes()):
            if step_of(name) <= newest:  # else it may be all that is left of its step
                home.remove(name)

    def _halves(self, found: dict[str, dict[str, int]]) -> set[str]:
        return {name for name, sizes in found.items() if is_half(sizes) and name not in self._there}

    def _tell_there(self) -> None:
        proven = [copy for copy in self._there.values() if copy.key in self._proven]
        newest = max(proven or self._there.values(), key=lambda copy: copy.age, default=None)
        told = self._status.values
        if newest is None:
            self._status.set(there={}, newest=None, newest_made=None, newest_safe=None)
            return
        is_told = (told["newest"], told["newest_made"]) == (newest.step, newest.time)
        safe = ((is_told and told["newest_safe"]) or time.time()) if proven else None
        self._status.set(
            there={name: copy.digest for name, copy in sorted(self._there.items())},
            newest=newest.step,
            newest_made=newest.time,
            newest_safe=safe,
        )

    def _expect_ours(self, home: Home) -> None:
        """Before anything is written there: two runs of one name must not write over each other."""
        place = f"{self._orders['shown']}/{os.path.basename(self._run)}"
        expect_ours(home, self._run, str(self._orders["life"]), place)

    def _copy_last_log(self) -> None:
        try:
            if self._home is not None and self._log.is_complete(self._home):
                self._expect_ours(self._home)
                self._log.copy(self._home)
        except OSError:
            pass  # the checkpoints are safe, or the home is another's; the log is here

    def _training_ended(self) -> bool:
        if self._ended is None and select.select([self._training], [], [], 0)[0]:
            self._ended = time.monotonic()
        return self._ended is not None

    def _wait(self, seconds: float) -> None:
        if self._ended is None:
            select.select([self._training], [], [], seconds)
        else:
            time.sleep(seconds)


def keep(orders: dict[str, Any]) -> None:
    """Detach, wait for the search of the checkpoint to go on from and for the mirror before this one, and copy."""
    import fcntl

    child = os.fork()
    if child:
        answer(pid=child)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody listens from here on
    os.setsid()
    os.chdir("/")
    step_back(_NICE)
    if is_url(str(orders["where"])):
        try:
            open_home(str(orders["where"]), str(orders["name"]))  # seconds of imports, beside the search
        except Exception:  # noqa: BLE001 - the first round says what is wrong
            pass
    begin = sys.stdin.readline()
    if not begin:
        return  # no training came of it: what is there is left as it is
    orders["unusable"] = json.loads(begin)
    lock = open_old(os.path.join(orders["run"], LOCK), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: two mirrors copy the same files to the same names
    Worker(orders).run()


def _in_words(error: Exception, where: object) -> str:
    """For people: without the password that the place's own words may repeat."""
    words = (
        str(error.strerror)
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    secret = re.search(r"://([^/@]+)@", str(where))
    return words.replace(secret[1], "***")[:300] if secret is not None else words[:300]


def main(mode: str) -> None:
    """Read the orders and carry them out."""
    orders = json.loads(sys.stdin.readline())
    sys.path.extend(path for path in orders["path"] if path not in sys.path)
    if mode == "keep":
        keep(orders)
        return
    try:
        if mode == "list":
            home = open_home(str(orders["where"]), str(orders["name"]), orders["mount"], anyones=True)
            answer(copies=[copy.to_json() for copy in remote_copies(home)])
        else:
            fetch(orders)
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        answer(error=_in_words(error, orders["where"]))


if __name__ == "__main__":
    main(sys.argv[1])
