"""What people can change to need less memory, and what they are told to change in vain; the words and the code."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from buoy.estimate.request import Request
from buoy.estimate.result import Estimate, Interval
from buoy.planner import speed
from buoy.planner.model import UNKNOWN, Answer, Remedy
from buoy.planner.session import held
from buoy.units import format_bytes


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
    """A change inside the child, by its name in `buoy.estimate.trace_remedies`."""
    allocator: str | None = None


_OTHER_OPTIMIZERS = (
    ("SGD", "SGD with momentum", ", momentum=0.9", "one moment"),
    ("Adafactor", "Adafactor", "", "moments of rows and columns only"),
)


def changes_for(request: Request, answer: Answer) -> list[Change]:
    """The changes worth trying on this step and this place."""
    device, batch = answer.target.device, answer.estimate.trace.facts.get("batch")
    torch = request.framework == "torch"
    norm = _has_batch_norm(answer.estimate)
    found: list[Change] = []
    if answer.micro_batch and batch and answer.micro_batch < batch:
        size = answer.micro_batch
        found.append(
            Change("micro-batch", f"micro-batches of {size}", not norm, (0.85, 1.35),
                   "0.85 to 1.34 measured on a CPU",
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
        return found + _keras_changes(request, answer)
    if not request.checkpointing:
        found.append(Change(
            "checkpointing", "activation checkpointing", not norm, (1.0, 1.35),
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
        Change("lora", "LoRA, rank 8, for pretrained weights", False, (0.4, 0.8), "0.37 to 0.70 measured on a CPU",
               "model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=\"all-linear\"))",
               "no way to train a model from scratch" + _missing("peft"), inside="lora"),
        Change("smaller-model", "the next smaller model of its family", False, None, "fewer operations",
               "# build that one instead, and load its own weights", "another model", inside="smaller_model"),
        Change("pruning", "pruning (torch.nn.utils.prune)", False, None, "not measured",
               "prune.l1_unstructured(layer, \"weight\", amount=0.5)   # for each layer",
               "masks make weights zero, not fewer: each mask is as large as its weights, and each product is kept for "
               "backward; for inference the zeros take as much as before, until whole channels are cut out",
               inside="pruned"),
        Change("smaller-input", "inputs of half the length or side", False, None, "fewer operations",
               "# crop or resize the samples, or cut the sequences", "another training", inside="smaller_input"),
    ]  # fmt: skip
    if device.capability:
        found.append(Change("offload", "activations kept in host RAM", True, None,
                            "each activation crosses the bus twice",
                            "with torch.autograd.graph.save_on_cpu(pin_memory=True):   # around the forward pass",
                            inside="offload"))  # fmt: skip
    for name, title, options, note in _OTHER_OPTIMIZERS:
        if answer.estimate.trace.facts.get("optimizer") != name:
            code = f"optimizer = torch.optim.{name}(model.parameters(), lr=...{options})   # another rate"
            found.append(Change(f"optimizer-{name.lower()}", f"{title} instead of the optimizer", False, None,
                                "not measured", code, note, {"optimizer": name}))  # fmt: skip
    if device.capability:
        found.append(Change("expandable-segments", "expandable segments", True, (1.0, 1.05),
                            "no slower in torchtune's report",
                            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # set before torch is imported",
                            "less memory lost between blocks", allocator="expandable"))  # fmt: skip
    return found


def predicted(answer: Answer, request: Request) -> list[Remedy]:
    """Remedies that need a library which may not be here: from the parts of the peak, and said so."""
    trace, now = answer.estimate.trace, answer.peak
    state = held(trace, "optimizer")
    if request.framework != "torch" or trace.facts.get("optimizer") not in ("Adam", "AdamW") or not state:
        return []
    # Two moments of one byte each and a float per 256 of them, instead of four bytes each.
    less = round(state * (1 - (1 + 4 / 256) / 4))
    least = round(state * 0.6)
    peak = Interval(now.low - less, now.likely - less, now.high - least)
    return [
        Remedy("optimizer-8bit", "8-bit AdamW (torchao)", False, "predicted", peak, UNKNOWN, (0.9, 1.4),
               "1.3 times measured on a CPU", "optimizer = torchao.optim.AdamW8bit(model.parameters())",
               "from the size of the optimizer's state; not traced" + _missing("torchao")),
    ]  # fmt: skip


def popular(answer: Answer, request: Request, counted: dict[str, float]) -> list[Remedy]:
    """Advice that people find and that takes nothing from this peak, with the reason.

    `counted` are the bytes of `linear` layers' weights, and of those of them that are `tied`, where they are known.
    """
    now = answer.peak
    weights = held(answer.estimate.trace, "weights")

    def says(
        name: str, title: str, note: str, more: int = 0, time: tuple[float, float] | None = None
    ) -> Remedy:
        peak = Interval(now.low + more, now.likely + more, now.high + more)
        return Remedy(name, title, None, "known", peak, answer.memory_verdict, time, "", "", note)

    torch = request.framework == "torch"
    tool = "torchao's int8" if torch else 'model.quantize("int8")'
    small = counted.get("linear", weights) if torch else weights
    tied = counted.get("tied", 0.0)
    but = (
        f" (the tied output layer left out with `filter_fn`: quantized, it would be a copy of {format_bytes(tied / 4)})"
        if tied
        else ""
    )
    becomes = f"{format_bytes(weights)} of weights become "
    if torch and not small:
        becomes = f"{format_bytes(weights)} of weights stay, as only linear layers shrink"
    then = (
        ""
        if torch and not small
        else format_bytes(weights - small * 3 / 4)
        if torch
        else f"at best {format_bytes(weights / 4)}"
    )
    found = [
        says("quantization", f"quantization after training ({tool})", "training keeps the weights in full: the same "
             f"peak; for inference {becomes}{then}{but}"
             + (_missing("torchao") if torch else "")),
        says("gc", "gc.collect() in the loop", "tensors go when their last name goes; costs 24 % of the time measured",
             time=(1.1, 1.3)),
    ]  # fmt: skip
    if torch:
        found.append(says("empty-cache", "torch.cuda.empty_cache() in the loop", "gives unused blocks back to the "
                          "driver and asks for them again: no more memory for the step", time=(1.05, 1.5)))  # fmt: skip
        found.append(
            says("channels-last", "channels_last", "the same bytes in another order: speed, not memory")
        )
    else:
        found.append(says("memory-growth", "set_memory_growth", "takes memory later, not less of it"))
        found.append(says("pruning", "pruning", "masks make weights zero, not fewer: a mask as large as the weights is "
                          "added; inference shrinks only when whole channels are cut out", weights))  # fmt: skip
    return found


def _keras_changes(request: Request, answer: Answer) -> list[Change]:
    found = [
        Change("smaller-model", "the next smaller model of its family", False, None, "fewer operations",
               "# keras.applications: build that one instead, with its own weights", "another model",
               {"source": {**request.source, "smaller": "model"}}),
        Change("smaller-input", "inputs of half the length or side", False, None, "fewer operations",
               "# crop or resize the samples, or cut the sequences", "another training",
               {"source": {**request.source, "smaller": "input"}}),
    ]  # fmt: skip
    if "script" in request.source:
        return found  # its optimizer is its own
    for name, note in (("SGD", "no moments"), ("Adafactor", "moments of rows and columns only")):
        if answer.estimate.trace.facts.get("optimizer") != name:
            found.append(
                Change(f"optimizer-{name.lower()}", f"{name} instead of the optimizer", False, None, "not measured",
                       f"optimizer = keras.optimizers.{name}(learning_rate=...)   # another rate", note,
                       {"optimizer": name})
            )  # fmt: skip
    return found


def _missing(library: str) -> str:
    """Said where the code needs a library that is not here."""
    return "" if find_spec(library) else f"; {library} is not installed here: pip install {library}"


def _has_batch_norm(figure: Estimate) -> bool:
    """By the operations' names in PyTorch, by the layers' in Keras."""
    return any(
        "batchnorm" in f"{operation} {module}".lower().replace("_", "")
        for _, module, operation in figure.trace.labels
    )
