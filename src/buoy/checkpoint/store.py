"""The checkpoints of one run folder: which there are, the newest good one, and who may write another.

A search (here and in the mirror) that finds only damaged ones ends in an error, not at step 0: whoever resumes a run of
ten hours must not find it there, and what is damaged may still be worth something to its owner. To resume from an older
step, it is restored into a folder of its own, so that nothing newer is lost for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from buoy.checkpoint import lock
from buoy.checkpoint.commit import remove_leftovers
from buoy.checkpoint.lock import WriterBusy
from buoy.checkpoint.manifest import (
    MANIFEST,
    STATE,
    VALUES,
    DamagedCheckpoint,
    NewerCheckpoint,
    saved_at,
    size_of,
)
from buoy.checkpoint.reader import (
    Checkpoint,
    StoredTensor,
    decode_about,
    open_checkpoint,
    read_manifest,
    sizes_fit,
)
from buoy.errors import BuoyError, RunFolderError
from buoy.flight.attempt import refuse_foreign
from buoy.machine import disk, files

if TYPE_CHECKING:
    from buoy.checkpoint.mirror.mirror import Mirror
    from buoy.checkpoint.saver import Receipt, Saver

__all__ = [
    "Checkpoint", "DamagedCheckpoint", "Entry", "NewerCheckpoint", "Store", "StoredTensor", "WriterBusy",
]  # fmt: skip

DAMAGED, HALF, NEWER = "damaged", "not whole", "of a newer buoy"
"""What is the matter with a checkpoint that cannot be used."""
_MOST_LINES, _MOST_STEPS = 3, 10
"""So many checkpoints that cannot be used are named by a line each; so many steps of the others in one."""
_MARK = "damaged"
"""A file in a checkpoint's folder: a search has found it damaged, whatever its sizes say, and wrote what was wrong."""
_NAME = re.compile(r"step-([0-9]{9,18})(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint here or in a mirror, as its folder and manifest tell, its bytes not verified."""

    step: int
    folder: str
    """Its whole path; of one in a mirror the name alone."""
    time: float | None
    """When it was saved, in seconds since 1970."""
    bytes: int
    about: dict[str, object]
    complete: bool
    """Whether the manifest is as written, every file has its size, and no search has found it damaged."""
    fields: dict[str, object] = field(default_factory=dict, compare=False, repr=False)
    """Its manifest; empty where that cannot be read."""

    @property
    def name(self) -> str:
        """What it is called, here and in the mirror."""
        return os.path.basename(self.folder)

    @property
    def digest(self) -> str:
        """What tells it from any other, also of the same name: its manifest has the checksum of every byte."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Unusable:
    """A checkpoint, here or in the mirror, from which a training cannot resume."""

    step: int
    name: str
    """Its folder: the whole path here, the name alone in the mirror."""
    what: str
    """The file, and what is wrong with it."""
    fault: str = DAMAGED

    @property
    def was_whole(self) -> bool:
        """Whether it was a checkpoint once; else its copying, or its removal, was not finished."""
        return self.fault != HALF


class PassedOver:
    """What one search had to pass over: the newest few are named by a line each, the rest by number."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._unnamed: list[Unusable] = []
        self.all: list[Unusable] = []

    def note(self, unusable: Unusable, words: str) -> None:
        """Name one, once."""
        if unusable in self.all:
            return
        self.all.append(unusable)
        if len(self.all) <= _MOST_LINES:
            self._say(words)
        else:
            self._unnamed.append(unusable)

    def close(self) -> None:
        """Count what was not named."""
        for place, steps in _by_place(self._unnamed).items():
            shown = ", ".join(map(str, steps[:_MOST_STEPS])) + (", ..." if len(steps) > _MOST_STEPS else "")
            more = f"{len(steps)} more checkpoint{'' if len(steps) == 1 else 's'}"
            self._say(f"and {more} that cannot be used {place}: step{'' if len(steps) == 1 else 's'} {shown}")
        self._unnamed = []


def _by_place(unusable: list[Unusable]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for one in unusable:
        folder = os.path.dirname(one.name)
        places.setdefault(f"in {folder}" if folder else "in the mirror", []).append(one.step)
    return places


def _in_words(unusable: list[Unusable]) -> str:
    """All of them in one line: `step 40: state.safetensors: it has 512 bytes, expected 4096; and 2 more`."""
    words = [f"step {one.step}: {one.what}" for one in unusable[:_MOST_LINES]]
    if len(unusable) > _MOST_LINES:
        words.append(f"and {len(unusable) - _MOST_LINES} more")
    return "; ".join(words)


class Store:
    """The checkpoints in `<folder>/checkpoints/`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """`folder`: the run folder."""
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.checkpoints = os.path.join(self.folder, "checkpoints")
        self._good: set[str] = set()

    def list(self) -> list[Entry]:
        """Every checkpoint, the highest step first, as cheaply as can be: nothing is verified."""
        try:
            names = os.listdir(self.checkpoints)
        except OSError:
            return []
        found = []
        for name in names:
            matched = _NAME.fullmatch(name)
            if matched:
                order = (int(matched[1]), int(matched[2] or 1))
                found.append((order, _entry(os.path.join(self.checkpoints, name), order[0])))
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def newest(self, say: Callable[[str], object]) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as written; damaged ones are named, skipped and kept."""
        passed = PassedOver(say)
        found = self.search(passed)
        passed.close()
        return found

    def search(self, passed: PassedOver) -> Checkpoint | None:
        """The same, as one part of a search that may go on elsewhere."""
        entries = self.list()
        for number, entry in enumerate(entries, 1):
            try:
                return self.open(entry)
            except DamagedCheckpoint as error:
                then = "trying the one before" if number < len(entries) else "no good one is left here"
                what = str(error.received)
                passed.note(Unusable(entry.step, entry.folder, what), f"{error.message}: {what}; {then}")
        return None

    def open(self, entry: Entry, progress: Callable[[int], object] | None = None) -> Checkpoint:
        """A checkpoint with every byte verified; `DamagedCheckpoint` names the file and the tensor."""
        checkpoint = open_checkpoint(entry.folder, progress)
        if checkpoint.step != entry.step:
            raise DamagedCheckpoint(entry.folder, MANIFEST, f"it belongs to step {checkpoint.step}", "step")
        self._good.add(entry.folder)
        if not entry.complete:
            _unlink_quietly(os.path.join(entry.folder, _MARK))  # its bytes are right again
        return checkpoint

    def remember_damage(self, unusable: Unusable) -> None:
        """Let retention know it in this life and the next: a damaged one neither counts nor goes like a good one."""
        is_ours = os.path.dirname(unusable.name) == self.checkpoints and not os.path.islink(unusable.name)
        if unusable.fault != DAMAGED or not is_ours:
            return
        try:
            files.write_new(os.path.join(unusable.name, _MARK), unusable.what.encode() + b"\n")
        except OSError:
            pass  # known already, or nothing can be written: then it is found again

    def saver(self, say: Callable[[str], object], event: Callable[..., object]) -> Saver:
        """The one who may write: takes the run's lock (`WriterBusy` says who has it) and tidies up after the dead.

        `RunFolderError` where the folder is another user's: it would be resumed from what that user put there.
        """
        refuse_foreign(self.folder)
        before = _open_savers.get(self.checkpoints)
        if before is not None:
            before.close()  # a notebook's cell run again: the newer Run of this process takes over
        try:
            if not os.path.isdir(self.checkpoints):
                files.make_folder(self.folder)
                files.make_folder(self.checkpoints)
                _sync_above(self.checkpoints)
            held = lock.take(self.checkpoints, say, self._finished_since)
        except OSError as error:
            raise RunFolderError(
                "cannot write checkpoints",
                received=f"{error.filename or self.checkpoints}: {error.strerror}",
                expected="a folder that can be written",
                hint="give the Run another folder",
            ) from error
        remove_leftovers(self.checkpoints)
        from buoy.checkpoint.saver import Saver  # with its writer: looking at checkpoints needs none

        saver = Saver(self.checkpoints, held, say, event, self.trust)
        _open_savers[self.checkpoints] = saver
        return saver

    def _finished_since(self, time: float) -> int | None:
        newest = next((entry for entry in self.list() if entry.complete), None)
        is_so = newest is not None and newest.about.get("finished") is True and (newest.time or 0.0) >= time
        return newest.step if newest is not None and is_so else None

    def remove(self, entry: Entry) -> None:
        """Remove a checkpoint; refused when no other good one would be left.

        It vanishes by one rename, so that no death leaves half of it under its name.
        """
        if os.path.dirname(os.path.abspath(entry.folder)) != self.checkpoints:
            raise BuoyError("not a checkpoint of this run", received=entry.folder, expected=self.checkpoints)
        if not self._another_good(entry):
            raise BuoyError(
                f"{entry.folder} is the last good checkpoint of this run",
                expected="another intact checkpoint",
                hint="`buoy ckpt verify` says which are good",
            )
        name = os.path.basename(entry.folder)
        gone = os.path.join(self.checkpoints, f".{name}.gone-{os.getpid()}")
        os.rename(entry.folder, gone)
        files.sync_folder(
            self.checkpoints
        )  # else a power cut could bring the name back with half of its files
        self._good.discard(entry.folder)
        files.remove_folder(gone, truncate=disk.is_remote(self.checkpoints) is True)

    def trust(self, receipt: Receipt) -> None:
        """The checkpoint was committed under our eyes: it need not be read again to be known as good."""
        if receipt.committed:
            self._good.add(receipt.folder)

    def _another_good(self, entry: Entry) -> bool:
        others = [other for other in self.list() if other.folder != entry.folder and other.complete]
        if any(other.folder in self._good for other in others):
            return True
        for other in others:
            try:
                self.open(other)
                return True
            except BuoyError:
                continue
        return False


def _sync_above(path: str) -> None:
    """Make new folders durable by name, as far as the folders above them may be read."""
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        try:
            files.sync_folder(path)
        except OSError:
            return


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


_open_savers: weakref.WeakValueDictionary[str, Saver] = weakref.WeakValueDictionary()


def _entry(folder: str, step: int) -> Entry:
    try:
        fields, size = read_manifest(folder)
        about = decode_about(fields)
        whole = about is not None and sizes_fit(folder, fields) and fields["step"] == step
        whole = whole and not os.path.lexists(os.path.join(folder, _MARK))
        about = about or {}
        size += sum(size_of(fields, name) for name in (STATE, VALUES))
        return Entry(step, folder, saved_at(about), size, about, whole, fields)
    except BuoyError:
        return Entry(step, folder, None, 0, {}, complete=False)


def restore_command(run: str, step: int) -> str:
    """What to type; the training is then given the new folder.

    >>> restore_command("runs/cats", 1100)
    'buoy ckpt restore runs/cats 1100 --to runs/cats-from-1100'
    """
    near = os.path.relpath(run)
    name = os.path.abspath(run) if near.startswith("..") else near
    return f"buoy ckpt restore {shlex.quote(name)} {step} --to {shlex.quote(f'{name}-from-{step}')}"


def newest_good(
    store: Store,
    mirror: Mirror | None,
    say: Callable[[str], object],
    trouble: Callable[[str, str], object],
) -> Checkpoint | None:
    """The newest whose every byte is as written, brought back if it is there; None when there never was one."""
    passed = PassedOver(say)
    found = _search_here(store, passed)
    if mirror is not None:
        from buoy.checkpoint.mirror.mirror import MirrorFailed

        try:
            brought = mirror.search(passed, found.step if found is not None else None, say)
        except MirrorFailed as error:
            passed.close()
            if found is None:
                raise  # to start over beside checkpoints that could not be seen is nobody's wish
            trouble("mirror", f"{error.message} ({error.received}); resuming from step {found.step} here")
            return found
        if brought is not None:
            say(f"step {brought} was brought back from the mirror {mirror.shown}{mirror.made_by}")
            found = _search_here(store, passed)
    passed.close()
    if found is None and passed.all:
        _start_over_or_refuse(passed.all, store, mirror, say)
    return found


def _search_here(store: Store, passed: PassedOver) -> Checkpoint | None:
    found = store.search(passed)
    for unusable in passed.all:
        store.remember_damage(unusable)
    return found


def _start_over_or_refuse(
    unusable: list[Unusable], store: Store, mirror: Mirror | None, say: Callable[[str], object]
) -> None:
    """Copies that never were whole are no checkpoints; one that was, and is damaged, is for its owner to decide on."""
    damaged = [one for one in unusable if one.was_whole]
    places = store.checkpoints if mirror is None else f"{store.checkpoints} and the mirror {mirror.shown}"
    if not damaged:
        say(
            f"no checkpoint in the mirror was ever complete ({len(unusable)} begun): the training starts at step 0"
        )
        return
    if any(one.fault == NEWER for one in damaged):
        raise RunFolderError(
            "this version of buoy cannot read any checkpoint of this run",
            received=_in_words(damaged),
            expected="a checkpoint in a format that this version can read",
            hint="a newer buoy wrote it: upgrade buoy",
        )
    raise RunFolderError(
        f"no good checkpoint of this run is left ({len(damaged)} damaged)",
        received=_in_words(damaged),
        expected="an intact checkpoint, here or in the mirror",
        hint=f"the damaged ones are kept in {places}; bring a good one back (`buoy ckpt restore`), or start over "
        "at step 0 by naming another run folder",
    )
