"""A second home: what it can do, and which of the two kinds a place is.

A folder, mostly a mounted drive (`home_folder`), or whatever fsspec reaches by a URL (`home_url`). Both hold
checkpoints as folders of the same plain files. Data goes first and the manifest last, so that what has a manifest
whose sizes fit is complete. Runs in the mirror's own process.
"""

from __future__ import annotations

from typing import Protocol

from buoy.checkpoint.home_folder import FolderHome
from buoy.checkpoint.home_url import UrlHome
from buoy.checkpoint.moving import Pieces, Progress


class Home(Protocol):
    """A place that holds checkpoints by name. Every failure is an OSError."""

    def sizes(self) -> dict[str, dict[str, int]]:
        """The files of each checkpoint and their sizes."""

    def read(self, name: str, file: str, most: int) -> bytes:
        """A small file, whole."""

    def write(self, name: str, file: str, data: bytes) -> None:
        """A small file, whole or not at all."""

    def put(self, source: str, name: str, file: str, pieces: Pieces, progress: Progress) -> None:
        """Copy a local file there and verify it as far as the place allows."""

    def holds(self, source: str, name: str, file: str, pieces: Pieces) -> bool:
        """Whether what is there now is this local file, as far as the place lets one tell."""

    def get(self, name: str, file: str, target: str, progress: Progress) -> None:
        """Copy a file from there to a new local one."""

    def remove(self, name: str) -> None:
        """Remove one checkpoint."""

    def free(self) -> int:
        """Bytes free there, as far as the place tells; else 0."""

    def read_beside(self, path: str, most: int) -> bytes | None:
        """A small file of the run that belongs to no checkpoint; None when there is none."""

    def write_beside(self, path: str, data: bytes) -> None:
        """The same, written."""


def is_url(where: str) -> bool:
    """Whether this is for fsspec, not a path."""
    return "://" in where


def open_home(where: str, run_name: str, mount: str | None = None, *, anyones: bool = False) -> Home:
    """The home of one run's checkpoints below `where`; `anyones`: also where another user made them."""
    return UrlHome(where, run_name) if is_url(where) else FolderHome(where, run_name, mount, anyones=anyones)
