"""One number for a batch: does a pass that is resumed come by the same data?"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

_MOST = 2048  # elements of one tensor: enough to know other samples, or another augmentation
_DEEPEST = 4
_MOST_MEMBERS = 64


def fingerprint(batch: Any) -> int | None:
    """The same for equal batches, in every process; None where nothing in it can be compared quickly.

    >>> fingerprint({"x": torch.ones(3)}) == fingerprint({"x": torch.ones(3)}) != fingerprint({"x": torch.zeros(3)})
    True
    >>> fingerprint(object()) is None
    True
    """
    try:
        return _add(batch, None, 0)
    except (RuntimeError, TypeError, ValueError):  # a kind of tensor that has no bytes
        return None


def mark(batch: Any, size: int) -> dict[str, Any]:
    """What is kept of the last batch: a resumed pass must come by the same one."""
    return {"samples": size, "print": fingerprint(batch)}


def compare(batch: Any, known: dict[str, Any], number: int, say: Callable[[str], None]) -> None:
    """Tell it where the batch that was made again is another one."""
    if known["print"] is not None and fingerprint(batch) != known["print"]:
        say(
            f"this resume is not bit for bit: batch {number} of this pass, made again, is not what it was before. The "
            "data depends on something that is not saved: an order shuffled in place, a count, a generator; hint: "
            "shuffle a copy in each epoch; track counts and generators"
        )


def _add(value: Any, before: int | None, depth: int) -> int | None:
    if isinstance(value, torch.Tensor):
        data = _some_bytes(value)
    elif isinstance(value, (bool, int, float, str)):
        data = repr(value).encode()
    elif isinstance(value, bytes):
        data = value[: 8 * _MOST]
    elif _is_array(value):
        data = None if value.dtype.kind in "OV" else value.reshape(-1)[:_MOST].tobytes()
    elif depth < _DEEPEST and isinstance(value, (Mapping, list, tuple)):
        members = list(value.values()) if isinstance(value, Mapping) else value
        for member in members[:_MOST_MEMBERS]:
            before = _add(member, before, depth + 1)
        return before
    else:
        data = None
    return before if data is None else zlib.crc32(data, before or 0)


def _some_bytes(tensor: torch.Tensor) -> bytes | None:
    """Of the first and the last of its elements; a GPU's are not waited for."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    if len(flat) > _MOST:
        flat = torch.cat([flat[: _MOST // 2], flat[-_MOST // 2 :]])
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
