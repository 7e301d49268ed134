"""The mirror's own process: copies committed checkpoints to the mirror, so that the training never waits for it.

Run as `python -I -S worker.py MODE` with its orders as JSON on stdin. `keep` detaches and copies until the
training is gone and its newest checkpoint is safe; `fetch` brings one back, answers with JSON lines on stdout and ends.
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
from dataclasses import asdict
from typing import Any

if __name__ == "__main__":  # started by path: make `import buoy` find the package this file belongs to, last
    sys.path[0:1] = []
    sys.path.append(
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    )

from buoy.checkpoint.lock import writes_for
from buoy.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES, STATE, VALUES, pieces_of, unseal
from buoy.checkpoint.mirror.owner import (
    BEAT_SECONDS,
    NotOurs,
    adopt,
    claim,
    expect_ours,
    owner_of,
    refuse_anothers,
    refuse_two_machines,
    sign_of_life,
)
from buoy.checkpoint.mirror.storage import (
    LOCK,
    STATUS,
    STATUS_SCHEMA,
    DamagedSource,
    Storage,
    is_drive,
    is_half,
    is_url,
    open_storage,
    step_of,
    survey,
)
from buoy.checkpoint.reader import open_checkpoint
from buoy.checkpoint.retention import PASSING, Keep, age, is_enough, surplus, to_make_room
from buoy.checkpoint.store import Entry, Store, Unusable
from buoy.errors import BuoyError
from buoy.flight.mirror import PERIOD, copy_tail, number_there
from buoy.machine import disk, files
from buoy.machine.process import step_back
from buoy.units import format_bytes

_LOOK_SECONDS = 0.25
_STATUS_SECONDS = 1.0
_VERDICT_SECONDS = 10.0
_NICE = 10
_RETRY_MOST = 300.0
_AFTER_DEATH = 600.0
"""So long a mirror in trouble is tried again, and a writer waited for, after the training has ended."""


class _Overtaken(OSError):  # noqa: N818 - says what happened
    """A newer checkpoint was committed here while an older one was copied."""


class Worker:
    """Copies until its training is gone and the newest checkpoint is safe."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self._orders = orders
        self._run, self._where = str(orders["run"]), str(orders["where"])
        self._name = os.path.basename(self._run)
        self._keep = Keep(**orders["keep"])
        self._storage: Storage | None = None
        self._there: dict[str, Entry] = {}
        self._unusable = set(orders["unusable"])
        """Names that were found damaged there when they were read, whatever their sizes say."""
        self._sent: dict[object, float] = {}
        """What this process has sent, and when: only that is called safe."""
        self._left_out: set[object] = set()
        """What is damaged here, and what there is no room for beside newer ones there."""
        self._refused = 0
        """So often in a row there was no room for a copy."""
        self._settled: list[str] | None = None
        """What the run folder held when there was nothing left to do: looking again costs one listing."""
        self._status = Status(
            self._run, str(orders["shown"]), not is_url(self._where) and is_drive(self._where)
        )
        self._attempt: str | None = orders["attempt"] if is_url(self._where) else None
        """Whose log is copied: in a mirror that only fsspec reaches; into folders the recorder copies it itself."""
        self._log_number: int | None = None
        self._log_due = 0.0
        self._beat_due = 0.0
        self._ended: float | None = None
        try:
            self._training = os.pidfd_open(int(orders["pid"]))
        except OSError:
            self._training = -1
            self._ended = time.monotonic()

    def run(self) -> None:
        """The loop of this process."""
        retry = float(self._orders["retry"])
        while True:
            pause = _LOOK_SECONDS
            # Asked before the round: what is committed until then, this round copies.
            is_last = self._nothing_more_comes()
            try:
                done = self._round()
                if self._status.values["trouble"] is not None:
                    self._status.set(trouble=None, not_ours=False)
                retry = float(self._orders["retry"])
            except Exception as error:  # noqa: BLE001 - a mirror that fails is tried again; nobody waits for it
                done, pause = False, retry
                retry = min(_RETRY_MOST, 2 * retry)
                self._storage, self._there, self._settled = None, {}, None
                self._status.set(trouble=_in_words(error, self._where), copying=None)
                if isinstance(error, NotOurs):
                    self._status.set(not_ours=True)
                    self._report_there()
            if is_last and (done or self._is_hopeless()):
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

    def _is_hopeless(self) -> bool:
        """Whether trying on is of no use: nothing is left to copy, it may not be copied, or trouble lasted too long."""
        return self._status.values["not_ours"] or not _copies_here(self._run) or self._is_late()

    def _round(self) -> bool:
        """Copy what is missing, newest first; True when nothing was left to do."""
        if self._storage is None:
            self._storage = open_storage(self._where, self._name, self._orders["mount"])
            there, _ = survey(self._storage)
            self._there = {copy.name: copy for copy in there if copy.name not in self._unusable}
            self._report_there()
        storage = self._storage
        self._renew(storage)
        if time.monotonic() >= self._log_due:
            self._copy_log(storage)
        try:
            names = sorted(os.listdir(os.path.join(self._run, "checkpoints")))
        except OSError:
            names = []
        if names == self._settled:
            self._status.beat()
            return True
        self._expect_ours(storage)
        here, missing = self._look()
        if missing:
            self._copy(storage, missing[0], is_newest=missing[0] is here[0])
        for copy in surplus(list(self._there.values()), self._keep):
            self._remove(storage, copy.name)
        if missing:
            return False
        # What nobody will finish: the step was made again, or the checkpoint removed here, while it was copied.
        newest = max((copy.step for copy in self._there.values()), default=-1)
        for name in _halves(storage.sizes(), newest):  # a newer one may be all that is left of its step
            self._remove(storage, name)
        self._settled = names
        return True

    def _look(self) -> tuple[list[Entry], list[Entry]]:
        """What can be sent, and what of it is to be: newest first."""
        here = [copy for copy in _copies_here(self._run) if _key(copy) not in self._left_out]
        everything = {**self._there, **{copy.name: copy for copy in here}}
        unwanted = {copy.name for copy in surplus(list(everything.values()), self._keep)}
        copied = {_key(copy) for copy in self._there.values()}
        return here, [copy for copy in here if _key(copy) not in copied and copy.name not in unwanted]

    def _copy(self, storage: Storage, copy: Entry, is_newest: bool) -> None:
        """Send it, or learn that it cannot be sent; an error where it is to be tried again later.

        What was the newest when it began is sent to its end: where many are saved, each would break off the one before.
        """
        folder = copy.folder
        began = looked = time.monotonic()
        moved = {"step": copy.step, "done": 0, "bytes": copy.bytes, "moved": time.time()}
        self._status.set(copying=moved)

        def progress(count: int) -> None:
            nonlocal looked
            moved["done"] += count
            moved["moved"] = time.time()
            self._status.beat()
            self._renew(storage)
            if not is_newest and time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                if any(age(other) > age(copy) for other in self._look()[1]):
                    raise _Overtaken

        try:
            manifest = files.read_bounded(os.path.join(folder, MANIFEST), MOST_MANIFEST_BYTES)
            if unseal(manifest, folder) != copy.fields:
                return  # another one has taken its name since the folder was read
            if copy.name in storage.sizes():
                # Half a copy, or one of an earlier life, whose manifest must not stand beside files of this one.
                self._remove(storage, copy.name)
            for file in (STATE, VALUES):
                pieces = pieces_of(copy.fields, file)
                storage.put(os.path.join(folder, file), copy.name, file, pieces, progress)
            storage.write(copy.name, MANIFEST, manifest)
            if storage.read(copy.name, MANIFEST, len(manifest) + 1) != manifest:
                raise OSError(errno.EIO, "the manifest read back differently from what was written")
        except (FileNotFoundError, BuoyError):
            if os.path.isdir(folder):
                raise
            return  # removed here while it was copied
        except _Overtaken:
            return  # sent after it, if it is still kept then
        except DamagedSource as error:  # what would arrive there would be so too
            self._left_out.add(_key(copy))
            self._status.set(damaged_here=f"step {copy.step} here is damaged ({error.strerror})")
            return
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._make_room(storage, copy, error.errno):
                return  # tried again at once
            raise
        finally:
            self._status.set(copying=None)
        self._there[copy.name] = copy
        self._refused = 0
        self._unusable.discard(copy.name)
        self._sent[_key(copy)] = time.time()
        self._status.set(damaged_here=None, copy_seconds=time.monotonic() - began)
        self._report_there()

    def _remove(self, storage: Storage, name: str) -> None:
        storage.remove(name)
        self._there.pop(name, None)
        self._report_there()

    def _make_room(self, storage: Storage, copy: Entry, number: int) -> bool:
        """Free what this copy needs (two good ones stay if that will do, else the newest); whether to try again."""
        self._refused += 1
        if number == errno.ENOSPC and is_enough(self._free(), copy.bytes) and self._refused <= PASSING:
            return False  # the place itself has room: it may pass
        there = list(self._there.values())
        if any(age(other) > age(copy) for other in there):
            self._left_out.add(_key(copy))  # an older one does not drive out a newer
            return True
        halves = _halves(storage.sizes(), copy.step)
        for name in halves:
            self._remove(storage, name)
        # Where a quota is full the disk still has room, and so nothing seems to be missing: one is tried then.
        missing = max(1, copy.bytes - self._free())
        going = to_make_room(there, self._keep, missing) or to_make_room(there, self._keep, missing, 1)
        for old in going:
            self._left_out.add(_key(old))
            self._remove(storage, old.name)
        return bool(going or set(halves) - {copy.name})

    def _free(self) -> int:
        space = None if is_url(self._where) else disk.space(self._where)
        return space.free if space is not None else 0

    def _report_there(self) -> None:
        # An earlier life may have left a newer one there, which the run folder does not hold.
        ours = set(self._sent) | {_key(copy) for copy in _copies_here(self._run)}
        there = [copy for copy in self._there.values() if _key(copy) in ours]
        newest = max(there or self._there.values(), key=age, default=None)
        self._status.set(
            there={name: copy.digest for name, copy in sorted(self._there.items())},
            newest=newest.step if newest is not None else None,
            newest_made=newest.time if newest is not None else None,
            newest_safe=self._sent.get(_key(newest)) if newest is not None else None,
        )

    def _expect_ours(self, storage: Storage) -> None:
        """Before anything is written there: two runs of one name must not write over each other."""
        place = f"{self._orders['shown']}/{self._name}"
        expect_ours(storage, self._run, str(self._orders["life"]), place)

    def _renew(self, storage: Storage) -> None:
        """Now and then, and once when the training has ended: from then on another machine may take over."""
        if time.monotonic() < self._beat_due:
            return
        self._expect_ours(storage)
        ended = self._training_ended()
        sign_of_life(storage, self._run, str(self._orders["life"]), ended=ended)
        self._beat_due = time.monotonic() + (float("inf") if ended else BEAT_SECONDS)

    def _copy_log(self, storage: Storage) -> None:
        """Under a number that no other machine's log has there."""
        self._log_due = time.monotonic() + PERIOD
        if self._attempt is not None:
            self._expect_ours(storage)
            if self._log_number is None:
                self._log_number = number_there(self._attempt, storage.read_beside)
            marker = os.path.join(self._run, "run.json")
            copy_tail(self._attempt, marker, self._log_number, storage.write_beside)

    def _copy_last_log(self) -> None:
        if self._attempt is None or self._storage is None:
            return
        until = time.monotonic() + _VERDICT_SECONDS  # the recorder needs a moment for it
        while time.monotonic() < until and not os.path.exists(os.path.join(self._attempt, "verdict.json")):
            time.sleep(_LOOK_SECONDS)
        try:
            self._copy_log(self._storage)
        except OSError:
            pass  # the checkpoints are safe, or the mirror is another's; the log is here

    def _training_ended(self) -> bool:
        if self._ended is None and select.select([self._training], [], [], 0)[0]:
            self._ended = time.monotonic()
            self._beat_due = 0.0
        return self._ended is not None

    def _wait(self, seconds: float) -> None:
        if self._ended is None:
            select.select([self._training], [], [], seconds)
        else:
            time.sleep(seconds)


class Status:
    """`mirror.json` in the run folder: what is safe there, what is on its way, what is wrong."""

    def __init__(self, run: str, shown: str, uploads_later: bool) -> None:
        """`uploads_later`: a drive that takes a file and sends it off in its own time, which nobody can see."""
        self._path = os.path.join(run, STATUS)
        self._due = 0.0
        self.values: dict[str, Any] = {
            "schema": STATUS_SCHEMA, "home": shown, "pid": os.getpid(), "there": {}, "newest": None,
            "newest_made": None, "newest_safe": None, "copy_seconds": None, "copying": None, "trouble": None,
            "damaged_here": None, "uploads_later": uploads_later, "not_ours": False,
        }  # fmt: skip

    def set(self, **values: object) -> None:
        """Change and write at once."""
        self.values.update(values)
        self._due = 0.0
        self.beat()

    def beat(self) -> None:
        """Write now and then, so that a reader sees that it moves."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _STATUS_SECONDS
        try:
            files.write_json(self._path, {**self.values, "wall": time.time()})
        except OSError:
            pass  # the local disk is full: the copies matter more than the report


def _halves(found: dict[str, dict[str, int]], newest: int) -> list[str]:
    """Copies that were not finished, of steps up to this one."""
    return [name for name, sizes in found.items() if is_half(sizes) and step_of(name) <= newest]


def _key(copy: Entry) -> tuple[str, str]:
    """Which one it is, among those of the same name that several lives of a run may make."""
    return copy.name, copy.digest


def fetch(orders: dict[str, Any]) -> None:
    """Bring the newest good checkpoint (or the step asked for) back; what cannot be used on the way is named."""
    run, is_training = str(orders["run"]), orders["life"] is not None
    # A user named the very folder; a training takes nobody else's.
    storage = open_storage(
        str(orders["where"]), str(orders["name"]), orders["mount"], anyones=not is_training
    )
    if is_training and not _make_ours(storage, orders):
        return
    copies, unusable = survey(storage)
    answer(newest=copies[0].step if copies else None)
    # Of one step the whole one comes first: what stands beside it is of no interest then.
    candidates: list[Entry | Unusable] = [*copies, *unusable]
    candidates.sort(key=lambda one: (one.step, isinstance(one, Entry)), reverse=True)
    for candidate in candidates:
        if orders["step"] is not None and candidate.step != orders["step"]:
            continue
        if orders["newer_than"] is not None and candidate.step <= orders["newer_than"]:
            break
        if isinstance(candidate, Unusable):
            answer(unusable=asdict(candidate))
            continue
        try:
            folder = _bring(storage, candidate, run)
        except BuoyError as error:
            what = error.received or error.message
            answer(unusable=asdict(Unusable(candidate.step, candidate.name, what)))
            continue
        if os.path.basename(run) == orders["name"]:
            try:
                adopt(storage, run)
            except OSError:
                pass  # the checkpoint is here; the next start asks for the owner
        answer(step=candidate.step, folder=folder)
        return
    answer(step=None)


def answer(**values: object) -> None:
    """One line to whoever asked."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _make_ours(storage: Storage, orders: dict[str, Any]) -> bool:
    """Make the mirror this training's before anything is taken from it; who had it, or why not, is answered."""
    run, life, place = str(orders["run"]), str(orders["life"]), f"{orders['shown']}/{orders['name']}"
    try:
        there = owner_of(storage)
        refuse_anothers(there, run, place)
        refuse_two_machines(storage, life, place, lambda text: answer(waits=text))
        answer(owner=there["run"] if there is not None else None)
        claim(storage, run, life, place)
    except BuoyError as error:
        answer(refused=[error.message, error.received, error.expected, error.hint])
        return False
    except OSError:
        pass  # a full drive can still be read; the process that copies claims it again, and says what is wrong
    return True


def _bring(storage: Storage, copy: Entry, run: str) -> str:
    """The folder that it is now; `DamagedCheckpoint` when a byte is not as it was written."""
    for here in _copies_here(run):
        if here.digest == copy.digest and _reads_well(here.folder):
            return here.folder
    checkpoints = os.path.join(run, "checkpoints")
    files.make_folder(run)
    files.make_folder(checkpoints)
    part = os.path.join(checkpoints, f".{copy.name}.part-{os.getpid()}")
    os.mkdir(part, files.FOLDER_MODE)
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        answer(progress=[done, copy.bytes])

    try:
        for file in (MANIFEST, STATE, VALUES):
            storage.get(copy.name, file, os.path.join(part, file), progress)
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
            raise OSError(error.errno, f"not enough space here for its {format_bytes(copy.bytes)}") from error
        raise
    return final


def _reads_well(folder: str) -> bool:
    try:
        open_checkpoint(folder)
    except (OSError, BuoyError):
        return False  # cut short or damaged: the one from the mirror comes beside it
    return True


def _copies_here(run: str) -> list[Entry]:
    """The committed checkpoints of the run folder, newest first."""
    return [entry for entry in Store(run).list() if entry.complete]


def keep(orders: dict[str, Any]) -> None:
    """Detach, wait for the mirror process before this one, and copy."""
    import fcntl

    if os.fork():
        os._exit(0)
    # Standard output stays open, and silent: its end is how the training learns of ours.
    os.setsid()
    os.chdir("/")
    step_back(_NICE)
    lock = files.open_old(os.path.join(orders["run"], LOCK), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: two mirrors copy the same files to the same names
    Worker(orders).run()


def _in_words(error: Exception, where: str) -> str:
    """For users: without the password that the place's own words may repeat."""
    words = (
        str(error.strerror)
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    secret = re.search(r"://([^/@]+)@", where)
    return words.replace(secret[1], "***")[:300] if secret is not None else words[:300]


def main(mode: str) -> None:
    """Read the orders and carry them out."""
    orders = json.loads(sys.stdin.readline())
    sys.path.extend(path for path in orders["path"] if path not in sys.path)
    if mode == "keep":
        keep(orders)
        return
    try:
        fetch(orders)
    except Exception as error:  # noqa: BLE001 - said to whoever asked
        answer(error=_in_words(error, str(orders["where"])))


if __name__ == "__main__":
    main(sys.argv[1])
