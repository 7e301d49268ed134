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
    # A class of somebody's own may have its numbers elsewhere.
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
    # Zeros that autograd makes have no memory at all: 0.
    address = (tensor.data_ptr() or None) if is_plain and not (tensor.is_conj() or tensor.is_neg()) else None
    return Tensor(word, tuple(tensor.shape), copy_into, key, _order(tensor), address)


def lent(stored: StoredTensor) -> torch.Tensor:
    """A stored tensor over the checkpoint's own memory: to copy from, not to keep."""
    kind = _TYPES[stored.dtype]
    if 0 in stored.shape:
        return torch.empty(stored.shape, dtype=kind)
    return torch.frombuffer(stored.memory, dtype=kind).view(stored.shape)


def kept(stored: StoredTensor) -> torch.Tensor:
    """A stored tensor with memory of its own, in the order that it had.

    A fused optimizer reads a parameter and its moments side by side, as they lie: in another order than the parameter's
    (channels last) the moments would be those of other weights.
    """
    tensor = lent(stored)
    if stored.order is None:
        return tensor.clone()
    back = sorted(range(tensor.dim()), key=stored.order.__getitem__)
    return tensor.permute(stored.order).clone(memory_format=torch.contiguous_format).permute(back)


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """How its dimensions lie in memory where that is not C order; None also for what has gaps or overlaps."""
    strides, shape = tensor.stride(), tensor.shape
    if (
        tensor.is_contiguous() and 1 not in shape
    ):  # a dimension of one may have any stride, which torch compares too
        return None
    c_order = tuple(range(tensor.dim()))
    order = tuple(sorted(c_order, key=lambda place: (-strides[place], -shape[place])))
    return order if order != c_order and tensor.permute(order).is_contiguous() else None


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor).__name__ == "DTensor":
        return "DTensor"
    return "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")


def no_bytes(room: memoryview) -> None:
    """For a tensor that stands for its size only."""
    raise AssertionError("this tensor has no bytes")
