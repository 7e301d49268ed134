"""What CUDA would do where C++ asks "is this tensor on CUDA?": attention kernels, dropout, recurrent layers, autocast.

LSTM, GRU and RNN as cuDNN runs them: one kernel, a reserve kept for backward, gradients in one flat buffer. Autocast by
its lists of operations and its cache of cast weights: C++'s own kernels are told `meta` and would leave tensors alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

from buoy._compat.torch import (
    ATTENTION,
    AUTOCAST_LOWER,
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    LOG_SOFTMAX,
    SAFE_SOFTMAX,
    SOFTMAX,
    autocast_key,
    destroy,
    without_key,
)
from buoy.estimate.tracing.fake import CUDA

# Values cuDNN keeps per unit and time step for backward: the gates, the cell, and the output of the layer. Its size is
# not documented; these are the values the backward pass needs. See `RESERVE_DOUBT`.
RESERVE = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RESERVE_DOUBT = 0.5
"""The reserve may be this share larger."""


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, shape: tuple[int, ...], input: Any, *tensors: Any) -> Any:
        """Allocate what cuDNN's forward allocates."""
        layers, directions, _, batch, hidden, projected = shape
        ctx.save_for_backward(input, *tensors)
        out = input.new_empty((*input.shape[:-1], projected * directions))
        last = input.new_empty((layers * directions, batch, projected))
        cell = input.new_empty((layers * directions, batch, hidden))
        ctx.reserve = input.new_empty(reserve_values(kind, shape))
        return (out, last, cell) if kind == "lstm" else (out, last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate what cuDNN's backward allocates: the input's gradient and one buffer for all weights."""
        input, *tensors = ctx.saved_tensors
        flat = input.new_empty(sum(tensor.numel() for tensor in tensors))
        found, offset = [], 0
        for tensor in tensors:
            found.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
        ctx.reserve = None
        return (None, None, torch.empty_like(input), *found)


def recurrent(kind: str, args: tuple[Any, ...]) -> tuple[Any, int]:
    """Stands in for `torch.lstm`, `torch.gru` and `torch.rnn_*` on fake CUDA tensors, packed input or not.

    Returns what they return, and the bytes of the reserve.
    """
    packed = isinstance(args[1], torch.Tensor) and not isinstance(args[3], bool)
    if packed:
        # Packed data has no padding: every row is one time step of one sequence.
        data, _, hidden_state, weights, _, layers, _, _, bidirectional = args[:9]
        time, batch = int(data.shape[0]), 1
    else:
        data, hidden_state, weights, _, layers, _, _, bidirectional, batch_first = args[:9]
        first, second = (
            (int(data.shape[0]), int(data.shape[1])) if data.dim() == 3 else (int(data.shape[0]), 1)
        )
        time, batch = (second, first) if batch_first else (first, second)
    state = hidden_state[0] if isinstance(hidden_state, (tuple, list)) else hidden_state
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        data, weights = data.to(dtype), [weight.to(dtype) for weight in weights]
    directions = 2 if bidirectional else 1
    hidden = int(weights[0].shape[0]) // GATES[kind]
    shape = (int(layers), directions, time, batch, hidden, int(state.shape[-1]))
    out = _Recurrent.apply(kind, shape, data, *weights)  # type: ignore[no-untyped-call]
    return out, reserve_values(kind, shape) * data.element_size()


def reserve_values(kind: str, shape: tuple[int, ...]) -> int:
    """How many values cuDNN keeps for the backward pass."""
    layers, directions, time, batch, hidden, _ = shape
    return RESERVE[kind] * layers * directions * time * batch * hidden


HALF = (torch.float16, torch.bfloat16)
_ATTENTION = {ATTENTION, functional.scaled_dot_product_attention}
_DROPOUT = {functional.dropout, torch.dropout}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class CudaSemantics(TorchFunctionMode):
    """Sends operations on fake CUDA tensors to the kernels a device of this capability would choose.

    A function mode does not see what torch's own Python functions call inside (multi-head attention calls both), so the
    names they look up are replaced too.
    """

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability
        self.attention: dict[str, int] = {}
        """How often each attention kernel was chosen."""
        self.reserve = 0
        """Bytes cuDNN keeps for the backward of recurrent layers, over all calls."""
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.cuda: self._to_cuda,
            torch.Tensor.to: self._to,
        }
        self._special |= dict.fromkeys(_ATTENTION, self._attend)
        self._special |= dict.fromkeys(_DROPOUT, self._drop)

    def __enter__(self) -> CudaSemantics:
        self._names = (functional.scaled_dot_product_attention, functional.dropout)
        setattr(functional, "scaled_dot_product_attention", self._attend)  # noqa: B010
        functional.dropout = self._drop
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        functional.scaled_dot_product_attention, functional.dropout = self._names
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the few that need it."""
        special = self._special.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _RECURRENT and _on_cuda(args):
            out, reserve = recurrent(func.__name__, args)
            self.reserve += reserve
            return out
        return func(*args, **(kwargs or {}))

    def _to_cuda(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.to(CUDA)

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # C++ believes the tensor to be on `meta` and would copy it to the device it is on.
        if tensor.device.type == "cuda":
            if args and isinstance(args[0], torch.Tensor) and args[0].device == tensor.device:
                args = (args[0].dtype, *args[1:])
            elif args and isinstance(args[0], (torch.device, str, int)) and _names_cuda(args[0]):
                args = args[1:]
            if "device" in kwargs and kwargs["device"] is not None and _names_cuda(kwargs["device"]):
                del kwargs["device"]
            if not args and not kwargs.keys() & {"dtype", "copy", "memory_format"}:
                return tensor
            if args and isinstance(args[0], bool):
                args = (tensor.dtype, *args)
        return tensor.to(*args, **kwargs)

    def _drop(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
        train: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        training = training if train is None else train
        if input.device.type == "cuda" and training and 0 < p < 1 and not inplace:
            dropped: torch.Tensor = torch.ops.aten.native_dropout.default(input, p, True)[0]
            return dropped
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type != "cuda":
            return ATTENTION(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        # Autocast has its say before the kernel is chosen.
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        with torch.autocast("cuda", enabled=False):
            kernel = self.kernel(query, key, attn_mask, enable_gqa)
            self.attention[kernel] = self.attention.get(kernel, 0) + 1
            arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale)
            if kernel == "flash":
                return _flash(*arguments)
            if kernel == "efficient":
                return _efficient(*arguments)
            return _math(*arguments)[0]

    def kernel(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, grouped: bool) -> str:
        """Which kernel CUDA would choose, by capability, dtype, mask and head size."""
        if query.dim() != 4:
            return "math"
        size = query.size(-1)
        if self.capability >= 80 and query.dtype in HALF and mask is None and size <= 256:
            return "flash"
        if query.dtype not in (torch.float32, *HALF) or (
            query.dtype == torch.bfloat16 and self.capability < 80
        ):
            return "math"
        if grouped and key.size(-3) != query.size(-3):
            return "math"
        # Vectorised loads: rows of the head must be aligned.
        if self.capability >= 80:
            align = 8 if query.dtype in HALF else 4
        else:
            align = 8 if query.dtype in HALF and self.capability >= 75 else 1
        return "efficient" if size % align == 0 else "math"


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    dropout: float, causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    size = query.size(-1)
    padding = -size % 8
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    out: torch.Tensor = FLASH_ATTENTION.default(
        query, key, value, dropout, causal, False, scale=scale if scale is not None else size**-0.5
    )[0]
    return out[..., :size] if padding else out


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    dropout: float, causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    if mask is not None:
        mask = _as_bias(mask, query)
        length = mask.size(-1)
        if length % 16:
            mask = functional.pad(mask, (0, 16 - length % 16))[..., :length]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    out: torch.Tensor = EFFICIENT_ATTENTION.default(
        query, key, value, mask, differentiated, dropout, causal, scale=scale
    )[0]
    return out


def _math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    dropout: float, causal: bool, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The composite implementation, which computes in float32 when given halves.

    It returns the attention weights too; like the C++ one it keeps each intermediate until it returns.
    """
    dtype = query.dtype
    if mask is not None:
        mask = _as_bias(mask, query)
    if dtype in HALF:
        query, key, value = query.float(), key.float(), value.float()
    if key.size(-3) != query.size(-3):
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    root = math.sqrt(scale if scale is not None else query.size(-1) ** -0.5)
    scaled = query * root
    if causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        mask = _as_bias(ones.tril(), query)
    scores = torch.matmul(scaled, key.transpose(-2, -1) * root)
    scores = torch.softmax(scores, -1) if mask is None else SAFE_SOFTMAX.default(scores.add_(mask), -1)
    if dropout > 0:
        scores = torch.ops.aten.native_dropout.default(scores, dropout, True)[0]
    weights = scores.to(dtype)
    return torch.matmul(scores, value).to(dtype), weights


def _as_bias(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    kept = torch.zeros((), dtype=like.dtype, device=like.device)
    masked = torch.full((), -math.inf, dtype=like.dtype, device=like.device)
    return torch.where(mask, kept, masked)


def _names_cuda(device: torch.device | str | int) -> bool:
    return torch.device(device).type == "cuda" if not isinstance(device, int) else True


def _on_cuda(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cuda"


LOWER = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "addr", "mv", "chain_matmul",
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "linalg_multi_dot", "convolution", "prelu", "scaled_dot_product_attention",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", *AUTOCAST_LOWER,
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "rms_norm", "norm.Scalar", "nuclear_norm", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip
# These take a dtype: float32 comes out, and the input is not copied first.
FLOAT32_BY_DTYPE = ("prod", "prod.dim_int", "sum", "sum.dim_IntList", "cumsum", "cumprod")
SOFTMAXES = ("softmax.int", "log_softmax.int")
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip

_KEY = autocast_key()


class CudaAutocast:
    """While entered, `torch.autocast("cuda")` means for fake tensors what it means for real ones."""

    def __init__(self) -> None:
        self._cast: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> CudaAutocast:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each kernel overrides the C++ one: that is what it is for
            for names, kernel in (
                (LOWER, self._lower),
                (FLOAT32, self._float32),
                (FLOAT32_BY_DTYPE, self._float32_by_dtype),
                (SOFTMAXES, self._softmax),
                (WIDEST, self._widest),
            ):
                for name in names:
                    self._install(name, kernel)
        self._exit = torch.amp.autocast_mode.autocast.__exit__
        torch.amp.autocast_mode.autocast.__exit__ = self._clearing(self._exit)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.amp.autocast_mode.autocast.__exit__ = self._exit  # type: ignore[method-assign]
        destroy(self._library)
        self._cast.clear()

    def _install(self, name: str, kernel: Callable[..., Any]) -> None:
        packet, _, overload = name.partition(".")
        try:
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except AttributeError:
            return  # not in this version of torch

        def run(*args: Any, **kwargs: Any) -> Any:
            with without_key(_KEY):
                return kernel(operation, args, kwargs)

        self._library.impl(name, run, "AutocastCUDA", allow_override=True)  # type: ignore[no-untyped-call]

    def _lower(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._with(operation, args, kwargs, torch.get_autocast_dtype("cuda"))

    def _float32(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._with(operation, args, kwargs, torch.float32)

    def _float32_by_dtype(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("dtype") is None and args[0].is_floating_point() and args[0].dtype != torch.float64:
            kwargs = {**kwargs, "dtype": torch.float32}
        return operation(*args, **kwargs)

    def _softmax(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, dimension = args[0], args[1] if len(args) > 1 else kwargs["dim"]
        given = args[2] if len(args) > 2 else kwargs.get("dtype")
        if given is not None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return operation(*args, **kwargs)
        if tensor.dtype == torch.float16:  # CUDA's kernel reads half and writes float: no copy of the input
            fused = SOFTMAX if "log" not in str(operation) else LOG_SOFTMAX
            return fused.default(tensor, dimension, True)
        return operation(self._to(tensor, torch.float32), dimension)

    def _widest(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        floats = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        wide = torch.float32 if torch.float32 in floats else torch.get_autocast_dtype("cuda")
        return self._with(operation, args, kwargs, wide)

    def _with(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        # The C++ kernels cast their last argument first (as compiled), and the order of allocation counts.
        named = {name: self._to(value, dtype) for name, value in reversed(kwargs.items())}
        cast = [self._to(value, dtype) for value in reversed(args)]
        return operation(*reversed(cast), **named)

    def _to(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._to(item, dtype) for item in value)
        if (
            not isinstance(value, torch.Tensor)
            or not value.is_floating_point()
            or value.dtype in (torch.float64, dtype)
            or value.device.type != "cuda"
        ):
            return value
        cached = (
            torch.is_autocast_cache_enabled()
            and value.is_leaf
            and value.requires_grad
            and value.dtype == torch.float32
            and torch.is_grad_enabled()
        )
        if not cached:
            return value.to(dtype)
        # The original is kept with the cast: its id must not be given to another tensor meanwhile.
        key = (id(value), dtype)
        if key not in self._cast:
            self._cast[key] = (value.to(dtype), value)
        return self._cast[key][0]

    def _clearing(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def left(region: Any, *args: Any) -> Any:
            result = leave(region, *args)
            if not torch.is_autocast_enabled("cuda"):  # the outermost region ended: torch drops its casts
                self._cast.clear()
            return result

        return left
