"""Whether a second home can be one at all: said before training, not after the first checkpoint."""

from __future__ import annotations

import os
from importlib.util import find_spec

from buoy.checkpoint.homes import is_url
from buoy.errors import UsageError
from buoy.machine import disk

# Package that speaks a protocol, where it is not called like it.
_SPEAKERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
             "hf": "huggingface_hub", "oci": "ocifs", "oss": "ossfs", "gdrive": "gdrive_fsspec"}  # fmt: skip


def place_of(where: str) -> str:
    """The place as the mirror's process knows it: a URL, or a folder's whole path, which `file://` means too.

    >>> place_of("file:///content/drive/MyDrive/runs")
    '/content/drive/MyDrive/runs'
    >>> place_of("s3://bucket/runs")
    's3://bucket/runs'
    """
    protocol, is_named, rest = where.partition("://")
    if is_named and protocol not in ("file", "local"):
        return where
    if is_named and not rest.startswith("/"):
        raise UsageError(
            "cannot tell which folder the mirror is",
            received=f"mirror={where!r}",
            expected="a folder's path, or file:// before one that begins with /",
            hint=f"`mirror={os.path.abspath(rest)!r}`",
        )
    return os.path.abspath(rest if is_named else os.path.expanduser(where))


def check_is_elsewhere(where: str, run: str, name: str) -> None:
    """A copy inside the run folder would be lost with it."""
    here, there = os.path.realpath(run), os.path.realpath(os.path.join(where, name))
    if os.path.commonpath([here, there]) == here:
        raise UsageError(
            "the mirror is the run folder itself",
            received=f"mirror={where!r} for the run {run}",
            expected="a second place: another disk, a mounted drive, a URL",
            hint="`mirror='/content/drive/MyDrive/runs'`",
        )


def shared_disk(where: str, run: str) -> str | None:
    """What to say of a mirror folder on the run folder's own disk, which goes with this machine; None elsewhere.

    A drive that is not mounted, or a slip of the pen in its name, is such a folder: it is made without a word.
    """
    if os.stat(run).st_dev != os.stat(where).st_dev or disk.is_remote(run) is True:
        return None
    return (
        f"the mirror {where} is on the same disk as the run folder, so it does not survive this machine; "
        "is the drive mounted, and its name right?"
    )


def check(where: str) -> None:
    """What can be known at once: said before training, not after the first checkpoint."""
    if not is_url(where):
        if disk.is_missing_drive(where):
            raise UsageError(
                "Google Drive is not mounted",
                received=f"mirror={where!r}",
                expected="a mounted drive",
                hint="`from google.colab import drive; drive.mount('/content/drive')`",
            )
        try:
            os.makedirs(where, exist_ok=True)
        except OSError as error:
            raise UsageError(
                "the mirror cannot be written",
                received=f"mirror={where!r} ({error.strerror})",
                expected="a folder that can be made, or a URL such as s3://bucket/runs",
                hint="look whether the drive is mounted",
            ) from None
        return
    protocol = where.partition("://")[0]
    if protocol == "memory":
        raise UsageError(
            "a mirror in memory is none",
            received=f"mirror={where!r}",
            expected="a place that outlives this machine",
            hint="`s3://bucket/runs` or a mounted folder",
        )
    speaker = _SPEAKERS.get(protocol, f"{protocol}fs" if protocol not in ("http", "https") else "")
    missing = [name for name in ("fsspec", speaker) if name and find_spec(name) is None]
    if "fsspec" in missing or (protocol in _SPEAKERS and missing):
        raise UsageError(
            f"the mirror needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            received=f"mirror={where!r}",
            expected="fsspec and the package that speaks this protocol",
            hint=f"`pip install {' '.join(missing)}`",
        )
    from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped,unused-ignore]

    if protocol not in registry and protocol not in known_implementations:
        raise UsageError(
            "unknown kind of mirror",
            received=f"mirror={where!r}",
            expected="a folder, or a URL that fsspec knows",
            hint="`s3://bucket/runs`, `gs://bucket/runs`, `hf://...`",
        )
