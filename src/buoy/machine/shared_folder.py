"""A folder of ours in a place that others may write to, such as a mirror: no link is followed on the way to a file."""

from __future__ import annotations

import errno
import os

from buoy.machine import disk
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
        if self._mount is not None and not disk.is_mounted(self._mount):
            raise OSError(errno.ENOTCONN, "it is no longer mounted")
        if disk.is_missing_drive(self._where):
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
