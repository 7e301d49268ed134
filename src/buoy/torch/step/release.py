"""Letting go of what a failed try still holds."""

from __future__ import annotations

import gc
import traceback

import torch

from buoy.microbatch.oom import chain


def release(error: BaseException) -> None:
    """Free the tensors in the frames of this exception and in reference cycles, and the caches of the allocator.

    To be called outside of `except`: inside it the interpreter itself still holds the frames.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
