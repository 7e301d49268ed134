"""For code that reads values (`.item()`, masks): small real CPU steps at two sizes, and the line through them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from buoy._compat.torch import tree_flatten
from buoy.estimate.batch import at_size
from buoy.estimate.child import EstimateError, Request
from buoy.estimate.trace import OPTIMIZER, Trace
from buoy.estimate.tracing.build import batch_size, build
from buoy.estimate.tracing.steps import Job, Turn, gradients_and_state, step_in_turn
from buoy.estimate.tracing.tape import Device, Tape, follow_modules

SIZES = (2, 4)
announce: Callable[[str], None] = lambda text: None  # noqa: E731
"""Told before real steps are run; the process that forked this one sets it."""


def trace_small_steps(request: Request, device: Device, reason: Exception) -> Trace:
    """Run real steps with 2 and 4 samples and extrapolate every allocation to the batch asked for."""
    wanted = request.batch or batch_size(build(request).batch)
    if wanted is None:
        raise EstimateError(
            "the step depends on values, and its batch has no size to vary",
            received=type(reason).__name__,
            expected="a batch whose tensors share their first dimension",
        )
    announce(
        f"running real steps on the CPU, with {SIZES[0]} and {SIZES[1]} samples: the step reads values "
        f"({_short(reason)})"
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
    trace.facts["batch"] = wanted
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
                step_in_turn(turn)
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
