"""Going on from an older step: in a folder of its own, so that nothing newer is lost for it."""

from __future__ import annotations

import os
import shlex


def restore_command(run: str, step: int) -> str:
    """What to type; the training is then given the new folder.

    >>> restore_command("runs/cats", 1100)
    'buoy ckpt restore runs/cats 1100 --to runs/cats-from-1100'
    """
    near = os.path.relpath(run)
    name = os.path.abspath(run) if near.startswith("..") else near
    return f"buoy ckpt restore {shlex.quote(name)} {step} --to {shlex.quote(f'{name}-from-{step}')}"
