"""Loaders that a training iterates over by itself (its evaluation's) draw as much in a new process as in an old one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import dataloader


def draw_in_every_pass() -> None:
    """Have a pass of workers that stay draw a number as well; once per process.

    Every pass draws one from the training's generator, to seed workers; but where they stay (`persistent_workers=True`)
    only the first of a process does. A resumed training's first evaluation is a later one of the training that was
    never killed: without this, whatever is drawn after it, by dropout first of all, is not the same.
    """
    iterator = dataloader._MultiProcessingDataLoaderIter
    original = iterator._reset
    if getattr(original, "draws", False):
        return

    @functools.wraps(original)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # the first has drawn when it was made
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        original(self, loader, first_iter)

    reset.draws = True  # type: ignore[attr-defined]
    iterator._reset = reset  # type: ignore[method-assign]
