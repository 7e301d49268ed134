"""Where each tensor goes in `state.safetensors`: a valid safetensors file that direct I/O and mmap like.

The format allows no holes, so alignment comes from order: wide types first, as safetensors' own writer does.
The header is padded with spaces, which the format allows, so that the data starts on a page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from buoy.checkpoint.state import ITEM_BYTES, Tensor

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """One file's plan; it stays the same while names, types and shapes do."""

    signature: tuple[tuple[str, str, tuple[int, ...]], ...]
    header: bytes
    """The file's beginning: length, JSON, padding."""
    places: dict[str, tuple[int, int]]
    """name -> first byte and end in the file, in the order of the file."""
    size: int

    @property
    def ends(self) -> list[int]:
        """Where the header and each tensor end: checksums are cut there, so that damage has a name."""
        return [len(self.header), *(end for _, end in self.places.values())]


def signature_of(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """What a layout depends on."""
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def lay_out(tensors: Mapping[str, Tensor]) -> Layout:
    """The plan for these tensors.

    >>> lay_out({"w": Tensor("F32", (3,), print)}).places
    {'w': (4096, 4108)}
    """
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])  # stable: else as given
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name in order:
        spans[name] = (at, at + tensors[name].nbytes)
        at += tensors[name].nbytes
    described = {
        name: {"dtype": tensors[name].dtype, "shape": list(tensors[name].shape), "data_offsets": list(span)}
        for name, span in spans.items()
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // PAGE) * PAGE - 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: (len(header) + start, len(header) + end) for name, (start, end) in spans.items()}
    return Layout(signature_of(tensors), header, places, len(header) + at)
