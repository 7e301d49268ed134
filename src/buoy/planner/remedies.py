"""What makes it fit: each remedy tried on this very step, the cheapest combination, and the advice that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from buoy.errors import BuoyError
from buoy.estimate.request import Request
from buoy.estimate.result import Estimate, Interval, estimate
from buoy.planner import speed
from buoy.planner.model import FITS, UNKNOWN, Answer, Remedy
from buoy.planner.session import held
from buoy.planner.workshop import Workshop

_MOST_COMBINED = 4
# Less than this share of the peak is no remedy for it.
_NOTHING = 0.01


@dataclass(frozen=True, slots=True)
class Change:
    """One remedy as it is tried: what the tracer changes, and what a person writes."""

    id: str
    title: str
    exact: bool
    time: tuple[float, float] | None
    time_basis: str
    code: str
    note: str = ""
    request: dict[str, object] | None = None
    """Fields of the request."""
    inside: str | None = None
    """A change inside the child, by its name in `buoy.torch.remedies`."""
    allocator: str | None = None


def find_remedies(
    workshop: Workshop, request: Request, answer: Answer, capacity: int | None, say: Callable[[str], None]
) -> tuple[tuple[Remedy, ...], Remedy | None]:
    """Every remedy's effect on this place, largest saving first, and the cheapest way to fit."""
    bench = _Bench(workshop, request, answer, capacity)
    changes = _changes(request, answer)
    tried: list[tuple[Change, Remedy]] = []
    for change in changes:
        say(f"trying {change.title}")
        remedy = bench.tried((change,))
        if remedy is not None:
            tried.append((change, remedy))
    now = answer.estimate.total
    helping = [(change, remedy) for change, remedy in tried if (remedy.saving(now) or 0) > _NOTHING]
    cheapest = None
    if answer.memory_verdict != FITS:
        say("seeking the cheapest combination")
        cheapest = bench.cheapest(helping)
    found = [remedy for _, remedy in tried] + _predicted(answer) + _popular(answer, request)
    found.sort(key=lambda remedy: -(remedy.saving(now) or 0))
    return tuple(found), cheapest


class _Bench:
    """Tries changes on one step and one place."""

    def __init__(self, workshop: Workshop, request: Request, answer: Answer, capacity: int | None) -> None:
        self._workshop = workshop
        self._request = request
        self._answer = answer
        self._capacity = capacity

    def tried(self, changes: tuple[Change, ...]) -> Remedy | None:
        """The changes together; None where they cannot be applied to this model."""
        figure = self._figure(changes)
        if figure is None:
            return None
        traced = any(change.request or change.inside for change in changes)
        return Remedy(
            id="+".join(change.id for change in changes),
            title=", ".join(change.title for change in changes),
            exact=all(change.exact for change in changes),
            basis="traced" if traced else "replayed",
            peak=figure.total,
            verdict=figure.verdict(self._capacity),
            time=_product([change.time for change in changes]),
            time_basis="; ".join(dict.fromkeys(change.time_basis for change in changes)),
            code="\n".join(change.code for change in changes),
            note="; ".join(change.note for change in changes if change.note),
        )

    def cheapest(self, helping: list[tuple[Change, Remedy]]) -> Remedy | None:
        """The one that fits at the least cost; else the best of each kind together until they do."""
        alone = [remedy for _, remedy in helping if remedy.verdict == FITS]
        if alone:
            return min(alone, key=_cost)
        now = self._answer.estimate.total
        for exactly in (True, False):
            usable = [pair for pair in helping if pair[0].exact or not exactly]
            usable.sort(key=lambda pair: -(pair[1].saving(now) or 0))
            chosen: tuple[Change, ...] = ()
            for change, _ in usable:
                if any(_exclude(change, other) for other in chosen):
                    continue
                chosen = (*chosen, change)
                if len(chosen) > _MOST_COMBINED:
                    break
                together = self.tried(chosen) if len(chosen) > 1 else None
                if together is not None and together.verdict == FITS:
                    return together
        return None

    def _figure(self, changes: tuple[Change, ...]) -> Estimate | None:
        request = self._request
        inside: list[str] = []
        allocator = None
        for change in changes:
            request = replace(request, **(change.request or {}))  # type: ignore[arg-type]
            inside += [change.inside] if change.inside else []
            allocator = change.allocator or allocator
        try:
            trace = self._workshop.trace(request, tuple(inside))
        except BuoyError:
            return None  # not for this model: no blocks to checkpoint, no such layer
        return estimate(trace, self._answer.target.device, allocator=allocator)


def _changes(request: Request, answer: Answer) -> list[Change]:
    device, batch = answer.target.device, answer.estimate.trace.facts.get("batch")
    torch = request.framework == "torch"
    norm = _has_batch_norm(answer.estimate)
    found: list[Change] = []
    if answer.micro_batch and batch and answer.micro_batch < batch:
        size = answer.micro_batch
        found.append(
            Change("micro-batch", f"micro-batches of {size}", not norm, (1.0, 1.2),
                   "the same operations in more, smaller pieces",
                   f"run = buoy.Run(\"runs/this\", micro_batch={size})   # and run.backward(batch, loss_of)" if torch
                   else f"buoy.keras.Guard(\"runs/this\", micro_batch={size})",
                   "BatchNorm sees the smaller pieces: not the same training" if norm else "",
                   {"batch": size, "accumulate": 2} if torch else {"batch": size})
        )  # fmt: skip
    if not request.autocast:
        dtype = "bf16" if device.capability >= 80 or not device.capability else "fp16"
        time, basis = speed.half_precision(device)
        word = "bfloat16" if dtype == "bf16" else "float16"
        code = f'with torch.autocast("{"cuda" if device.capability else "cpu"}", dtype=torch.{word}):'
        code += "   # around forward and loss" + ("; and a torch.amp.GradScaler" if dtype == "fp16" else "")
        if not torch:
            code = f'keras.mixed_precision.set_global_policy("mixed_{word}")   # before the model is built'
        found.append(Change("mixed-precision", f"mixed precision ({word})", False, time, basis, code,
                            "weights and optimizer stay float32", {"autocast": dtype}))  # fmt: skip
    if not torch:
        return found
    if not request.checkpointing:
        found.append(Change(
            "checkpointing", "activation checkpointing", not norm, (1.1, 1.35),
            "the forward pass runs twice: at most a third more operations",
            "model.gradient_checkpointing_enable()   # transformers; else torch.utils.checkpoint around each block",
            "BatchNorm updates its running statistics twice a step" if norm else "", {"checkpointing": True},
        ))  # fmt: skip
    found += [
        Change("chunked-loss", "chunked cross-entropy", True, (0.8, 1.2), "0.8 to 1.2 of the time measured on a CPU",
               "# logits for 1024 tokens at a time under torch.utils.checkpoint: see docs/plan.md",
               inside="chunked_loss"),
        Change("in-backward", "the optimizer's step inside backward", True, (0.9, 1.1), "0.9 to 1.1 measured on a CPU",
               "# p.register_post_accumulate_grad_hook: one optimizer per parameter, see docs/plan.md",
               "not together with accumulation or gradient clipping", inside="in_backward"),
        Change("offload", "activations kept in host RAM", True, (1.2, 3.0), "each activation crosses the bus twice",
               "with torch.autograd.graph.save_on_cpu(pin_memory=True):   # around the forward pass",
               "moves the need to host RAM", inside="offload"),
        Change("lora", "LoRA, rank 8", False, (0.6, 1.0), "0.4 to 0.7 measured on a CPU; frozen weights need no gradients",
               "model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=\"all-linear\"))",
               "trains small matrices beside the frozen weights", inside="lora"),
        Change("smaller-input", "inputs of half the length or side", False, None, "fewer operations",
               "# crop or resize the samples, or cut the sequences", "another training", inside="smaller_input"),
    ]  # fmt: skip
    for name, why in (("Adafactor", "factored second moments"), ("SGD", "one moment instead of two")):
        if name != answer.estimate.trace.facts.get("optimizer"):
            found.append(Change(f"optimizer-{name.lower()}", f"{name} instead of the optimizer", False, (0.8, 1.2),
                                "the optimizer is a small part of the time",
                                f"optimizer = torch.optim.{name}(model.parameters(), lr=...)   # needs its own rate",
                                why, {"optimizer": name}))  # fmt: skip
    if device.capability:
        found.append(Change("expandable-segments", "expandable segments", True, (1.0, 1.05), "no slower in torchtune's report",
                            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # set before torch is imported",
                            "less memory lost between blocks", allocator="expandable"))  # fmt: skip
    return found


def _predicted(answer: Answer) -> list[Remedy]:
    """Remedies that need a library which may not be here: from the parts of the peak, and said so."""
    trace, now = answer.estimate.trace, answer.estimate.total
    state = held(trace, "optimizer")
    if trace.facts.get("optimizer") not in ("Adam", "AdamW") or not state:
        return []
    # Two moments of one byte each and a float per 256 of them, instead of four bytes each.
    less = round(state * (1 - (1 + 4 / 256) / 4))
    least = round(state * 0.6)
    peak = Interval(now.low - less, now.likely - less, now.high - least)
    return [
        Remedy("optimizer-8bit", "8-bit AdamW (torchao)", False, "predicted", peak, UNKNOWN, (0.9, 1.4),
               "1.3 times measured on a CPU", "optimizer = torchao.optim.AdamW8bit(model.parameters())",
               "from the size of the optimizer's state; not traced")
    ]  # fmt: skip


def _popular(answer: Answer, request: Request) -> list[Remedy]:
    """Advice that people find and that takes nothing from this peak, with the reason."""
    now = answer.estimate.total
    weights = held(answer.estimate.trace, "weights")

    def says(
        name: str, title: str, note: str, more: int = 0, time: tuple[float, float] | None = None
    ) -> Remedy:
        peak = Interval(now.low + more, now.likely + more, now.high + more)
        return Remedy(name, title, None, "known", peak, answer.memory_verdict, time, "", "", note)

    found = [
        says("pruning", "pruning", "masks make weights zero, not fewer: a mask as large as the weights is added while "
             "training; inference shrinks only when whole channels are cut out", weights),
        says("quantization", "quantization after training", "weights of one byte help inference "
             f"(a quarter of the weights' memory); training keeps them in full"),
        says("gc", "gc.collect() in the loop", "tensors go when their last name goes; costs 24 % of the time measured",
             time=(1.1, 1.3)),
    ]  # fmt: skip
    if request.framework == "torch":
        found.append(says("empty-cache", "torch.cuda.empty_cache() in the loop", "gives unused blocks back to the driver and "
                          "asks for them again: no more memory for the step", time=(1.05, 1.5)))  # fmt: skip
        found.append(says("channels-last", "channels_last", "the same bytes in another order: speed, not memory",
                          time=(0.7, 1.1)))  # fmt: skip
    else:
        found.append(says("memory-growth", "set_memory_growth", "takes memory later, not less of it"))
    return found


def _has_batch_norm(figure: Estimate) -> bool:
    return any(
        "batch_norm" in operation or "BatchNorm" in operation for _, _, operation in figure.trace.labels
    )


def _exclude(one: Change, other: Change) -> bool:
    """Whether two changes cannot be had together: two optimizers, or accumulation with a step inside backward."""
    kinds = {one.id.split("-")[0], other.id.split("-")[0]}
    if kinds == {"optimizer"} or {"micro-batch", "in-backward"} == {one.id, other.id}:
        return True
    return {one.id, other.id} == {"checkpointing", "offload"}


def _product(times: list[tuple[float, float] | None]) -> tuple[float, float] | None:
    low = high = 1.0
    for time in times:
        if time is None:
            return None
        low, high = low * time[0], high * time[1]
    return low, high


def _cost(remedy: Remedy) -> tuple[int, float]:
    """Exact ones first, then the less time the better."""
    return (0 if remedy.exact else 1, sum(remedy.time) if remedy.time else 2.5)
