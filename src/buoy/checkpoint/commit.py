"""Writing one checkpoint so that it is there whole or not at all, and how fast the writer may be.

Everything is written into a folder beside, fsynced, the manifest last; the manifest is read back; then one
rename makes it a checkpoint. Nothing that was there before is touched. The writer process imports this file,
so it stays with the cheap parts of the standard library.

A training on two cores feels every thread that wants a third one. So the writer takes all that the disk gives while the
trainer waits, and small bites with rests in between for as long as it computes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib

from buoy.checkpoint.manifest import MANIFEST, PIECE_BYTES, SCHEMA, STATE, VALUES, seal
from buoy.machine import cgroup, files
from buoy.machine.files import TICKS
from buoy.machine.procfs import FileReader, ProcessReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

BUSY_BYTES_PER_SECOND = 128 << 20
"""Each of checksum and write, while no core is to spare: together about a fifteenth of one."""
BESIDE_BYTES_PER_SECOND = 384 << 20
"""While the trainer computes and a core is to spare: at full speed its steps took a fifth longer."""

FIRST_BITE = 1 << 20
_IDLE_BITE = 8 << 20
_FIRST_LOOK = 0.03
_LOOK_EVERY = 0.1
_COMPUTING = 0.3  # cores: less is a trainer that waits
_SPARE = 0.5  # cores: more is room enough for the writer


class Pace:
    """Asked by the writer's threads after each bite."""

    def __init__(self, trainer: int) -> None:
        self._process = ProcessReader(trainer)
        self._machine = FileReader("/proc/stat")
        group = cgroup.find(os.getpid())
        self._quota = None if group is None else group.cpu_quota()
        self._looking = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """A new checkpoint: nothing is known about what the trainer does now."""
        self._most: int | None = None
        """Bytes per second; None: whatever the disk gives."""
        self._before = self._seconds()
        self._due = time.monotonic() + _FIRST_LOOK

    def rest(self, size: int, began: float) -> int:
        """After a bite of `size` bytes begun at `began` (monotonic): sleep if the trainer needs the processor.

        Returns how many bytes to take next: many where nobody is disturbed, which is faster.
        """
        self._look()
        if self._most is None:
            return _IDLE_BITE
        left = began + size / self._most - time.monotonic()
        if left > 0:
            time.sleep(left)
        return FIRST_BITE

    def _look(self) -> None:
        if time.monotonic() < self._due or not self._looking.acquire(blocking=False):
            return
        try:
            now = self._seconds()
            self._most = _allowed(self._before, now, self._quota)
            self._before = now
            self._due = time.monotonic() + _LOOK_EVERY
        finally:
            self._looking.release()

    def _seconds(self) -> tuple[float, float | None, float, float | None]:
        """The clock, and processor seconds: of the trainer (None: dead), our own, and left idle on all cores."""
        found = self._process.stat()
        trainer = None if found is None or found.state in ("Z", "X") else found.cpu_seconds
        words = self._machine.read(256).split(b"\n", 1)[0].split()
        idle = (int(words[4]) + int(words[5])) / TICKS if len(words) > 5 and words[0] == b"cpu" else None
        return time.monotonic(), trainer, time.process_time(), idle


def _allowed(
    before: tuple[float, float | None, float, float | None],
    now: tuple[float, float | None, float, float | None],
    quota: float | None,
) -> int | None:
    elapsed = now[0] - before[0]
    if now[1] is None or before[1] is None or elapsed <= 0:
        return None  # nobody is left to be slowed
    trainer, ours = (now[1] - before[1]) / elapsed, (now[2] - before[2]) / elapsed
    if trainer < _COMPUTING:
        return None
    spare = [] if quota is None else [quota - trainer]
    if now[3] is not None and before[3] is not None:
        spare.append((now[3] - before[3]) / elapsed + ours)
    return BUSY_BYTES_PER_SECOND if min(spare, default=0.0) < _SPARE else BESIDE_BYTES_PER_SECOND


_PAGE = 4096
_MOST_UNSYNCED = 64 << 20
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_MOST_SAME_STEP = 1000


def write_checkpoint(
    request: dict[str, Any], image: memoryview, values: bytes, rest: Callable[[int, float], int]
) -> tuple[str, int]:
    """Write the checkpoint that the trainer asked for; its folder and its bytes. A failure leaves nothing behind."""
    part = Part(request["checkpoints"], request["name"])
    try:
        part.write_image(image, request["size"], request["ends"], rest)
        part.write_values(values)
        return part.commit(request["fields"]), part.bytes
    except BaseException:
        part.drop()
        raise


class Part:
    """A checkpoint on its way: a folder that no reader takes for one."""

    def __init__(self, checkpoints: str, name: str) -> None:
        """`name`: what it will be called, `step-000001200`."""
        self._checkpoints = checkpoints
        self._name = name
        self._folder = os.path.join(checkpoints, f".{name}.part-{os.getpid()}")
        self._files: dict[str, object] = {}
        self.bytes = 0
        if os.path.lexists(self._folder):
            self.drop()  # a process of the same number died over the same step
        os.mkdir(self._folder, files.FOLDER_MODE)

    def write_image(
        self, image: memoryview, size: int, ends: Sequence[int], rest: Callable[[int, float], int]
    ) -> None:
        """`state.safetensors` from its image in memory (which is whole pages), checksums cut at `ends`.

        The checksums are counted by a second thread while the disk works: both release the interpreter.
        """
        spans = cut(ends)
        sums = [0] * len(spans)
        stop = threading.Event()

        def count() -> None:
            most = FIRST_BITE
            for number, (at, end) in enumerate(spans):
                while at < end:
                    if stop.is_set():
                        return
                    bite = image[at : min(at + most, end)]
                    began = time.monotonic()
                    sums[number] = zlib.crc32(bite, sums[number])
                    at += len(bite)
                    most = rest(len(bite), began)

        counter = threading.Thread(target=count)
        counter.start()
        try:
            _write_image(os.path.join(self._folder, STATE), image, size, rest)
        except BaseException:
            stop.set()
            raise
        finally:
            counter.join()
        self._note(STATE, [(end - start, crc) for (start, end), crc in zip(spans, sums, strict=True)])

    def write_stream(self, parts: Iterable[memoryview]) -> None:
        """`state.safetensors` part by part, each gone from memory before the next is asked for."""
        pieces: list[tuple[int, int]] = []
        unsynced = 0
        descriptor = files.open_new(os.path.join(self._folder, STATE))
        try:
            for part in parts:
                for start in range(0, len(part), PIECE_BYTES):
                    piece = part[start : start + PIECE_BYTES]
                    pieces.append((len(piece), zlib.crc32(piece)))
                    files.write_all(descriptor, piece)
                    unsynced += len(piece)
                    # Whoever streams has no memory for the disk's backlog either.
                    if unsynced >= _MOST_UNSYNCED:
                        os.fsync(descriptor)
                        _forget_pages(descriptor)
                        unsynced = 0
            os.fsync(descriptor)
            _forget_pages(descriptor)
        finally:
            os.close(descriptor)
        self._note(STATE, pieces)

    def write_values(self, data: bytes) -> None:
        """`values.json`."""
        files.write_new(os.path.join(self._folder, VALUES), data, sync=True)
        spans = cut([len(data)])
        self._note(VALUES, [(end - start, zlib.crc32(data[start:end])) for start, end in spans])

    def commit(self, fields: dict[str, object]) -> str:
        """Put the manifest in, prove it, and make it a checkpoint by one rename; the folder it is now."""
        manifest = seal({"schema": SCHEMA, **fields, "files": self._files})
        path = os.path.join(self._folder, MANIFEST)
        files.write_new(path, manifest, sync=True)
        files.sync_folder(self._folder)
        if files.read_bounded(path, len(manifest) + 1) != manifest:
            raise OSError(errno.EIO, "the manifest read back differently from what was written")
        self.bytes += len(manifest)
        final = self._rename()
        files.sync_folder(self._checkpoints)
        return final

    def drop(self) -> None:
        """Take away what was written; nothing else is touched."""
        files.remove_folder(self._folder)

    def _note(self, name: str, pieces: list[tuple[int, int]]) -> None:
        size = sum(length for length, _ in pieces)
        self.bytes += size
        self._files[name] = {"size": size, "pieces": pieces}

    def _rename(self) -> str:
        for _ in range(_MOST_SAME_STEP):
            final = next_name(self._checkpoints, self._name)
            try:
                os.rename(self._folder, final)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    continue
                raise
            return final
        raise OSError(errno.EEXIST, f"{_MOST_SAME_STEP} checkpoints already have the name {self._name}")


def next_name(checkpoints: str, name: str) -> str:
    """The path of the next checkpoint of a step that may have been saved before, or removed: always the highest.

    The first free number would do for a name, and would make an older checkpoint look like the newest.
    """
    highest = 0
    try:
        names = os.listdir(checkpoints)
    except OSError:
        names = []  # the write itself will say what is wrong
    for there in names:
        base, _, number = there.partition(".")
        if base == name and (not number or number.isdigit()):
            highest = max(highest, int(number or 1))
    return os.path.join(checkpoints, f"{name}.{highest + 1}" if highest else name)


def cut(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Spans of at most one piece each, from 0, none across one of the ends.

    >>> cut([3, 3, 5])
    [(0, 3), (3, 5)]
    """
    spans, start = [], 0
    for end in ends:
        while start < end:
            spans.append((start, min(start + PIECE_BYTES, end)))
            start = spans[-1][1]
    return spans


def remove_leftovers(checkpoints: str) -> None:
    """Remove what dead writers left half-way; only for who holds the run's lock."""
    for name in os.listdir(checkpoints):
        if name.startswith(".step-") and (".part-" in name or ".gone-" in name):
            try:
                files.remove_folder(os.path.join(checkpoints, name))
            except OSError:
                continue  # it does no harm where it is


def _write_image(path: str, image: memoryview, size: int, rest: Callable[[int, float], int]) -> None:
    for flags in (os.O_DIRECT, 0):
        try:
            descriptor = files.open_new(path, flags=flags)
        except OSError as error:
            if flags and error.errno in _NO_DIRECT_IO:
                if os.path.exists(path):  # some file systems make the file and then refuse
                    os.unlink(path)
                continue
            raise
        try:
            _write_chunks(descriptor, image, size, whole_pages=bool(flags), rest=rest)
            if os.fstat(descriptor).st_size != size:
                raise OSError(errno.EIO, "the file does not have the size that was written")
            return
        except OSError as error:
            if not flags or error.errno not in _NO_DIRECT_IO:
                raise
            os.unlink(path)
        finally:
            os.close(descriptor)


def _write_chunks(
    descriptor: int, image: memoryview, size: int, *, whole_pages: bool, rest: Callable[[int, float], int]
) -> None:
    until = -(-size // _PAGE) * _PAGE if whole_pages else size
    at, most = 0, FIRST_BITE
    while at < until:
        began = time.monotonic()
        done = os.pwrite(descriptor, image[at : min(at + most, until)], at)
        at += done
        most = rest(done, began)
    if until != size:
        os.ftruncate(descriptor, size)
    os.fsync(descriptor)
    if not whole_pages:
        _forget_pages(descriptor)


def _forget_pages(descriptor: int) -> None:
    """What is on disk need not take up memory a second time."""
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass
