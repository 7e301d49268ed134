"""Whether a second home can be one at all: said before training, not after the first checkpoint."""

from __future__ import annotations

import os
from importlib.util import find_spec

from buoy.checkpoint.homes import is_missing_drive, is_url
from buoy.errors import UsageError

# Package that speaks a protocol, where it is not called like it.
_SPEAKERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
             "hf": "huggingface_hub", "oci": "ocifs", "oss": "ossfs", "gdrive": "gdrive_fsspec"}  # fmt: skip


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


def check(where: str) -> None:
    """What can be known at once: said before training, not after the first checkpoint."""
    if not is_url(where):
        if is_missing_drive(where):
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
    speaker = _SPEAKERS.get(
        protocol, f"{protocol}fs" if protocol not in ("file", "local", "http", "https") else ""
    )
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
