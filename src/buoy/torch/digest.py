"""A gradient or buffer in few numbers, of which none was left out."""

from __future__ import annotations

import torch

_KEPT = 1 << 14  # numbers, at most about two times as many


def some(values: torch.Tensor | None) -> torch.Tensor:
    """A copy; of a large tensor sums of neighbours, each with a factor of its own; empty without one.

    Every number counts: in the gradient of a large embedding a few rows are all that is not zero.

    >>> rows = torch.zeros(100_000, 8)
    >>> rows[777, 3] = 1.0
    >>> bool(some(rows).any())
    True
    """
    if values is None:
        return torch.empty(0)
    values = values.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
    width = -(-flat.numel() // _KEPT)
    if width <= 1:
        return flat.clone()
    if not flat.is_floating_point():
        return flat[::width].clone()
    factors = torch.rand(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    factors[::2] *= -1  # gradients often add up to zero
    flat = flat.float() if flat.dtype == torch.float16 else flat  # whose largest number is small
    factors = factors.to(flat)
    rows = flat.numel() // width
    rest = flat[rows * width :]
    sums = flat[: rows * width].view(rows, width) @ factors
    return torch.cat([sums, rest * factors[: len(rest)]])
