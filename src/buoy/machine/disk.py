"""A file system: its room, also where it reports the wrong numbers, its kind, and a folder of ours on a shared one."""

from __future__ import annotations

import errno
import os

from buoy.machine.files import (
    FOLDER_MODE,
    Folder,
    Opened,
    at,
    close_folder,
    open_folder,
    other_owner,
    read_bounded,
    write_whole,
)
from buoy.machine.procfs import mounts

KAGGLE_QUOTA = 20 * 10**9
"""What /kaggle/working may hold by Kaggle's pages (third-party reading, see platforms.csv): not measured."""

_KAGGLE = "/kaggle/working"
_COLAB_DRIVE = "/content/drive"
_MOST_FILES = 20_000

_REMOTE = ("9p", "afs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "smb", "virtiofs", "beegfs")
# FUSE carries local file systems too; these do not leave the machine.
_LOCAL_FUSE = ("fuse.lxcfs", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.gocryptfs", "fuseblk", "fusectl")


class Space:
    """Bytes free and in all for one folder, and where the numbers come from.

    `total` is what its files may take up at most, as `df` counts: without the blocks that are kept for root.
    """

    __slots__ = ("free", "path", "source", "total")

    def __init__(self, path: str, free: int, total: int, source: str) -> None:
        self.path = path
        self.free = free
        self.total = total
        self.source = source


def space(path: str, root: str = "/") -> Space | None:
    """Room for new files in `path`; None when it cannot be asked."""
    full = _below(root, path)
    if not hasattr(os, "statvfs"):
        return _space_on_windows(full)
    try:
        facts = os.statvfs(full)
    except (OSError, ValueError):
        return None
    free = facts.f_bavail * facts.f_frsize
    total = (facts.f_blocks - facts.f_bfree) * facts.f_frsize + free
    if facts.f_blocks == 0:  # a file system that does not count: FUSE mounts often say 0 of 0
        return None
    if not _under_kaggle_quota(full, root):
        return Space(path, free, total, "statvfs")
    counted = _bytes_in(_below(root, _KAGGLE))
    if counted is None:
        return Space(
            path,
            min(free, KAGGLE_QUOTA),
            KAGGLE_QUOTA,
            "Kaggle's 20 GB (unverified), at most: too many files to count",
        )
    return Space(
        path,
        min(free, max(0, KAGGLE_QUOTA - counted)),
        KAGGLE_QUOTA,
        "Kaggle's 20 GB (unverified) less the files counted",
    )


def _space_on_windows(path: str) -> Space | None:
    from shutil import disk_usage

    try:
        room = disk_usage(path)
    except OSError:
        return None
    return Space(path, room.free, room.total, "the system")


def files_left(path: str) -> int | None:
    """How many more files fit in `path`; None where nobody counts them."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_favail if facts.f_files else None


def filesystem_type(path: str, root: str = "/") -> str | None:
    """The type of the file system that holds `path`, such as `ext4`, `overlay` or `fuse.drive`."""
    try:
        wanted = os.path.realpath(_below(root, path))[len(root.rstrip("/")) :] or "/"
    except (OSError, ValueError):
        return None
    mount = _mount_of(wanted, root)
    return mount[1] if mount is not None else None


def mount_point(path: str) -> str:
    """Where the file system of this path, which need not exist yet, is mounted.

    A drive that hangs is not touched for that, where the names of its folders say what it is.
    """
    found = _mount_of(os.path.abspath(path)) or ("/", "")
    return found[0] if _leaves_machine(found[1]) else (_mount_of(os.path.realpath(path)) or found)[0]


def mount_apart(path: str, other: str) -> str | None:
    """Where the path's file system is mounted, if it is another than that of `other` and no part of the machine's."""
    found = mount_point(path)
    return found if found not in ("/", mount_point(other)) else None


def is_mounted(mount: str) -> bool:
    """Whether a file system is mounted at this very folder."""
    return any(point == mount for _, point, _, _ in mounts())


def is_missing_drive(path: str) -> bool:
    """Whether the path means Google Drive in Colab, and it is not mounted."""
    return os.path.abspath(path).startswith(_COLAB_DRIVE + "/") and not is_mounted(_COLAB_DRIVE)


def _mount_of(path: str, root: str = "/") -> tuple[str, str] | None:
    """The mount point that this path is below, and the type of what is mounted there."""
    best = None
    for _, point, kind, _ in mounts(root):
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if inside and (best is None or len(point) >= len(best[0])):
            best = point, kind
    return best


def is_remote(path: str, root: str = "/") -> bool | None:
    """Whether writing there leaves the machine (a mounted drive, NFS, ...); None when not known."""
    kind = filesystem_type(path, root)
    return None if kind is None else _leaves_machine(kind)


def _leaves_machine(kind: str) -> bool:
    return kind not in _LOCAL_FUSE if kind.startswith("fuse") else kind.startswith(_REMOTE)


def _under_kaggle_quota(full: str, root: str) -> bool:
    if "KAGGLE_KERNEL_RUN_TYPE" not in os.environ:
        return False
    quota_folder = os.path.realpath(_below(root, _KAGGLE))
    real = os.path.realpath(full)
    return os.path.isdir(quota_folder) and (real == quota_folder or real.startswith(quota_folder + "/"))


def _bytes_in(folder: str) -> int | None:
    """Bytes that the files below take up; None when there are too many to count or they cannot be read."""
    total, seen, folders = 0, 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _MOST_FILES:
                        return None
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:  # removed while we counted
            continue
        except (OSError, ValueError):
            return None
    return total


def _below(root: str, path: str) -> str:
    return path if root == "/" else root.rstrip("/") + "/" + path.lstrip("/")


def folders_to_make(path: str) -> list[str]:
    """The folder and those above it that are not there yet, the innermost first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


_LINK = (errno.ELOOP, errno.EMLINK)


class SharedFolder:
    """A folder of ours in a place that others may write to, such as a mirror, and all that is below it.

    Each step down is taken from the folder above it, which is open: no link is followed on the way, nothing that
    another user made is used, and no drive that is unmounted meanwhile leaves its files on the machine's own disk.
    """

    def __init__(self, where: str, name: str, mount: str | None = None, *, anyones: bool = False) -> None:
        """`mount`: where the place's file system was mounted when the training began, and must still be.

        `anyones`: for who only looks, or was told to take what another user has made.
        """
        self._where = where
        self._name = name
        self._mount = mount
        self._anyones = anyones

    def open(self, *names: str, make: bool = False) -> Opened:
        """The folder, or the one of these names below it; OSError says what is wrong with it."""
        folder = self._open_place(make)
        for name in (self._name, *names):
            with Opened(folder) as above:
                folder = _step_down(above, name, make)
            if not self._anyones:
                _refuse_foreign(folder, name)
        return Opened(folder)

    def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        """A file below it, whole or not at all; folders on the way are made."""
        *names, file = path.split("/")
        with self.open(*names, make=True) as folder:
            write_whole(file, data, sync=sync, folder=folder)

    def read(self, path: str, most: int) -> bytes | None:
        """The first bytes of a file below it; None when it is not there."""
        *names, file = path.split("/")
        try:
            with self.open(*names) as folder:
                return read_bounded(file, most, folder=folder)
        except FileNotFoundError:
            return None

    def _open_place(self, make: bool) -> Folder:
        self._expect_mounted()
        if make:
            os.makedirs(self._where, exist_ok=True)
        folder = open_folder(self._where, follow=True)
        try:
            self._expect_mounted()  # once more: it is this very folder that was on the drive
        except OSError:
            close_folder(folder)
            raise
        return folder

    def _expect_mounted(self) -> None:
        """A drive that was unmounted leaves an empty folder: writing there would fill the machine's own disk."""
        if self._mount is not None and not is_mounted(self._mount):
            raise OSError(errno.ENOTCONN, "it is no longer mounted")
        if is_missing_drive(self._where):
            raise OSError(errno.ENOTCONN, "Google Drive is not mounted")


def _step_down(above: Folder, name: str, make: bool) -> Folder:
    if make:
        path, where = at(name, above)
        try:
            os.mkdir(path, FOLDER_MODE, dir_fd=where)
        except FileExistsError:
            pass
    try:
        return open_folder(name, folder=above)
    except OSError as error:
        # Asked for a folder that is no link, systems say either of a link.
        if isinstance(error, NotADirectoryError) or error.errno in _LINK:
            words = f"{name} there is a link or a file, not a folder"
            raise NotADirectoryError(errno.ENOTDIR, words) from None
        raise


def _refuse_foreign(folder: Folder, name: str) -> None:
    owner = other_owner(folder)
    if owner is not None:
        close_folder(folder)
        raise OSError(errno.EPERM, f"{name} there is owned by user {owner}")
