"""What libraries read out of tensors to choose their path, answered for fake ones as ordinary batches would answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def ordinary_values() -> Iterator[None]:
    """Answer what transformers and `torch.nn.Transformer` ask of values that fake tensors have not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _answering("transformers.masking_utils", "find_packed_sequence_indices", _none_packed)
        )
        stack.enter_context(
            _answering("torch.nn.modules.transformer", "_detect_is_causal_mask", _causal_if_square)
        )
        yield


@contextlib.contextmanager
def _answering(module: str, name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a loaded module; of none where it is not loaded, or has no such function."""
    owner: Any = sys.modules.get(module)
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, answer)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _none_packed(position_ids: Any) -> None:
    """No row packs several sequences.

    transformers looks into the positions for that; where it cannot it builds a mask, which on a GPU costs the mask and
    the faster attention kernels.
    """


def _causal_if_square(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """A square mask is the causal one: it is what `nn.Transformer` is given such masks for."""
    if is_causal is not None or mask is None:
        return is_causal is True
    side = size if size is not None else mask.size(-2)
    return tuple(mask.size()) == (side, side)
