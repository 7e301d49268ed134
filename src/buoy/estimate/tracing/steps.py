"""A few training steps on fake `cuda:0` (or fake CPU) tensors, recorded on a tape.

A further training step without running it: once the optimizer has its state, each does what the last one did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from buoy._compat import patched
from buoy._compat.torch import fake_tensors, load_compiler, modes_in_backward, steps_always, tree_map
from buoy.estimate.devices import Device
from buoy.estimate.trace import OPTIMIZER, Event, Trace
from buoy.estimate.tracing.cuda import RESERVE_DOUBT, CudaAutocast, CudaSemantics
from buoy.estimate.tracing.fake import empty_like, fake_device, moved, together
from buoy.estimate.tracing.tape import Tape, follow_modules

load_compiler()


def another_step(trace: Trace) -> Trace | None:
    """The trace with its last step once more; None where that step did not leave behind what it had found.

    What the last step freed of the one before (old gradients, the old batch) the further one frees of the last.
    """
    starts = [
        index
        for index, (kind, mark, _) in enumerate(trace.events)
        if kind == "m" and trace.marks[mark].startswith("step ")
    ]
    if len(starts) < 2:
        return None
    before, last = trace.events[: starts[-1]], trace.events[starts[-1] :]
    sizes = {identity: size for kind, identity, size in trace.events if kind == "a"}
    made = [identity for kind, identity, _ in last if kind == "a"]
    freed = {identity for kind, identity, _ in last if kind == "f"}
    left = [identity for identity in made if identity not in freed]
    fresh = set(made)
    found = [identity for kind, identity, _ in before if kind == "a" and identity in freed - fresh]
    alike = [(sizes[identity], trace.owner.get(identity)) for identity in found]
    if alike != [(sizes[identity], trace.owner.get(identity)) for identity in left]:
        return None
    beyond = max(sizes) + 1
    now = dict(zip(found, left, strict=True))
    now |= {identity: beyond + number for number, identity in enumerate(made)}
    events: list[Event] = [(kind, now[one] if kind != "m" else one, size) for kind, one, size in last]
    events[0] = ("m", len(trace.marks), 0)
    owner = {now[identity]: trace.owner[identity] for identity in made if identity in trace.owner}
    return Trace(
        trace.events + events, trace.labels, trace.owner | owner, [*trace.marks, f"step {len(starts) + 1}"],
        trace.notes, trace.facts,
    )  # fmt: skip


# The optimizer's state is there from the second step on; the third settles the allocator's cache.
STEPS, TAKEN = 3, 2

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(slots=True)
class Turn:
    """One optimizer's part of a step in which several take turns."""

    losses: list[tuple[Loss, bool]]
    """What is differentiated before it steps, in order, and whether the graph is kept for another one."""
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class Job:
    """What one training step needs, as the user's code gave it."""

    model: torch.nn.Module
    batch: Any
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer
    notes: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """Where several optimizers step in turns; `loss` is then the sum of theirs, and `optimizer` the first."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a remedy found out while the step ran; goes into the trace's facts."""
    loss_modules: list[torch.nn.Module] = field(default_factory=list)
    """Modules that the loss brings along: itself where it has weights (of classes, of a head), a teacher."""

    @property
    def whole(self) -> torch.nn.Module:
        """The model, and what the loss brings along."""
        return together(self.model, self.loss_modules)


def trace_steps(
    job: Job,
    device: Device,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    autocast: str | None = None,
    scaler: bool = False,
) -> Trace:
    """Run the steps and return what they did to memory.

    The loop is the common one: a new batch while the old one is still bound, gradients dropped before the forward pass.
    """
    tape = Tape(device)
    where = torch.device("cuda:0" if device.capability else "cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretended_cuda(device))
        semantics = CudaSemantics(device.capability)
        if device.capability:
            stack.enter_context(CudaAutocast())
            stack.enter_context(semantics)
            stack.enter_context(modes_in_backward(semantics))  # activation checkpointing computes again there
        fake = stack.enter_context(fake_device())
        stack.enter_context(tape)
        parameters = stack.enter_context(moved(job.whole, where))
        turns = job.turns or [Turn([(job.loss, False)], stack.enter_context(_optimizer(job, parameters)))]
        for turn in job.turns:
            stack.enter_context(_on_moved(turn.optimizer, parameters))
        stack.callback(follow_modules(job.model, tape))
        scale = torch.amp.GradScaler(device.type, enabled=scaler)
        batch = loss = None

        def take(step: int) -> None:
            nonlocal batch, loss
            tape.phase = "batch"
            tape.mark(f"step {step + 1}")
            batch = tree_map(lambda leaf: on(leaf, where), job.batch)
            for turn in turns:
                if turn.losses:
                    turn.optimizer.zero_grad()
                for loss_of, kept in turn.losses * accumulate:
                    tape.phase = "forward"
                    with _autocast(device, autocast):
                        loss = loss_of(job.model, batch)
                    tape.mark("backward")
                    tape.phase = "backward"
                    scale.scale(loss).backward(retain_graph=kept)  # type: ignore[no-untyped-call]
                tape.mark(OPTIMIZER)
                tape.phase = "optimizer"
                fake.answers_reads = True
                if len(turns) == 1:
                    scale.step(turn.optimizer)
                    scale.update()
                else:
                    turn.optimizer.step()  # a scaler refuses one whose gradients came with another's
                fake.answers_reads = False
                gradients_and_state(tape, job.whole, turn.optimizer)

        taken = min(steps, TAKEN)
        for step in range(taken):
            take(step)
        trace = tape.trace()
        for step in range(taken, steps):
            further = another_step(trace)
            if further is None:
                take(step)
                taken, further = step + 1, tape.trace()
            trace = further
        tape.phase = "other"
        del batch, loss
    trace.notes = list(job.notes)
    trace.facts |= {
        "attention": semantics.attention,
        "recurrent_doubt": round(RESERVE_DOUBT * semantics.reserve / (taken * accumulate)),
        "parameters": _parameters(job.whole),
        "optimizer": ", ".join(dict.fromkeys(type(turn.optimizer).__name__ for turn in turns)),
        **job.facts,
    }
    return trace


def on(leaf: Any, device: torch.device) -> Any:
    """A leaf of a batch as a fake one on the device; what is no tensor stays."""
    return empty_like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def pretended_cuda(device: Device) -> Iterator[None]:
    """Make the parts of `torch.cuda` that users' code asks answer as the device would."""
    present, capability, memory = bool(device.capability), device.capability, device.memory or 0
    answers: dict[str, Any] = {
        "is_available": lambda: present,
        "device_count": lambda: int(present),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *args, **kwargs: present,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "mem_get_info": lambda device=None: (memory, memory),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patched(torch.cuda, name, answer))
        # Whether a step is skipped for an infinity depends on values; the step that is taken needs the memory.
        stack.enter_context(steps_always(fake_tensors().FakeTensor))
        yield


def _autocast(device: Device, dtype: str | None) -> Any:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])


@contextlib.contextmanager
def _optimizer(job: Job, parameters: dict[int, torch.nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    """The optimizer of the moved parameters; one that was given gets its own back."""
    if not isinstance(job.optimizer, torch.optim.Optimizer):
        yield job.optimizer([p for p in job.whole.parameters() if p.requires_grad])
        return
    with _on_moved(job.optimizer, parameters):
        yield job.optimizer


@contextlib.contextmanager
def _on_moved(optimizer: torch.optim.Optimizer, parameters: dict[int, torch.nn.Parameter]) -> Iterator[None]:
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [parameters.get(id(parameter), parameter) for parameter in group["params"]]
    try:
        yield
    finally:
        optimizer.state.clear()
        for group, own in zip(groups, before, strict=True):
            group["params"] = own


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def gradients_and_state(tape: Tape, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Tell the tape which of its allocations are gradients and which belong to the optimizer."""
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    tape.gradients |= _identities(tape, [parameter.grad for parameter in model.parameters()])
    tape.optimizer |= _identities(tape, state)


def _identities(tape: Tape, values: list[Any]) -> set[int]:
    found = {tape.identity(value) for value in values if isinstance(value, torch.Tensor)}
    return {identity for identity in found if identity is not None}
