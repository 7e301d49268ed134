"""Fake tensors on `cuda:0` without CUDA: shapes, dtypes and lifetimes, and an autograd engine that runs backward.

A plain fake CUDA tensor aborts the process in backward on a CPU-only wheel: the C++ engine asks for its device and has
no such backend. So C++ is told `meta` here, while Python still sees `cuda:0`; what C++ then cannot know (which
attention kernel, autocast, dropout) is answered in Python by `cuda.py`.

Models are built without their weights: each parameter has a shape and no bytes, and nothing moves to a device.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode

from buoy._compat import patched
from buoy._compat.torch import (
    CAUSAL_QUESTION,
    FOREACH_SQRT,
    READ_VALUE,
    answering_metadata,
    buffers_of,
    destroy,
    fake_tensors,
    foreach_operations,
    operations_without_cuda,
    parameters_of,
    tree_flatten,
    tree_map,
)

fake_tensor: Any = fake_tensors()

CUDA = torch.device("cuda:0")
META = torch.device("meta")
# Newer versions of torch have it: the output and one value for each row are all that it keeps.
CUDA_ONLY = {"aten::_fused_rms_norm"}
PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
DEVICE_QUESTION = torch.ops.prim.device.default


class FakeDevice(fake_tensor.FakeTensorMode):  # type: ignore[misc]
    """A fake tensor mode whose CUDA tensors can be differentiated on any wheel."""

    answers_reads = False
    """Whether reading a float out of a tensor gives one: an optimizer scales its update by it, whatever it is."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while this mode is on: the guard is not needed at every operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Straight to `dispatch`: torch's own counts every call and guards against its compiler."""
        return self.dispatch(func, types, args, kwargs)

    def _prep_args_for_hash(self, result: list[object], args: Any, *rest: Any) -> None:
        """The key under which torch remembers what an operation returned: its own takes a quarter of a trace."""
        described = _described(self, args.items() if isinstance(args, dict) else args)
        if described is None:
            super()._prep_args_for_hash(result, args, *rest)
        else:
            result.append(described)

    @property
    def avoid_device_init(self) -> bool:
        """There is no device to initialise, whatever `torch.cuda.is_available` is made to say."""
        return True

    def dispatch(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Send what C++ creates on `meta`, because we answered so, back to the device."""
        if func is READ_VALUE and self.answers_reads:
            read: Any = args[0]
            if read.dtype.is_floating_point and getattr(read, "constant", read) is None:
                return 1.0
        if func is FOREACH_SQRT and _are_on_device(args[0]):
            return [torch.empty_like(each) for each in args[0]]  # type: ignore[attr-defined]
        if func in _IN_PLACE and _are_on_device(args[0]):
            return None
        named: dict[str, Any] = dict(kwargs or {})
        device = named.get("device")
        if device is not None and torch.device(device).type == "meta":
            named["device"] = CUDA
        return super().dispatch(func, types, args, named)


# An optimizer's updates of all weights at once: torch's fake tensors take each apart, a third of a small model's trace,
# to find that nothing is made.
_IN_PLACE = frozenset(
    foreach_operations(("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "zero"))
)


def _are_on_device(tensors: Any) -> bool:
    """All fake, on the pretended device, and none that is known by its value."""
    return all(
        type(each) is fake_tensor.FakeTensor and each.fake_device is not None and each.fake_device.type == "cuda"
        and each.constant is None
        for each in tensors
    )  # fmt: skip


def _described(mode: FakeDevice, args: Any) -> tuple[object, ...] | None:
    """Arguments of an operation as one hashable value that has all its output depends on; None: torch should try."""
    found: list[object] = []
    for arg in args:
        kind = type(arg)
        if kind is fake_tensor.FakeTensor:
            if arg.fake_mode is not mode or arg.constant is not None or arg.layout is not torch.strided:
                return None
            found.append(
                (arg.dtype, arg.shape, arg.stride(), arg.fake_device, arg.storage_offset(),
                 arg.untyped_storage().nbytes(), arg.requires_grad, arg.is_quantized, arg.is_conj(), arg.is_neg(),
                 arg.is_inference())
            )  # fmt: skip
        elif kind in PLAIN:
            found += (kind, arg)  # 1 and 1.0 are equal, and make different tensors
        elif kind in (list, tuple):
            inside = _described(mode, arg)
            if inside is None:
                return None
            found += (kind, inside)
        else:
            return None
    return tuple(found)


def answered_device(args: Any) -> torch.device:
    """The answer when it asks for a fake tensor's device."""
    fake: torch.device = args[0].fake_device
    return META if fake.type == "cuda" else fake


def _kernels_of_cuda() -> torch.library.Library:
    """Promise CUDA kernels where a CPU-only build has none and would take an operation apart instead.

    Operations such as the backward of SiLU have kernels for CPU and CUDA and a composite one for all others; those of
    `CUDA_ONLY` have one for CUDA alone. The promised kernels are never run: fake tensors answer before.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in operations_without_cuda(CUDA_ONLY):
        library.impl(name, _never, "CUDA")  # type: ignore[no-untyped-call]
    return library


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a promised CUDA kernel was asked to run")


@contextlib.contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Everything created inside is fake; `cuda` works."""
    kernels = _kernels_of_cuda()
    try:
        with (
            answering_metadata(DEVICE_QUESTION, answered_device),
            patched(fake_tensor, "init_gpu_context", lambda device: None),
            FakeDevice(allow_non_fake_inputs=True) as mode,
        ):
            yield mode
    finally:
        destroy(kernels)


@contextlib.contextmanager
def moved(module: torch.nn.Module, device: torch.device) -> Iterator[dict[int, torch.nn.Parameter]]:
    """While entered, every parameter and buffer is a fake one on the device, made in the order `.to()` moves them.

    Tied ones stay tied. Gives the new parameter by the `id` of the old one.
    """
    parameters: dict[int, torch.nn.Parameter] = {}
    buffers: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    filled: set[int] = set()  # a module that two others share is met twice, with its new tensors in it

    def fill(part: torch.nn.Module) -> None:
        if id(part) in filled:
            return
        filled.add(id(part))
        for child in part.children():
            fill(child)
        for name, old in list(parameters_of(part).items()):
            if old is not None:
                if id(old) not in parameters:
                    parameters[id(old)] = torch.nn.Parameter(empty_like(old, device), old.requires_grad)
                before.append((parameters_of(part), name, old))
                parameters_of(part)[name] = parameters[id(old)]
        for name, kept in list(buffers_of(part).items()):
            if kept is not None:
                if id(kept) not in buffers:
                    buffers[id(kept)] = empty_like(kept, device)
                before.append((buffers_of(part), name, kept))
                buffers_of(part)[name] = buffers[id(kept)]

    fill(module)
    try:
        yield parameters
    finally:
        # A step that turns out to depend on values is run again with the real ones.
        for owner, name, old in reversed(before):
            owner[name] = old


def together(model: torch.nn.Module, others: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """One module that has them all; the model itself where there are no others."""
    return torch.nn.ModuleList([model, *others]) if others else model


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same size and layout on the device."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)


LARGE_TENSOR = 1 << 20
"""Elements from which an empty tensor is not allocated while building."""


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give up each parameter's memory the moment a module takes it; other tensors stay real and can be read."""
    register = torch.nn.Module.register_parameter

    def registered(module: Any, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        kept = parameters_of(module).get(name)
        if kept is not None and is_lazy(kept):
            options: Any = {"requires_grad": kept.requires_grad, "device": "meta", "dtype": kept.dtype}
            parameters_of(module)[name] = UninitializedParameter(**options)
        elif kept is not None and kept.device.type != "meta":
            empty = torch.empty_like(kept, device="meta")
            fresh = torch.nn.Parameter(empty, requires_grad=kept.requires_grad)
            fresh.__dict__.update(copy.copy(kept.__dict__))
            parameters_of(module)[name] = fresh

    with (
        patched(torch.nn.Module, "register_parameter", registered),
        patched(torch.nn.Module, "load_state_dict", lambda *args, **kwargs: None),
    ):
        yield


class StayOnHost(TorchFunctionMode):
    """While building, nothing moves: a model that sends itself to `cuda` is put there by the tracer later."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if named.get("device") is not None and torch.device(named["device"]).type == "cuda":
            named["device"] = "meta" if func is torch.Tensor.to and args[0].is_meta else "cpu"
        fresh = func is torch.empty and named.get("device") is None and "out" not in named
        if fresh and _numel(args, named) > LARGE_TENSOR:
            named["device"] = "meta"  # a weight to be: its bytes mean nothing yet, and are never needed
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], args[0].device, *args[2:])
        try:
            return func(*args, **named)
        except RuntimeError:
            # A forward pass while building, mostly to learn a shape: the weights have no bytes, so the rest needs none.
            if not _is_mixed((args, named)):
                raise
            bare = tree_map(without_bytes, (args, named))
            return func(*bare[0], **bare[1])


def shape_lazy_modules(model: torch.nn.Module, forward: Callable[[], object]) -> None:
    """Let the parameters that learn their shape from the first batch learn it."""
    if any(is_lazy(parameter) for parameter in model.parameters()):
        with torch.no_grad(), StayOnHost():
            forward()


def _is_mixed(values: Any) -> bool:
    kinds = {leaf.is_meta for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)}
    return len(kinds) == 2


def without_bytes(leaf: Any) -> Any:
    """A tensor's shape and dtype alone; what is no tensor stays."""
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _numel(args: tuple[Any, ...], named: dict[str, Any]) -> int:
    size = named.get("size", args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args)
    return math.prod(size) if all(isinstance(dimension, int) for dimension in size) else 0


@contextlib.contextmanager
def ordinary_values() -> Iterator[None]:
    """Answer what transformers and `torch.nn.Transformer` ask of values that fake tensors have not."""
    # A module that is not loaded is asked nothing.
    masks, (transformer, question) = sys.modules.get("transformers.masking_utils"), CAUSAL_QUESTION
    with (
        patched(masks, "find_packed_sequence_indices", _none_packed),
        patched(sys.modules.get(transformer), question, _causal_if_square),
    ):
        yield


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
