"""Traces one training step of PyTorch and counts its operations; in a child process.

On fake tensors; code that reads values (`.item()`, masks) in small real steps on the CPU at two sizes, and the line
through them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from buoy._compat.torch import parameters_of, tree_flatten, tree_map
from buoy.estimate.batch import at_size
from buoy.estimate.child import EstimateError, Request
from buoy.estimate.devices import Device, by_id
from buoy.estimate.trace import OPTIMIZER, Trace
from buoy.estimate.tracing.build import batch_size, build, shapes
from buoy.estimate.tracing.fake import ordinary_values
from buoy.estimate.tracing.steps import Job, Turn, gradients_and_state, trace_steps
from buoy.estimate.tracing.tape import Tape, follow_modules

# The classes torch raises, by name: their homes move between versions.
DEPENDS_ON_DATA = {
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "DataDependentErrorKind",
}  # fmt: skip
# How torch refuses to read a fake or meta tensor: `.numpy()`, `.tolist()` and what libraries do with its address.
READS_BYTES = (
    "Cannot copy out of meta tensor", "item() cannot be called on meta", "Cannot access data pointer of Tensor",
    ".numpy() is not supported for tensor subclass", ".tolist() is not supported for tensor subclass",
)  # fmt: skip
# What torch's fake kernels refuse though the real ones take it: grouped matrix products of experts in float32.
STRICTER = ("Expected inputs of BF16 type",)
SIZES = (2, 4)
# The backward pass multiplies by the weights and by the inputs: twice the forward's work.
_STEP = 3


def trace_request(request: Request, announce: Callable[[str], None] = lambda text: None) -> Trace:
    """Trace on fake tensors; where the code reads values, in small real steps on the CPU, which is announced before."""
    torch.set_num_threads(1)
    device = by_id(request.device)
    job = None
    try:
        job = build(request)
        with ordinary_values():
            trace = trace_steps(
                job,
                device,
                accumulate=request.accumulate,
                autocast=request.autocast,
                scaler=request.autocast == "fp16",
            )
    except Exception as error:
        if not _depends_on_data(error):
            _name_the_shapes(error, job)
            raise
        announce(
            f"running real steps on the CPU, with {SIZES[0]} and {SIZES[1]} samples: the step reads values "
            f"({_short(error)})"
        )
        return _small_steps(request, device, error)
    if request.autocast == "bf16" and 0 < device.capability < 80:
        trace.notes.append(
            f"{device.name} has no bfloat16 units: no attention kernel there takes it without keeping all scores, and "
            "the copies of the weights come on top; `--autocast fp16` is what this card is made for"
        )
    trace.facts |= {"engine": "fake", "batch": batch_size(job.batch), "torch": torch.__version__}
    return trace


def _small_steps(request: Request, device: Device, reason: Exception) -> Trace:
    """Run real steps with 2 and 4 samples and extrapolate every allocation to the batch asked for."""
    wanted = request.batch or batch_size(build(request).batch)
    if wanted is None:
        raise EstimateError(
            "the step depends on values, and its batch has no size to vary",
            received=type(reason).__name__,
            expected="a batch whose tensors share their first dimension",
        )
    small = [_steps(build(replace(request, batch=size), lazily=False), device, request) for size in SIZES]
    trace = at_size(small[0], SIZES[0], small[1], SIZES[1], wanted)
    trace.notes = [
        *trace.notes,
        f"the step depends on values ({_short(reason)}): extrapolated from real CPU steps with "
        f"{SIZES[0]} and {SIZES[1]} samples",
    ]
    if request.autocast is not None:
        trace.notes.append(
            "mixed precision as a CPU has it: which operations stay in float32 differs on a GPU"
        )
    trace.facts |= {"batch": wanted, "engine": "real"}
    return trace


def _steps(job: Job, device: Device, request: Request) -> Trace:
    tape = Tape(device, where="cpu")
    optimizer = job.optimizer
    with contextlib.ExitStack() as stack:
        stack.enter_context(tape)
        tape.see([*job.whole.parameters(), *job.whole.buffers()], "weights")
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer([p for p in job.whole.parameters() if p.requires_grad])
        turns = job.turns or [Turn([(job.loss, False)], optimizer)]
        stack.callback(follow_modules(job.model, tape))
        for step in range(2):
            tape.phase = "batch"
            tape.mark(f"step {step + 1}")
            tape.see([leaf for leaf in tree_flatten(job.batch)[0] if isinstance(leaf, torch.Tensor)], "batch")
            for turn in turns:
                if turn.losses:
                    turn.optimizer.zero_grad()
                for loss_of, kept in turn.losses * request.accumulate:
                    tape.phase = "forward"
                    with _autocast(request):
                        loss = loss_of(job.model, job.batch)
                    tape.mark("backward")
                    tape.phase = "backward"
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        loss.backward(retain_graph=kept)  # type: ignore[no-untyped-call]
                tape.mark(OPTIMIZER)
                tape.phase = "optimizer"
                _give_gradients(turn.optimizer, job.model)
                turn.optimizer.step()
                gradients_and_state(tape, job.whole, turn.optimizer)
    trace = tape.trace()
    trace.notes = list(job.notes)
    trace.facts |= {
        "parameters": sum(parameter.numel() for parameter in job.whole.parameters()),
        "optimizer": ", ".join(dict.fromkeys(type(turn.optimizer).__name__ for turn in turns)),
        **job.facts,
    }
    return trace


def _autocast(request: Request) -> torch.autocast:
    """Half precision as a CPU has it, where the request asks for it: numbers of two bytes either way."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=request.autocast is not None)


def _give_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """So few samples may leave weights unused (experts that no token was sent to) which a whole batch uses.

    Only the model's: a teacher that the loss brings along gets none from any batch.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in own and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def _depends_on_data(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ in DEPENDS_ON_DATA or "data-dependent" in str(error).lower():
            return True
        if any(words in str(error) for words in (*READS_BYTES, *STRICTER)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _name_the_shapes(error: BaseException, job: Any) -> None:
    if job is not None and isinstance(error, (RuntimeError, TypeError, ValueError, IndexError)):
        error.add_note(f"the batch is {shapes(job.batch)}")


def count_operations(request: Request) -> dict[str, float]:
    """What the step is made of, besides its memory.

    `{"step": operations of forward and backward, "half": 1.0 when weights are half precision, "linear": bytes of the
    linear layers' weights, which is what weight-only quantization makes smaller, "tied": bytes of those that another
    module uses too, of which quantization makes a copy}`
    """
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
        id(own) for part in model.modules() for own in parameters_of(part).values() if own is not None
    )
    tied = {id(weight): weight for weight in linear if uses[id(weight)] > 1}
    return {
        "step": float(_STEP * counter.get_total_flops() * request.accumulate),
        "half": float(half),
        "linear": float(sum(weight.nbytes for weight in linear if id(weight) not in tied)),
        "tied": float(sum(weight.nbytes for weight in tied.values())),
    }
