"""The floating-point operations of a training step, counted on meta tensors; runs in a tracing child."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

# The backward pass multiplies by the weights and by the inputs: twice the forward's work.
_STEP = 3


def of(request: Any) -> dict[str, float]:
    """What the step is made of, beside its memory.

    `{"step": operations of forward and backward, "half": 1.0 when weights are half precision, "linear": bytes of the
    linear layers' weights, which is what weight-only quantization makes smaller, "tied": bytes of those that another
    module uses too, of which quantization makes a copy}`
    """
    from buoy.estimate.trace_build import build
    from buoy.estimate.trace_values import ordinary_values

    job = build(request)
    job.whole.to("meta")
    model = job.model
    batch = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, job.batch)
    counter = FlopCounterMode(display=False)
    with ordinary_values(), counter:
        job.loss(model, batch)
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    linear = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    uses = Counter(
        id(own) for part in model.modules() for own in part._parameters.values() if own is not None
    )
    tied = {id(weight): weight for weight in linear if uses[id(weight)] > 1}
    return {
        "step": float(_STEP * counter.get_total_flops() * request.accumulate),
        "half": float(half),
        "linear": float(sum(weight.nbytes for weight in linear if id(weight) not in tied)),
        "tied": float(sum(weight.nbytes for weight in tied.values())),
    }
