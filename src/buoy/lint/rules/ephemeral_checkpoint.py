"""BY702: on Colab the disk is gone with the session, and nothing here copies the checkpoint away."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.saving import saves
from buoy.lint.target import Target
from buoy.lint.timing import timing_of

RULE = Rule(
    "BY702", "ephemeral-checkpoint", "a checkpoint is saved on Colab's disk, which ends with the session"
)

# Signs that something is carried to a place that lasts.
_CARRIES = frozenset(
    {
        "mount",
        "download",
        "push_to_hub",
        "upload_file",
        "upload_folder",
        "upload_blob",
        "log_artifact",
        "upload",
        "CreateFile",
        "save_pretrained_to_hub",
    }
)
_CARRYING_WORDS = (
    "drive",
    "gsutil",
    "gs://",
    "s3://",
    "hf://",
    "rclone",
    "rsync",
    "scp ",
    "git push",
    "kaggle datasets",
    "aws s3",
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Saves to a relative or /content path in a Colab notebook that mounts, downloads and uploads nothing."""
    on_colab = facts.document.colab or any(name.startswith("google.colab") for name, _, _ in facts.imported)
    if (
        not on_colab
        or facts.calls.keys() & _CARRIES
        or "wandb" in facts.packages
        or not timing_of(facts).trains
    ):
        return
    if any(word in cell.text.lower() for cell in facts.document.cells for word in _CARRYING_WORDS):
        return
    for save in saves(facts):
        if not isinstance(save.path, ast.Constant) or not isinstance(save.path.value, str):
            continue
        path = save.path.value
        if path.startswith("/") and not path.startswith("/content"):
            continue
        message = (
            f"{path!r} is on the session's own disk: when Colab ends the session (idle, 12 h, a "
            "crash) the checkpoint is gone"
        )
        yield Finding(
            facts.document.span(save.path),
            "warning",
            message,
            "`from google.colab import drive; drive.mount('/content/drive')` and save below /content/drive/MyDrive",
        )
        return  # one is enough: the others are in the same place
