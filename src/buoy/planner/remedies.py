"""What makes it fit: each remedy tried on this very step, and the cheapest of them or of their combinations.

And advice that users find which takes nothing from this peak, with the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from buoy.estimate.child import EstimateError, Request
from buoy.estimate.devices import Device
from buoy.estimate.result import Estimate, Interval, estimate
from buoy.planner.result import FITS, UNKNOWN, Answer, Need, Remedy, within, worst
from buoy.planner.session import Session, held, host_ram, with_moved
from buoy.planner.traces import Workshop
from buoy.units import format_bytes

_MOST_COMBINED = 4
_CALLS_LOSS = ("chunked-loss", "mixed-precision", "offload", "micro-batch")
# Less than this share of the peak is no remedy for it.
_NOTHING = 0.01
# How the tracer refuses a remedy that has nothing to change in this model.
NOT_APPLICABLE = {
    "nothing to checkpoint",
    "no linear layers to adapt",
    "no output layer over a vocabulary",
    "the inputs have no side or length",
    "the model cannot be built for smaller inputs",
    "no smaller sibling is known",
    "no layers to prune",
}
# The step itself ran before: what fails now fails by what the remedy did to it.
_OF_OUR_CHANGE = {"the traced code failed", "the traced step failed"}
_LATE = "left out, as trying took long: `--remedies` tries all"
# These make it another training altogether: the last resort.
_ANOTHER = {"smaller-model", "smaller-input"}


@dataclass(frozen=True, slots=True)
class Change:
    """One remedy as it is tried: what the tracer changes, and what a user writes."""

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


def find_remedies(
    workshop: Workshop,
    request: Request,
    answer: Answer,
    capacity: int | None,
    say: Callable[[str], None],
    counted: dict[str, float] | None = None,
    seconds: float | None = None,
    session: Session | None = None,
) -> tuple[tuple[Remedy, ...], Remedy | None]:
    """Every remedy's effect on this place, largest saving first, and the cheapest way to fit.

    `counted` are the bytes of the linear layers, where they were counted. After `seconds` no further one is begun and
    those left out are named; another training is then not tried where one fits that stays the same.
    """
    bench = _Bench(workshop, request, answer, capacity, session or Session())
    changes = changes_for(request, answer)
    tried: list[tuple[Change, Remedy]] = []
    end = time.monotonic() + seconds if seconds is not None else math.inf
    same = [change for change in changes if change.id not in _ANOTHER]
    others = [change for change in changes if change.id in _ANOTHER]
    for pair in [*_pairs(same), *_pairs(others)]:
        kept = any(remedy.exact and remedy.verdict == FITS for _, remedy in tried)
        if kept and seconds is not None and pair[0].id in _ANOTHER:
            break
        late = time.monotonic() > end
        if not late:
            say(f"trying {' and '.join(change.title for change in pair)}")
            bench.prepare(pair)
        for change in pair:
            remedy = _untried((change,), _LATE) if late else bench.tried((change,))
            if remedy is not None:
                tried.append((change, remedy))
    now = answer.peak
    helping = [
        (change, remedy)
        for change, remedy in tried
        if remedy.advisable and (remedy.saving(now) or 0) > _NOTHING
    ]
    cheapest = None
    if answer.memory_verdict != FITS:
        say("seeking the cheapest combination")
        cheapest = bench.cheapest(helping)
    found = [remedy for _, remedy in tried] + popular(answer, request, counted or {})
    found.sort(key=lambda remedy: -(remedy.saving(now) or 0))
    return tuple(found), cheapest


def allocator_of(request: Request, device: Device) -> str | None:
    """TensorFlow has its own allocator on a GPU; None is the framework's usual one."""
    return "bfc" if request.framework == "keras" and device.capability else None


class _Bench:
    """Tries changes on one step and one place."""

    def __init__(
        self, workshop: Workshop, request: Request, answer: Answer, capacity: int | None, session: Session
    ) -> None:
        self._workshop = workshop
        self._request = request
        self._answer = answer
        self._capacity = capacity
        self._session = session

    def prepare(self, changes: list[Change]) -> None:
        """Have the traces of these changes made together, each alone on the step."""
        self._workshop.prepare([self._changed((change,))[0] for change in changes])

    def tried(self, changes: tuple[Change, ...]) -> Remedy | None:
        """The changes together; None where they cannot be applied to this model."""
        try:
            figure = self._figure(changes)
        except EstimateError as error:
            if error.message in NOT_APPLICABLE:
                return None
            if error.message in _OF_OUR_CHANGE:
                return _untried(changes, "cannot be tried on this model")
            return _untried(changes, f"could not be tried: {error.received or error.message}")
        alone = figure.verdict(self._capacity)
        host = self._host(figure)
        verdict = alone if host is None else UNKNOWN if host.limit is None else worst([alone, host.verdict])
        # What was found out while applying it, such as the smaller sibling's name.
        learned = [note for note in figure.notes if note not in self._answer.estimate.notes]
        traced = any(change.request or change.inside for change in changes)
        return Remedy(
            id="+".join(change.id for change in changes),
            title=", ".join(change.title for change in changes),
            exact=all(change.exact for change in changes),
            basis="traced" if traced else "replayed",
            peak=within(figure.total, alone, self._answer.target.memory),
            verdict=verdict,
            time=_product([change.time for change in changes]),
            time_basis="; ".join(dict.fromkeys(change.time_basis for change in changes)),
            code=_written(changes, figure.trace.facts.get("code", {})),
            note="; ".join([*learned, *(change.note for change in changes if change.note), *_moves(host)]),
            needed=self._needed(figure),
            host=host,
            advisable=(host is None or host.verdict == FITS) and figure.trace.facts.get("pretrained", True),
        )

    def _needed(self, figure: Estimate) -> int | None:
        """The bytes that decided, of the whole device: on a CPU with what the process itself takes."""
        memory = self._answer.target.memory
        if self._capacity is None or memory is None:
            return None
        found = figure.needed(self._capacity)
        return None if found is None else found + memory - self._capacity

    def _host(self, figure: Estimate) -> Need | None:
        """The host's RAM, where these changes move bytes there."""
        moved = figure.trace.facts.get("moved_to_host")
        if moved is None:
            return None
        around = host_ram(self._session, self._answer.target, figure.trace, figure.reserved)
        return with_moved(around, *moved)

    def cheapest(self, helping: list[tuple[Change, Remedy]]) -> Remedy | None:
        """The one that fits at the least cost; else the best of each kind together until they do."""
        alone = [remedy for _, remedy in helping if remedy.verdict == FITS]
        if alone:
            return min(alone, key=_cost)
        now = self._answer.peak
        for least in range(3):
            usable = [pair for pair in helping if _kind(pair[1]) <= least]
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

    def _figure(self, changes: tuple[Change, ...]) -> Estimate:
        request, allocator = self._changed(changes)
        return estimate(self._workshop.trace(request), self._answer.target.device, allocator=allocator)

    def _changed(self, changes: tuple[Change, ...]) -> tuple[Request, str | None]:
        """The request and the allocator with these changes."""
        request = self._request
        allocator = allocator_of(request, self._answer.target.device)
        for change in changes:
            request = replace(request, **(change.request or {}))  # type: ignore[arg-type]
            if change.inside:
                request = replace(request, changes=(*request.changes, change.inside))
            allocator = change.allocator or allocator
        return request, allocator


def _moves(host: Need | None) -> list[str]:
    """What the host must hold, against what it has."""
    if host is None:
        return []
    need = f"{format_bytes(host.low)} to {format_bytes(host.high)}"
    if host.limit is None:
        return [f"host RAM then takes {need}: how much this place has is not known"]
    return [f"host RAM then takes {need} of {format_bytes(host.limit)}: {host.verdict}"]


def _pairs(changes: list[Change]) -> list[list[Change]]:
    """Two at a time, as they are traced."""
    return [changes[start : start + 2] for start in range(0, len(changes), 2)]


def _untried(changes: tuple[Change, ...], why: str) -> Remedy:
    """What could not be tried is named, with the reason; nothing is claimed about it."""
    return Remedy(
        id="+".join(change.id for change in changes),
        title=", ".join(change.title for change in changes),
        exact=all(change.exact for change in changes),
        basis="not tried",
        peak=None,
        verdict=UNKNOWN,
        time=None,
        time_basis="",
        code=_written(changes, {}),
        note=why,
    )


def _exclude(one: Change, other: Change) -> bool:
    """Whether two changes cannot be had together.

    Two optimizers; or with a step inside backward: accumulation, gradients that a scaler has yet to divide, and the
    8-bit optimizer, whose step is compiled for all of them.
    """
    ids = {one.id, other.id}
    if all(name.startswith("optimizer-") for name in ids) or ids == {"checkpointing", "offload"}:
        return True
    scaled = any((change.request or {}).get("autocast") == "fp16" for change in (one, other))
    return "in-backward" in ids and (bool(ids & {"micro-batch", "optimizer-8bit"}) or scaled)


def _written(changes: tuple[Change, ...], codes: dict[str, str]) -> str:
    """The code of all of them; where it depends on the model, that of what was really done to it.

    What calls the loss comes after what defines or prepares it.
    """
    ordered = sorted(
        changes, key=lambda change: _CALLS_LOSS.index(change.id) if change.id in _CALLS_LOSS else -1
    )
    return "\n".join(filter(None, (codes.get(change.id, change.code) for change in ordered)))


def _product(times: list[tuple[float, float] | None]) -> tuple[float, float] | None:
    low = high = 1.0
    for factor in times:
        if factor is None:
            return None
        low, high = low * factor[0], high * factor[1]
    return low, high


def _cost(remedy: Remedy) -> tuple[int, float]:
    """Exact ones first, then the less time the better."""
    return (_kind(remedy), sum(remedy.time) if remedy.time else 2.5)


def _kind(remedy: Remedy) -> int:
    """0 leaves the training the same, 1 changes its arithmetic, 2 makes it another one."""
    return 0 if remedy.exact else 2 if _ANOTHER & set(remedy.id.split("+")) else 1


_OPTIMIZERS_OF_TORCH = (
    ("SGD", "SGD with momentum", "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "one moment"),
    ("Adafactor", "Adafactor", "torch.optim.Adafactor(model.parameters(), lr=0.01)",
     "moments of rows and columns only"),
)  # fmt: skip
_OPTIMIZERS_OF_KERAS = (
    ("SGD", "SGD", "keras.optimizers.SGD(learning_rate=0.1)", "no moments"),
    (
        "Adafactor",
        "Adafactor",
        "keras.optimizers.Adafactor(learning_rate=0.001)",
        "moments of rows and columns only",
    ),
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
        time, basis = _half_precision_time(device)
        word = "bfloat16" if dtype == "bf16" else "float16"
        code = _in_half_precision("cuda" if device.capability else "cpu", word)
        if not torch:
            code = f'keras.mixed_precision.set_global_policy("mixed_{word}")   # before the model is built'
        found.append(Change("mixed-precision", f"mixed precision ({word})", False, time, basis, code,
                            "weights and optimizer stay float32", {"autocast": dtype}))  # fmt: skip
    if not torch:
        return [
            *found,
            _smaller("model", request),
            _smaller("input", request),
            *_other_optimizers(request, answer),
        ]
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
        _smaller("model", request),
        Change("pruning", "pruning (torch.nn.utils.prune)", False, None, "not measured",
               "from torch.nn.utils import prune\nfor layer in list(model.modules()):\n"
               "    if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):\n"
               "        prune.l1_unstructured(layer, \"weight\", amount=0.5)",
               "masks make weights zero, not fewer: each mask is as large as its weights, and each product is kept for "
               "backward; for inference the zeros take as much as before, until whole channels are cut out",
               inside="pruned"),
        _smaller("input", request),
    ]  # fmt: skip
    if device.capability:
        found.append(Change("offload", "activations kept in host RAM", True, None,
                            "each activation crosses the bus twice",
                            "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    loss = loss_of(batch)",
                            inside="offload"))  # fmt: skip
    found += _other_optimizers(request, answer)
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
    """Advice that users find and that takes nothing from this peak, with the reason.

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
    # Where the linear layers are not counted, all weights are taken for theirs.
    small, tied = counted.get("linear", weights), counted.get("tied", 0.0)
    becomes = f"{format_bytes(weights)} of weights become "
    if not torch:
        becomes += f"at best {format_bytes(weights / 4)}"
    elif small:
        becomes += format_bytes(weights - small * 3 / 4)
    else:
        becomes = f"{format_bytes(weights)} of weights stay, as only linear layers shrink"
    if tied:
        becomes += " (the tied output layer left out with `filter_fn`: quantized, it would be a copy of "
        becomes += f"{format_bytes(tied / 4)})"
    tool = "torchao's int8" if torch else 'model.quantize("int8")'
    found = [
        says("quantization", f"quantization after training ({tool})", "training keeps the weights in full: the same "
             f"peak; for inference {becomes}{_missing('torchao') if torch else ''}",
             code=_QUANTIZE if torch else 'model.quantize("int8")'),
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


def _smaller(what: str, request: Request) -> Change:
    """A smaller "model" or "input": how it is asked for depends on the framework, all else does not."""
    how: dict[str, Any] = {"inside": f"smaller_{what}"}
    if request.framework == "keras":
        how = {"request": {"source": {**request.source, "smaller": what}}}
    if what == "model":
        return Change("smaller-model", "the next smaller model of its family", False, None, "fewer operations", "",
                      "another model", **how)  # fmt: skip
    return Change("smaller-input", "inputs of half the length or side", False, None, "fewer operations",
                  "# crop or resize the samples, or cut the sequences", "another training", **how)  # fmt: skip


def _other_optimizers(request: Request, answer: Answer) -> list[Change]:
    if "script" in request.source:
        return []  # a Keras script's is its own
    torch = request.framework == "torch"
    return [
        Change(f"optimizer-{name.lower()}", f"{title} instead of the optimizer", False, None, "not measured",
               f"optimizer = {code}   # a rate of its own", note, {"optimizer": name})
        for name, title, code, note in (_OPTIMIZERS_OF_TORCH if torch else _OPTIMIZERS_OF_KERAS)
        if answer.estimate.trace.facts.get("optimizer") != name
    ]  # fmt: skip


def _missing(library: str) -> str:
    """Said where the code needs a library that is not here."""
    return "" if find_spec(library) else f"; {library} is not installed here: pip install {library}"


def _has_batch_norm(figure: Estimate) -> bool:
    """By the operations' names in PyTorch, by the layers' in Keras."""
    return any(
        "batchnorm" in f"{operation} {module}".lower().replace("_", "")
        for _, module, operation in figure.trace.labels
    )


def _half_precision_time(device: Device) -> tuple[tuple[float, float] | None, str]:
    """What mixed precision does to the step's time on this device, from and to, and why."""
    if not device.capability:
        return (1.0, 12.0), "12 times slower was measured on a CPU without bfloat16 units"
    if device.capability < 70:
        return (0.7, 1.1), "no tensor cores on this card"
    return (0.3, 0.9), "tensor cores; how much depends on how the step is bound"
