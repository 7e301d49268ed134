"""Micro-batches give the full batch's gradient, or buoy refuses: never a third thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from buoy.microbatch.errors import CannotSplit
from buoy.torch.transaction import Transaction
from tests.recovery.zoo import ZOO, N, Pair

DTYPES = {"double": torch.float64, "single": torch.float32}


def gradient(pair: Pair, batch: Any, micro_batch: int | None) -> torch.Tensor:
    """Without dropout and noise: those are random by design, and drawn in another order by parts."""
    for part in pair.model.modules():
        if "Dropout" in type(part).__name__ or type(part).__name__ == "Noise":
            part.eval()
        for name in ("dropout", "dropout1", "dropout2"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    transaction = Transaction(say=lambda text: None, event=lambda *a, **k: None, micro_batch=micro_batch)
    transaction.track([pair.model], [])
    pair.model.zero_grad()
    transaction.backward(batch, pair.loss, reduction=pair.reduction)
    return torch.cat([p.grad.flatten() for p in pair.model.parameters() if p.grad is not None]).double()


def build(name: str, dtype: torch.dtype) -> Pair:
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return ZOO[name]()
    finally:
        torch.set_default_dtype(before)


def reordered(batch: Any) -> Any:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    return tuple(part[order] for part in batch) if isinstance(batch, tuple) else batch[order]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ZOO)
def test_parts_give_the_gradient_of_the_whole_or_are_refused(name: str, precision: str) -> None:
    """In parts of 5, 4 and 3 of 12; in single precision against what two orders of the same samples differ by."""
    pair = build(name, DTYPES[precision])
    try:
        whole = gradient(pair, pair.batch, None)
        parts = [gradient(pair, pair.batch, size) for size in (5, 3, 1)]
    except CannotSplit as refusal:
        assert not pair.exact, f"refused without need: {refusal}"
        assert refusal.hint
        return

    assert pair.exact, "a batch was cut although its samples depend on each other"
    worst = max(float((part - whole).norm() / whole.norm()) for part in parts)
    if precision == "double":
        assert worst <= 1e-12
    else:
        rounding = max(
            float((gradient(pair, reordered(pair.batch), None) - whole).norm() / whole.norm()), 2**-23
        )
        assert worst <= 4 * rounding
