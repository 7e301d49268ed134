"""What libraries read out of tensors to choose their path, answered for fake ones as ordinary batches would answer."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ordinary_values() -> Iterator[None]:
    """Tell transformers that no row packs several sequences.

    It looks into the positions for that; where it cannot (fake tensors) it builds a mask, which on a GPU costs the mask
    and the faster attention kernels.
    """
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
        find = masks.find_packed_sequence_indices
    except (ImportError, AttributeError):  # not installed, or older than masks of this kind
        yield
        return

    def none_packed(position_ids: Any) -> None:
        return None

    masks.find_packed_sequence_indices = none_packed
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find
