"""Files as buoy writes and reads them: whole or not at all, for this user alone, never through somebody else's link.

Everything that goes into a run folder or a mirror is written here, and read: regular files only, nobody waits for a
pipe, and no more is read than a reader has room for. Others may be able to write beside it, as in /tmp or
on a shared disk: a new file must be new, a link is refused on the way to it, and what another user made is not used.
The sidecar and the writer import this file, so it stays with the cheap parts of the standard library.
"""

from __future__ import annotations

import errno
import os
import stat

from buoy.machine.system import IS_FOLDER, NO_LINK, NO_WAIT, NOT_INHERITED, READ, read_at

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
            raise OSError(error.errno, "it is a link, which is not followed", path) from None
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
