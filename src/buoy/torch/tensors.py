"""torch's tensors on their way to a checkpoint and back."""

from __future__ import annotations

import torch

from buoy.checkpoint.state import Tensor
from buoy.checkpoint.store import StoredTensor

WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_TYPES = {word: kind for kind, word in WORDS.items()}


def as_tensor(value: object) -> Tensor | None:
    """torch's tensors for `buoy.checkpoint`."""
    if isinstance(value, Tensor):
        return value  # a size that is only expected
    if not isinstance(value, torch.Tensor):
        return None
    if type(value).__name__ == "DTensor" or value.layout is not torch.strided or value.is_meta:
        return Tensor(f"a kind that is not whole in this process ({_kind(value)})", (), no_bytes)
    tensor = value.detach()
    word = WORDS.get(tensor.dtype, str(tensor.dtype))

    def copy_into(room: memoryview) -> None:
        if tensor.numel():
            torch.frombuffer(room, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    # A conjugate, and the imaginary part of one, are views of memory that they read with another sign.
    view = (tensor.stride(), tensor.is_conj(), tensor.is_neg())
    key = (str(tensor.device), tensor.data_ptr(), *view) if tensor.numel() else None
    return Tensor(word, tuple(tensor.shape), copy_into, key)


def lent(stored: StoredTensor) -> torch.Tensor:
    """A stored tensor over the checkpoint's own memory: to copy from, not to keep."""
    kind = _TYPES[stored.dtype]
    if 0 in stored.shape:
        return torch.empty(stored.shape, dtype=kind)
    return torch.frombuffer(stored.memory, dtype=kind).view(stored.shape)


def kept(stored: StoredTensor) -> torch.Tensor:
    """A stored tensor with memory of its own."""
    return lent(stored).clone()


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor).__name__ == "DTensor":
        return "DTensor"
    return "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")


def no_bytes(room: memoryview) -> None:
    """For a tensor that stands for its size only."""
    raise AssertionError("this tensor has no bytes")
