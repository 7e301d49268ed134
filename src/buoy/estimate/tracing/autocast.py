"""CUDA's autocast for fake tensors: its lists of operations and its cache of cast weights, as Python kernels.

C++'s own kernels ask each tensor whether it is on CUDA; ours are told `meta` and would be left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from buoy._compat.torch import (
    AUTOCAST_LOWER,
    LOG_SOFTMAX,
    SOFTMAX,
    autocast_key,
    destroy,
    without_key,
)

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
        # The original is kept beside the cast: its id must not be given to another tensor meanwhile.
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
