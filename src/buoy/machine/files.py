"""Files as buoy writes and reads them: whole or not at all, for this user alone, never through somebody else's link.

Everything that goes into a run folder or a mirror is written here, and read: regular files only, nobody waits for a
pipe, and no more is read than a reader has room for. Others may be able to write beside it, as in /tmp or
on a shared disk: a new file must be new, a link is refused on the way to it, and what another user made is not used.
Values in JSON are handed out only as far as a reader can use them: no NaN, no 10**400, no half a character.

Recording and saving need Linux, but a run can be looked at on a Mac or on Windows. Windows has no O_CLOEXEC (what is
opened is not inherited there), no folders that can be opened, no pread, and changes line ends unless told not to.
The sidecar and the writer import this file, so it uses only the cheap parts of the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from _thread import allocate_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_INHERITED = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
IS_FOLDER = getattr(os, "O_DIRECTORY", 0)
"""0 where folders cannot be opened."""
READ = os.O_RDONLY | NOT_INHERITED

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""Clock ticks in a second, as /proc counts."""
PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096

_seeking = allocate_lock()  # several threads may read one file, which has one position


def _seek_and_read(descriptor: int, size: int, at: int) -> bytes:
    with _seeking:
        os.lseek(descriptor, at, os.SEEK_SET)
        return os.read(descriptor, size)


read_at = os.pread if hasattr(os, "pread") else _seek_and_read
"""Bytes from a place in an open file."""


def read_into(descriptor: int, room: memoryview, at: int) -> int:
    """Fill the room from this place on; how many bytes there were."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [room], at)
    data = read_at(descriptor, len(room), at)
    room[: len(data)] = data
    return len(data)


def read_ahead(descriptor: int, at: int, size: int) -> None:
    """Let the disk begin to fetch what is read next, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)


FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""For this user alone; a mounted drive has modes of its own and takes these without a word."""
_NEW = os.O_RDWR | os.O_CREAT | NO_LINK | NOT_INHERITED
Folder = int | str
"""A folder that is open, by its descriptor: what is done in it cannot be led elsewhere by a link. On Windows, where no
folder can be opened, its path."""
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def at(path: str, folder: Folder | None) -> tuple[str, int | None]:
    """A path in an open folder, as `os` takes it: with its `dir_fd`."""
    return (os.path.join(folder, path), None) if isinstance(folder, str) else (path, folder)


def open_new(
    path: str, *, again: bool = False, flags: int = 0, mode: int = FILE_MODE, folder: Folder | None = None
) -> int:
    """Open a file that must not exist yet, or (`again`) empty one of ours; a link in its place is refused.

    Here and below the path is one in `folder`, where that is given.
    """
    how = os.O_TRUNC if again else os.O_EXCL
    path, where = at(path, folder)
    return os.open(path, _NEW | how | flags, mode, dir_fd=where)


def open_old(path: str, flags: int, *, folder: Folder | None = None) -> int:
    """Open a file to change it; OSError for a link, a pipe or a device."""
    path, where = at(path, folder)
    descriptor = os.open(path, flags | NO_LINK | NO_WAIT | NOT_INHERITED, FILE_MODE, dir_fd=where)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return descriptor


def open_lines(path: str) -> int:
    """Open a file to append whole lines to."""
    return open_old(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def high_number(descriptor: int, below: int) -> int:
    """The same file under a number near the highest: a script that closes all and opens its own is given low ones.

    The descriptor that was given is closed.
    """
    import fcntl  # not on Windows, as the next
    import resource

    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(3, min(most, 4096) - below))
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte: a disk that fills up takes a part of them without an error first."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_new(path: str, data: bytes, *, sync: bool = False, folder: Folder | None = None) -> None:
    """A file that was not there before; a failure leaves none."""
    _fill(open_new(path, folder=folder), path, data, sync, folder)


def write_whole(
    path: str, data: bytes, *, sync: bool = False, mode: int = FILE_MODE, folder: Folder | None = None
) -> None:
    """The whole file or nothing: beside first, then renamed over the old one. `sync`: onto the disk before that."""
    beside = f"{path}.{os.getpid()}.part"
    try:
        descriptor = open_new(beside, mode=mode, folder=folder)
    except FileExistsError:
        remove_file(
            beside, folder=folder
        )  # a process of our number died over it, or somebody put a link there
        descriptor = open_new(beside, mode=mode, folder=folder)
    _fill(descriptor, beside, data, sync, folder)
    try:
        rename(beside, path, folder=folder)
    except OSError:
        remove_file(beside, folder=folder)
        raise


def rename(old: str, new: str, *, folder: Folder | None = None) -> None:
    """Give a file its name, in place of another that may have it."""
    old, where = at(old, folder)
    os.replace(old, at(new, folder)[0], src_dir_fd=where, dst_dir_fd=where)


def append(path: str, text: str) -> None:
    """Add whole lines to a file."""
    descriptor = open_lines(path)
    try:
        write_all(descriptor, text.encode(errors="backslashreplace"))
    finally:
        os.close(descriptor)


def make_folder(path: str) -> None:
    """Make a folder for this user alone, those above it as is usual; one that is there stays as it is."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def sync_folder(folder: Folder) -> None:
    """Make the names in a folder durable, where the file system knows how to."""
    if not IS_FOLDER:
        return  # where no folder can be opened, the system does that itself
    if not isinstance(folder, int):
        with Opened(open_folder(folder, follow=True)) as opened:
            sync_folder(opened)
        return
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def remove_folder(path: str, *, truncate: bool = False, folder: Folder | None = None) -> None:
    """Remove a folder and what is in it, never following a link; what is gone is fine.

    `truncate`: empty the files first, for drives whose trash counts against the quota.
    """
    try:
        inside = open_folder(path, folder=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if not stat.S_ISLNK(_lstat(path, folder).st_mode):
            raise error
        remove_file(path, folder=folder)
        return
    with Opened(inside):
        for name in os.listdir(inside):
            if stat.S_ISDIR(_lstat(name, inside).st_mode):
                remove_folder(name, truncate=truncate, folder=inside)
            else:
                remove_file(name, truncate=truncate, folder=inside)
    path, where = at(path, folder)
    os.rmdir(path, dir_fd=where)


def remove_file(path: str, *, truncate: bool = False, folder: Folder | None = None) -> None:
    """Remove a file, or the link in its place."""
    if truncate and stat.S_ISREG(_lstat(path, folder).st_mode):
        os.close(open_old(path, os.O_WRONLY | os.O_TRUNC, folder=folder))
    path, where = at(path, folder)
    os.unlink(path, dir_fd=where)


def _lstat(path: str, folder: Folder | None) -> os.stat_result:
    path, where = at(path, folder)
    return os.lstat(path, dir_fd=where)


def foreign(path: str) -> str | None:
    """Why this folder is not one of this user's, in words; None when it is, or is not there.

    In a shared folder such as /tmp another user could have put a link or an open folder here first.
    """
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) and (not hasattr(os, "geteuid") or found.st_uid in (os.geteuid(), 0)):
            found = os.stat(path)
    except FileNotFoundError:
        return "a dead link" if os.path.islink(path) else None
    except OSError:
        return None  # whoever uses it meets that too, and says so
    if stat.S_ISLNK(found.st_mode):
        return f"a link of user {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode):
        return "a file"
    if not hasattr(os, "geteuid") or found.st_uid in (os.geteuid(), 0):
        return None
    try:
        with Opened(open_folder(path, follow=True)) as folder:
            return None if other_owner(folder) is None else f"owned by user {found.st_uid}"
    except OSError:
        return f"owned by user {found.st_uid}"


class Opened:
    """A folder, open for the length of a `with`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def __enter__(self) -> Folder:
        return self._folder

    def __exit__(self, *_: object) -> None:
        close_folder(self._folder)


def close_folder(folder: Folder) -> None:
    """The end of `open_folder`."""
    if isinstance(folder, int):
        os.close(folder)


def open_regular(path: str, *, follow: bool = False, folder: Folder | None = None) -> int:
    """A descriptor to read from; OSError for a pipe, a device, a socket, a folder and (unless `follow`) a link.

    Links within a run folder are not followed: what a stranger's folder shows must not be a file of one's own.
    """
    path, where = at(path, folder)
    try:
        descriptor = os.open(path, READ | NO_WAIT | (0 if follow else NO_LINK), dir_fd=where)
    except ValueError as error:  # a name with a zero byte, or one that no file can have
        raise OSError(errno.EINVAL, str(error), path) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and not follow:
            raise OSError(error.errno, "it is a symlink, which buoy does not follow", path) from None
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(error.errno, "it is not a plain file", path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return descriptor


def open_folder(path: str, *, folder: Folder | None = None, follow: bool = False) -> Folder:
    """Open a folder, and (unless `follow`) no link in its place."""
    path, where = at(path, folder)
    if IS_FOLDER:
        return os.open(path, READ | IS_FOLDER | (0 if follow else NO_LINK), dir_fd=where)
    if os.path.islink(path) and not follow:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return path


def read_bounded(
    path: str, most: int, *, at: int = 0, follow: bool = False, folder: Folder | None = None
) -> bytes:
    """The bytes of a regular file from `at` on, at most so many."""
    descriptor = open_regular(path, follow=follow, folder=folder)
    try:
        return _read(descriptor, at, most)
    finally:
        os.close(descriptor)


def read_end(path: str, most: int) -> tuple[bytes, float]:
    """The last bytes of a regular file, at most so many, and when it was last written (wall clock)."""
    descriptor = open_regular(path)
    try:
        found = os.fstat(descriptor)
        return _read(descriptor, max(0, found.st_size - most), most), found.st_mtime
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, most: int) -> bytes:
    pieces = []
    while most > 0 and (piece := read_at(descriptor, min(most, 1 << 20), start)):
        pieces.append(piece)
        start, most = start + len(piece), most - len(piece)
    return b"".join(pieces)


def _fill(descriptor: int, path: str, data: bytes, sync: bool, folder: Folder | None) -> None:
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        remove_file(path, folder=folder)
        raise
    os.close(descriptor)


def other_owner(folder: Folder) -> int | None:
    """The user whose folder this is, if another's; root's is fine, who may do anything anyway."""
    if isinstance(folder, str):
        return None  # Windows has owners of another kind
    owner = os.fstat(folder).st_uid
    if owner in (os.geteuid(), 0):
        return None
    name = f".{os.getpid()}.part"
    try:
        probe = open_new(name, folder=folder)
    except OSError:
        return owner
    try:
        # A drive or a share without owners gives every file to one user, also those that we make.
        return owner if os.fstat(probe).st_uid != owner else None
    finally:
        os.close(probe)
        remove_file(name, folder=folder)


MOST_JSON = 1 << 20
"""Bytes of one JSON text: Python needs up to thirty times as many."""
MOST_LINES = 5 << 20
"""Bytes of a file of lines; the recorder ends its own at four fifths of that."""
_DEEPEST = 40
_LARGEST = 1e18
"""No time, count or number of bytes that a machine tells is larger; `float` and `time` can handle what is smaller."""

# What of a text might not be as a reader expects it: everything else is spared a second look.
_ODD_JSON = re.compile(r"NaN|Infinity|[0-9]{18}|[eE]\+?[0-9]{2}|\\u(?:[dD][89a-fA-F]|0000)")
_ODD_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""A file name may hold the others: they stand for its bytes that are not UTF-8."""


def write_json(path: str, value: object) -> None:
    """The whole file or nothing."""
    write_whole(path, json.dumps(value).encode())


def read_json(path: str) -> dict | None:  # type: ignore[type-arg]
    """A JSON object, or None when it is missing, torn, too large or something else."""
    try:
        value = parse_json(read_bounded(path, MOST_JSON + 1))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: str, most: int = MOST_LINES, *, last: bool = False) -> Iterator[dict | list]:  # type: ignore[type-arg]
    """Each line that is a JSON object or list, of the first (or `last`) bytes; what is torn or foreign is left out."""
    try:
        data = read_end(path, most)[0] if last else read_bounded(path, most)
    except OSError:
        return
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        try:
            value = parse_json(data[at:end]) if end - at <= MOST_JSON else None
        except ValueError:
            value = None
        if isinstance(value, dict | list):
            yield value
        at = end + 1


def parse_json(data: bytes) -> object:
    """What a JSON text says, ValueError if it is none; numbers, texts and depths that no reader expects become None.

    >>> parse_json(b'{"t": 1.5, "rss": NaN, "step": 1e999, "name": "cat\\\\ud800"}')
    {'t': 1.5, 'rss': None, 'step': None, 'name': 'cat\ufffd'}
    """
    if len(data) > MOST_JSON:
        raise ValueError(f"more than {MOST_JSON} bytes")
    text = data.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    is_plain = text.count("[") + text.count("{") <= _DEEPEST and not _ODD_JSON.search(text)
    return value if is_plain else _usable(value, _DEEPEST)


def _usable(value: object, depth: int) -> object:
    if isinstance(value, str):
        return _ODD_TEXT.sub("\ufffd", value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if -_LARGEST < value < _LARGEST else None  # NaN is neither
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {str(_usable(key, 0)): _usable(item, depth - 1) for key, item in value.items()}
    assert isinstance(value, list)
    return [_usable(item, depth - 1) for item in value]
