"""torch's tensors on their way to a checkpoint and back."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from buoy.checkpoint.encoding import Tensor
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


class Lent(torch.Tensor):
    """A stored tensor that is read when it is copied from: of a model that is loaded, one is in memory at a time.

    It knows what it is; whatever else torch is asked to do with it is done with its numbers, read for that alone. So it
    is for those who copy: whoever kept it and changed it would change nothing.
    """

    stored: StoredTensor

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch's own way to ask a class of tensors for anything."""
        if function in _DESCRIBING:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        if function is torch.Tensor.copy_ and len(args) == 2 and _is_read_straight(*args):
            return args[0]
        given = {name: _numbers(value) for name, value in (kwargs or {}).items()}
        return function(*map(_numbers, args), **given)


_OF_TENSORS: Any = torch.Tensor
_DESCRIBING = {
    getattr(_OF_TENSORS, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "requires_grad")
}
_DESCRIBING |= {_OF_TENSORS.size, _OF_TENSORS.dim, _OF_TENSORS.numel}


def lent(stored: StoredTensor) -> torch.Tensor:
    """A stored tensor to copy from, not to keep."""
    described = torch.empty(stored.shape, dtype=_TYPES[stored.dtype], device="meta").as_subclass(Lent)
    described.stored = stored
    return described


def kept(stored: StoredTensor) -> torch.Tensor:
    """A stored tensor with memory of its own, in the order that it had.

    A fused optimizer reads a parameter and its moments side by side, as they lie: in another order than the parameter's
    (channels last) the moments would be those of other weights.
    """
    tensor = torch.empty(stored.shape, dtype=_TYPES[stored.dtype])
    stored.read_into(_memory(tensor))
    if stored.order is None:
        return tensor
    back = sorted(range(tensor.dim()), key=stored.order.__getitem__)
    return tensor.permute(stored.order).clone(memory_format=torch.contiguous_format).permute(back)


def _is_read_straight(to: Any, lent: Any) -> bool:
    """Read it into the very tensor that it is copied to, where that is plain memory; whether it was."""
    is_plain = type(to) in (torch.Tensor, torch.nn.Parameter) and to.is_cpu and to.is_contiguous()
    if not (is_plain and isinstance(lent, Lent) and (to.shape, to.dtype) == (lent.shape, lent.dtype)):
        return False
    if to.is_conj() or to.is_neg() or to.is_inference() or (to.requires_grad and torch.is_grad_enabled()):
        return False
    lent.stored.read_into(_memory(to))
    torch.autograd.graph.increment_version(to)
    return True


def _numbers(value: Any) -> Any:
    """The same with every lent tensor read."""
    if isinstance(value, Lent):
        return kept(value.stored)
    if type(value) in (list, tuple):
        return type(value)(map(_numbers, value))
    return value


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the machine's own memory."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


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
