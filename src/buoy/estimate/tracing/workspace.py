"""Memory that CUDA kernels take and give back inside one operation, which no tensor of the trace shows.

Sizes follow the launch code of PyTorch: partial sums of split reductions, and the backward of the attention kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from buoy._compat.torch import EFFICIENT_ATTENTION_NAME, FLASH_ATTENTION_NAME, SAFE_SOFTMAX_NAME

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
    """What the kernel behind this operation takes beside its outputs, in order."""
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
