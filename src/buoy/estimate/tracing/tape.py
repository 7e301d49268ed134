"""The tape of a fake step: every storage that comes and goes on the device, what made it and which module it served.

And what no tensor shows: memory that CUDA kernels take and give back inside one operation. Its sizes follow the launch
code of PyTorch: partial sums of split reductions, and the backward of the attention kernels.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from buoy._compat.torch import (
    EFFICIENT_ATTENTION_NAME,
    FLASH_ATTENTION_NAME,
    MATMULS_IN_FLOAT8,
    SAFE_SOFTMAX_NAME,
    UNSAFE_VIEW,
    TorchDispatchMode,
    backward_node_number,
    fake_tensors,
    is_in_backward,
    is_view,
    next_node_number,
    schema_of,
    storage_key,
)
from buoy.estimate.devices import Device
from buoy.estimate.trace import LOSS, Event, Trace
from buoy.estimate.tracing.fake import DEVICE_QUESTION, answered_device

FakeTensor: Any = fake_tensors().FakeTensor
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", *MATMULS_IN_FLOAT8})
VIEWS = frozenset({"view", UNSAFE_VIEW, "t", "transpose", "expand", "detach"})
# CUDA's kernels allocate these outputs in another order than they return them; reserved depends on it.
LAST_FIRST = frozenset({"native_dropout"})


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records allocations and frees on one device type while it is entered."""

    def __init__(self, device: Device, where: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.where = where or device.type
        """The type of the tensors that are recorded: `cpu` where real ones stand in for the device's."""
        self.phase = "weights"
        self.events: list[Event] = []
        self.marks: list[str] = []
        self.origin: dict[int, tuple[str, str, str]] = {}
        self.gradients: set[int] = set()
        self.optimizer: set[int] = set()
        self.largest: dict[str, int] = {}
        """What libraries' workspaces scale with: the largest input and output bytes of a convolution, and on a CPU the
        largest product in half precision, as float32."""
        self._seen: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._next = 0
        self._last = ""
        self._adds: dict[int, int] = {}
        self._threads: set[bool] = set()
        self._modules: list[str] = [""]
        self._sequence: list[tuple[int, str]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # nothing is compiled while this mode is on, and the guard costs as much as the tape itself
        )

    def mark(self, name: str) -> None:
        """Note a place among the events."""
        self.events.append(("m", len(self.marks), 0))
        self.marks.append(name)

    def enter_module(self, name: str) -> None:
        """Name the module whose forward begins; backward nodes are told by their sequence number."""
        self._modules.append(name)
        self._note_sequence()

    def leave_module(self) -> None:
        """Its forward ended."""
        self._modules.pop()
        self._note_sequence()

    def identity(self, tensor: torch.Tensor) -> int | None:
        """The allocation behind a tensor, if it lives on the device."""
        found = self._seen.get(storage_key(tensor.untyped_storage()))
        return found[1] if found is not None else None

    def reserve(self, size: int, operation: str) -> None:
        """An allocation that no tensor shows and that stays."""
        self._allocate(size, operation, "workspace")

    def see(self, tensors: Iterable[torch.Tensor], operation: str) -> None:
        """Note storages that were not made under this mode."""
        for tensor in tensors:
            self._add(tensor, operation)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, note what it allocated."""
        # C++ asks for devices twice as often as it runs operations; the way through the fake mode is long.
        if func is DEVICE_QUESTION and isinstance(args[0], FakeTensor):
            return answered_device(args)
        out = func(*args, **(kwargs or {}))
        name = schema_of(func).name.rpartition(":")[2]
        if isinstance(out, torch.Tensor):
            self._add(out, name)
        elif isinstance(out, (tuple, list)):
            tensors = [item for item in out if isinstance(item, torch.Tensor)]
            if name == EFFICIENT_ATTENTION_NAME:
                tensors = tensors[:2]  # the seeds of its dropout stay on the host
            for tensor in reversed(tensors) if name in LAST_FIRST else tensors:
                self._add(tensor, name)
        if self.device.capability:
            self._beside(name, args, out)
        if name in MATMULS:
            self._workspace_of_thread()
            self._note_product(args, out)
        elif name == "add":
            self._note_add(args, out)
        elif name in ("convolution", "cudnn_convolution"):
            self._note_convolution(args, out)
        if name not in VIEWS:
            self._last = name
        return out

    def trace(self) -> Trace:
        """What was recorded, with gradients accumulated in place as plain tensors are, and every part named."""
        events = self._with_in_place_adds()
        parts = self._parts(events)
        labels: dict[tuple[str, str, str], int] = {}
        owner = {}
        for kind, identity, _ in events:
            if kind == "a":
                _, module, operation = self.origin[identity]
                label = (parts[identity], module, operation)
                owner[identity] = labels.setdefault(label, len(labels))
        return Trace(events, list(labels), owner, self.marks, facts=dict(self.largest))

    def _add(self, tensor: torch.Tensor, operation: str) -> None:
        if tensor.device.type != self.where:
            return
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        if not size:
            return
        known = self._seen.get(key)
        if known is not None:
            if known[2] != size:  # resized in place: the allocator sees a new block, then the old one go
                self.events.append(("f", known[1], 0))
                identity = self._allocate(size, operation)
                self._seen[key] = (self._watch(storage, key, identity), identity, size)
            return
        identity = self._allocate(size, operation)
        self._seen[key] = (self._watch(storage, key, identity), identity, size)

    def _allocate(self, size: int, operation: str, phase: str | None = None) -> int:
        identity = self._next
        self._next += 1
        self.events.append(("a", identity, size))
        self.origin[identity] = (phase or self._phase_now(), self._module_now(), operation)
        return identity

    def _watch(self, storage: Any, key: int, identity: int) -> weakref.ref[Any]:
        tape = weakref.ref(self)

        def gone(_: object) -> None:
            here = tape()
            if here is None:
                return
            known = here._seen.get(key)
            if known is not None and known[1] == identity:
                del here._seen[key]
                here.events.append(("f", identity, 0))

        return weakref.ref(storage, gone)

    def _beside(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        inside: dict[int, int] = {}
        for kind, number, size in scratch(name, args, out, self.device.multiprocessors, self.device.threads):
            if kind == "a":
                inside[number] = self._allocate(size, name)
            else:
                self.events.append(("f", inside[number], 0))

    def _phase_now(self) -> str:
        if self.phase == "backward" and len(self._modules) > 1:
            return "recomputed"  # a forward inside backward: activation checkpointing
        return self.phase

    def _module_now(self) -> str:
        if len(self._modules) > 1 or self.phase != "backward":
            return self._module_in_forward()
        number = backward_node_number()
        if number is None:
            return ""
        index = bisect_right(self._sequence, (number, "\uffff"))
        return self._sequence[index - 1][1] if index else ""

    def _note_sequence(self) -> None:
        self._sequence.append((next_node_number(), self._module_in_forward()))

    def _module_in_forward(self) -> str:
        outside = len(self._modules) == 1 and self.phase == "forward"
        return LOSS if outside else self._modules[-1]

    def _workspace_of_thread(self) -> None:
        # The thread that runs backward has a cuBLAS handle, and so a workspace, of its own.
        backward = is_in_backward()
        if self.device.workspace and backward not in self._threads:
            self._threads.add(backward)
            self.reserve(self.device.workspace, "cublas")

    def _note_add(self, args: tuple[Any, ...], out: Any) -> None:
        # Autograd sums gradients in place for plain tensors but not for subclasses such as these: remember the pairs.
        # A view (as a tied output layer's gradient is) shares its storage with its base: summed into a new tensor.
        # The same holds for the bias that `linear` adds to what it multiplied.
        if not isinstance(out, torch.Tensor) or len(args) < 2 or not isinstance(args[0], torch.Tensor):
            return
        if is_in_backward():
            if is_view(args[0]):
                return
        elif not (isinstance(args[1], torch.nn.Parameter) and args[1].dim() == 1 and self._last in MATMULS):
            return
        first, made = self.identity(args[0]), self.identity(out)
        if first is not None and made is not None and self.events and self.events[-1][1] == made:
            self._adds[made] = first

    def _note_convolution(self, args: tuple[Any, ...], out: Any) -> None:
        moved = args[0].untyped_storage().nbytes() + out.untyped_storage().nbytes()
        self._note_largest("convolution", moved)
        if torch.backends.cudnn.benchmark:
            self._note_largest("convolution_tried", tried(args, out))

    def _note_product(self, args: tuple[Any, ...], out: Any) -> None:
        if self.where == "cpu" and out.dtype in (torch.bfloat16, torch.float16):
            tensors = [arg for arg in (*args, out) if isinstance(arg, torch.Tensor)]
            self._note_largest("half_product", 4 * sum(tensor.numel() for tensor in tensors))

    def _note_largest(self, name: str, size: int) -> None:
        self.largest[name] = max(self.largest.get(name, 0), size)

    def _with_in_place_adds(self) -> list[Event]:
        kept: list[Event] = []
        same: dict[int, int] = {}
        skip = -1
        for index, (kind, identity, size) in enumerate(self.events):
            if index == skip:
                continue
            if kind == "a" and identity in self._adds and index + 1 < len(self.events):
                first = self._adds[identity]
                if self.events[index + 1][:2] == ("f", first):
                    same[identity] = same.get(first, first)
                    skip = index + 1
                    continue
            kept.append((kind, same.get(identity, identity) if kind != "m" else identity, size))
        for later, first in same.items():
            for found in (self.gradients, self.optimizer):
                if later in found:
                    found.add(first)
        return kept

    def _parts(self, events: list[Event]) -> dict[int, str]:
        """What each allocation was for, now that it is known how long it lived."""
        parts: dict[int, str] = {}
        in_forward: dict[int, str] = {}
        for kind, identity, _ in events:
            if kind == "m" and self.marks[identity] == "backward":
                for held in in_forward:
                    parts[held] = "activations"
                in_forward.clear()
            elif kind == "f":
                in_forward.pop(identity, None)
            elif kind == "a":
                phase = self.origin[identity][0]
                parts[identity] = {"forward": "temporaries", "recomputed": "activations"}.get(phase, phase)
                if phase == "forward":
                    in_forward[identity] = phase
                elif phase in ("backward", "optimizer", "other"):
                    parts[identity] = "temporaries"
                if identity in self.gradients:
                    parts[identity] = "gradients"
                elif identity in self.optimizer:
                    parts[identity] = "optimizer"
        return parts


def follow_modules(model: torch.nn.Module, tape: Tape) -> Callable[[], None]:
    """Tell the tape which module runs; returns what takes the hooks away again."""
    handles: list[Any] = []
    for name, module in model.named_modules():

        def enter(_module: Any, _inputs: Any, name: str = name) -> None:
            tape.enter_module(name)

        def leave(_module: Any, _inputs: Any, _out: Any) -> None:
            tape.leave_module()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))

    def unfollow() -> None:
        for handle in handles:
            handle.remove()

    return unfollow


Steps = list[tuple[str, int, int]]
"""`("a", n, bytes)` and `("f", n, 0)`, n counted within the operation."""

WARP = 32
MOST_THREADS = 512
LEAST_VALUES, MOST_VALUES = 16, 256
# Operations that copy these arguments first when their elements do not lie in order.
CONTIGUOUS = {"native_layer_norm": (0,), "native_layer_norm_backward": (0, 1), "convolution_backward": (0, 1)}
# Sides up to which cuDNN convolves by Fourier transforms.
MOST_TRANSFORMED = 256
ACCUMULATED = 4  # sums of half, bfloat16 and float are kept in float


def scratch(name: str, args: Sequence[Any], out: Any, multiprocessors: int, threads: int) -> Steps:
    """What the kernel behind this operation takes besides its outputs, in order."""
    if name in ("sum", "mean") and isinstance(out, torch.Tensor) and args[0].is_floating_point():
        return reduction(args[0], out, multiprocessors, threads)
    if name in CONTIGUOUS:
        copied = [args[index] for index in CONTIGUOUS[name] if _is_strided(args[index])]
        return [
            ("a", number, tensor.numel() * tensor.element_size()) for number, tensor in enumerate(copied)
        ] + [("f", number, 0) for number in range(len(copied))]
    if name == SAFE_SOFTMAX_NAME:  # which rows are masked entirely
        rows = out.numel() // out.shape[-1]
        return [("a", 0, out.numel()), ("a", 1, rows), ("a", 2, 4), ("f", 2, 0), ("f", 1, 0), ("f", 0, 0)]
    if name == f"{EFFICIENT_ATTENTION_NAME}_backward":
        return efficient_backward(args)
    if name == f"{FLASH_ATTENTION_NAME}_backward":
        return flash_backward(args)
    return []


def reduction(tensor: torch.Tensor, out: torch.Tensor, multiprocessors: int, threads: int) -> Steps:
    """Partial sums of a reduction over leading dimensions that is split across thread blocks.

    Only where the rows are contiguous: there each block keeps a partial result for every lane, which is megabytes;
    reductions along the fastest dimension keep one value per block.
    """
    outputs = out.numel()
    if not outputs or tensor.dim() < 2 or not tensor.is_contiguous() or tensor.numel() == outputs:
        return []
    if tuple(tensor.shape[tensor.dim() - _trailing(tensor, outputs) :]) != tuple(
        size for size in out.shape if size != 1
    ):
        return []
    inputs = tensor.numel() // outputs
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    most = MOST_THREADS // vector
    wide = outputs // vector
    wide_power, tall_power = _power_below(wide, most), _power_below(inputs, most)
    width = min(wide_power, WARP)
    height = min(tall_power, most // width)
    width = min(wide_power, most // height)
    values = inputs
    split = values >= min(height * 16, MOST_VALUES)
    if not split:
        return []
    values = _up(inputs, height)
    grid = _up(outputs // vector, width)
    target = multiprocessors * (threads // (width * height))
    if values < MOST_VALUES or grid > target:
        return []
    blocks = max(min(_up(target, grid), _up(values, LEAST_VALUES)), _up(values, MOST_VALUES))
    if blocks <= 1:
        return []
    partial = ACCUMULATED * outputs * blocks * width * vector
    return [("a", 0, partial), ("a", 1, 4 * grid), ("f", 1, 0), ("f", 0, 0)]


def efficient_backward(args: Sequence[Any]) -> Steps:
    """The row sums of output times gradient, and an accumulator for the query's gradient."""
    gradient, query, out = args[0], args[1], args[5]
    batch, heads, rows, size = query.shape
    product = 4 * out.numel()
    sums = 4 * batch * heads * rows
    workspace = batch * heads * (4 * _round(rows, 64) * size + 64)
    steps: Steps = []
    if gradient.dtype != torch.float32:  # both are turned into float first
        steps += [("a", 4, product), ("a", 5, product)]
    steps += [("a", 0, product)]
    if gradient.dtype != torch.float32:
        steps += [("f", 4, 0), ("f", 5, 0)]
    steps += [("a", 1, sums), ("a", 2, sums), ("f", 1, 0), ("f", 0, 0)]
    return [*steps, ("a", 3, workspace), ("f", 2, 0), ("f", 3, 0)]


def flash_backward(args: Sequence[Any]) -> Steps:
    """The row sums, the query's gradient in float, and per-head copies where heads share keys and values."""
    query, key = args[1], args[2]
    batch, heads, rows, size = query.shape
    steps: Steps = [
        ("a", 0, 4 * batch * heads * _round(rows, 128)),
        ("a", 1, 4 * batch * heads * _round(rows, 128) * _round(size, 32)),
    ]
    if key.shape[1] != heads:
        shared = query.element_size() * batch * heads * key.shape[2] * size
        steps += [("a", 2, shared), ("a", 3, shared), ("f", 3, 0), ("f", 2, 0)]
    return [*steps, ("f", 1, 0), ("f", 0, 0)]


def tried(args: Sequence[Any], out: torch.Tensor) -> int:
    """The largest workspace that cuDNN may try with `cudnn.benchmark`: a convolution by Fourier transforms.

    It holds the spectra of input, weights and output, and each a second time in the order that the product reads. The
    weights' is as large for one sample as for many: xception41's 728 x 728 channels of 38 x 38 take 17.9 GB, and with
    8 samples 17.9 GB more than its tensors were measured.
    """
    images, weight, stride, dilation, groups = args[0], args[1], args[3], args[5], args[8]
    if images.dim() != 4 or groups != 1 or set(stride) != {1} or set(dilation) != {1}:
        return 0
    sides = [image + kernel - 1 for image, kernel in zip(images.shape[2:], weight.shape[2:], strict=True)]
    high, wide = (1 << (side - 1).bit_length() for side in sides)
    if max(high, wide) > MOST_TRANSFORMED:
        return 0
    planes = images.shape[0] * (images.shape[1] + out.shape[1]) + weight.shape[0] * weight.shape[1]
    return int(2 * planes * high * (wide // 2 + 1) * 8)


def _is_strided(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    return tensor.dim() != 4 or not tensor.is_contiguous(memory_format=torch.channels_last)


def _trailing(tensor: torch.Tensor, outputs: int) -> int:
    """How many trailing dimensions together hold `outputs` elements."""
    found, count = 1, 0
    while found < outputs and count < tensor.dim():
        count += 1
        found *= tensor.shape[-count]
    return count if found == outputs else 0


def _power_below(value: int, most: int) -> int:
    return most if value >= most else 1 << (value.bit_length() - 1)


def _round(value: int, to: int) -> int:
    return -(-value // to) * to


def _up(value: int, by: int) -> int:
    return -(-value // by)
