"""What people can change to need less memory, and what they are told to change in vain; the words and the code."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from buoy.estimate.child import Request
from buoy.estimate.result import Estimate, Interval
from buoy.planner import speed
from buoy.planner.result import Answer, Remedy
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
    """A change inside the child, by its name in `buoy.estimate.tracing.remedies`."""
    allocator: str | None = None


_OTHER_OPTIMIZERS = (
    ("SGD", "SGD with momentum", 0.1, ", momentum=0.9", "one moment"),
    ("Adafactor", "Adafactor", 0.01, "", "moments of rows and columns only"),
)


_QUANTIZE = """from torchao.quantization import Int8WeightOnlyConfig, quantize_
quantize_(model, Int8WeightOnlyConfig())   # after training"""


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
                   _in_pieces(size, torch),
                   "BatchNorm sees the smaller pieces: not the same training" if norm else "",
                   {"batch": size, "accumulate": 2} if torch else {"batch": size})
        )  # fmt: skip
    if not request.autocast:
        dtype = "bf16" if device.capability >= 80 or not device.capability else "fp16"
        time, basis = speed.half_precision(device)
        word = "bfloat16" if dtype == "bf16" else "float16"
        code = _in_half_precision("cuda" if device.capability else "cpu", word)
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
            "",
            "BatchNorm updates its running statistics twice a step" if norm else "", {"checkpointing": True},
        ))  # fmt: skip
    found += [
        Change("chunked-loss", "chunked cross-entropy", True, (0.8, 1.2), "0.8 to 1.2 of the time measured on a CPU",
               "",
               inside="chunked_loss"),
        Change("in-backward", "the optimizer's step inside backward", True, (0.9, 1.1), "0.9 to 1.1 measured on a CPU",
               "",
               "not together with accumulation or gradient clipping", inside="in_backward"),
        Change("lora", "LoRA, rank 8, for pretrained weights", False, (0.4, 0.8), "0.37 to 0.70 measured on a CPU",
               "import peft\nmodel = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=\"all-linear\"))"
               "   # before the optimizer is made",
               "no way to train a model from scratch" + _missing("peft"), inside="lora"),
        Change("smaller-model", "the next smaller model of its family", False, None, "fewer operations",
               "", "another model", inside="smaller_model"),
        Change("pruning", "pruning (torch.nn.utils.prune)", False, None, "not measured",
               "from torch.nn.utils import prune\nfor layer in list(model.modules()):\n"
               "    if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):\n"
               "        prune.l1_unstructured(layer, \"weight\", amount=0.5)",
               "masks make weights zero, not fewer: each mask is as large as its weights, and each product is kept for "
               "backward; for inference the zeros take as much as before, until whole channels are cut out",
               inside="pruned"),
        Change("smaller-input", "inputs of half the length or side", False, None, "fewer operations",
               "# crop or resize the samples, or cut the sequences", "another training", inside="smaller_input"),
    ]  # fmt: skip
    if device.capability:
        found.append(Change("offload", "activations kept in host RAM", True, None,
                            "each activation crosses the bus twice",
                            "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    loss = loss_of(batch)",
                            inside="offload"))  # fmt: skip
    for name, title, rate, options, note in _OTHER_OPTIMIZERS:
        if answer.estimate.trace.facts.get("optimizer") != name:
            code = f"optimizer = torch.optim.{name}(model.parameters(), lr={rate}{options})   # a rate of its own"
            found.append(Change(f"optimizer-{name.lower()}", f"{title} instead of the optimizer", False, None,
                                "not measured", code, note, {"optimizer": name}))  # fmt: skip
    if answer.estimate.trace.facts.get("optimizer") in ("Adam", "AdamW"):
        found.append(Change("optimizer-8bit", "8-bit AdamW (torchao)", False, (0.9, 1.4), "1.3 times measured on a CPU",
                            "import torchao.optim\noptimizer = torchao.optim.AdamW8bit(model.parameters(), lr=1e-3)",
                            "moments of one byte a number; compiles a step for each shape of weights first, which "
                            "takes a minute or more" + _missing("torchao"), inside="eight_bit"))  # fmt: skip
    if device.capability:
        found.append(Change("expandable-segments", "expandable segments", True, (1.0, 1.05),
                            "no slower in torchtune's report",
                            "import os   # before torch is imported\n"
                            "os.environ[\"PYTORCH_CUDA_ALLOC_CONF\"] = \"expandable_segments:True\"",
                            "less memory lost between blocks", allocator="expandable"))  # fmt: skip
    return found


def _in_pieces(size: int, torch: bool) -> str:
    if not torch:
        return f'import buoy.keras\nguard = buoy.keras.Guard("runs/this", micro_batch={size})   # callbacks=[guard]'
    return (
        f'import buoy\nrun = buoy.Run("runs/this", micro_batch={size})\nrun.track(model=model, optimizer=optimizer)\n'
        "loss = run.backward(batch, loss_of)   # instead of loss_of(batch).backward()"
    )


def _in_half_precision(device: str, word: str) -> str:
    code = f'with torch.autocast("{device}", dtype=torch.{word}):\n    loss = loss_of(batch)   # forward pass and loss'
    if word == "bfloat16":
        return code
    # Small gradients vanish in float16 unless they are scaled.
    after = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    return f'scaler = torch.amp.GradScaler("{device}")   # once\n{code}\n{after}'


def popular(answer: Answer, request: Request, counted: dict[str, float]) -> list[Remedy]:
    """Advice that people find and that takes nothing from this peak, with the reason.

    `counted` are the bytes of `linear` layers' weights, and of those of them that are `tied`, where they are known.
    """
    now = answer.peak
    weights = held(answer.estimate.trace, "weights")

    def says(
        name: str,
        title: str,
        note: str,
        more: int = 0,
        time: tuple[float, float] | None = None,
        code: str = "",
    ) -> Remedy:
        peak = Interval(now.low + more, now.likely + more, now.high + more)
        return Remedy(name, title, None, "known", peak, answer.memory_verdict, time, "", code, note)

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
             + (_missing("torchao") if torch else ""), code=_QUANTIZE if torch else 'model.quantize("int8")'),
        says("gc", "gc.collect() in the loop", "tensors go when their last name goes; costs 24 % of the time measured",
             time=(1.1, 1.3)),
    ]  # fmt: skip
    if torch:
        found.append(says("empty-cache", "torch.cuda.empty_cache() in the loop", "gives unused blocks back to the "
                          "driver and asks for them again: no more memory for the step", time=(1.05, 1.5)))  # fmt: skip
        found.append(
            says(
                "channels-last",
                "channels_last",
                "the same bytes in another order: speed, not memory",
                code="model = model.to(memory_format=torch.channels_last)",
            )
        )
    else:
        found.append(says("memory-growth", "set_memory_growth", "takes memory later, not less of it"))
        found.append(says("pruning", "pruning", "masks make weights zero, not fewer: a mask as large as the weights is "
                          "added; inference shrinks only when whole channels are cut out", weights))  # fmt: skip
    return found


def _keras_changes(request: Request, answer: Answer) -> list[Change]:
    found = [
        Change("smaller-model", "the next smaller model of its family", False, None, "fewer operations",
               "", "another model",
               {"source": {**request.source, "smaller": "model"}}),
        Change("smaller-input", "inputs of half the length or side", False, None, "fewer operations",
               "# crop or resize the samples, or cut the sequences", "another training",
               {"source": {**request.source, "smaller": "input"}}),
    ]  # fmt: skip
    if "script" in request.source:
        return found  # its optimizer is its own
    for name, rate, note in (
        ("SGD", 0.1, "no moments"),
        ("Adafactor", 0.001, "moments of rows and columns only"),
    ):
        if answer.estimate.trace.facts.get("optimizer") != name:
            found.append(
                Change(f"optimizer-{name.lower()}", f"{name} instead of the optimizer", False, None, "not measured",
                       f"optimizer = keras.optimizers.{name}(learning_rate={rate})   # a rate of its own", note,
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
