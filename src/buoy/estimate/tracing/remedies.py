"""Remedies applied to a job about to be traced, as a user would apply them, and the code that a user writes for each.

The code is for the very model and batch, and runs as it stands. The user's own names are assumed: `model`, `batch`,
`optimizer`, `loss_of(batch)`, and `images` or `tokens` for what a batch holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from buoy._compat.torch import tree_flatten, tree_map
from buoy.estimate.child import EstimateError
from buoy.estimate.siblings import Sibling, smaller, smaller_config


def checkpointing(model: nn.Module, blocks: list[Any]) -> str:
    """Recomputing these blocks of the model."""
    wrapped = {id(block) for block in blocks}
    holders = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and any(id(child) in wrapped for child in part)
    ]
    whole = all(id(child) in wrapped for _, part in holders for child in part)
    names = [
        name for name, part in (holders if whole else model.named_modules()) if whole or id(part) in wrapped
    ]
    inner = "    " if whole else ""
    first = f"{inner}for block in model.get_submodule(path):\n" if whole else ""
    found = "" if whole else "    block = model.get_submodule(path)\n"
    return (
        "from functools import partial\nfrom torch.utils.checkpoint import checkpoint\n"
        f"for path in {_own_names(model, names)}:\n{first}{found}"
        f"{inner}    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"
    )


def in_backward(kind: type, options: dict[str, Any]) -> str:
    """An optimizer of this kind for each parameter."""
    name = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
    usual = inspect.signature(kind).parameters
    plain = (int, float, bool, tuple, str)
    said = {
        key: value
        for key, value in options.items()
        if isinstance(value, plain) and (key == "lr" or value != usual[key].default)
    }
    words = "".join(f", {key}={value!r}" for key, value in said.items())
    return (
        f"each = {{p: {name}([p]{words}) for p in model.parameters() if p.requires_grad}}\n\n"
        "def step(p):\n    each[p].step()\n    each[p].zero_grad()\n\n"
        "for p in each:   # and no optimizer.step() in the loop\n"
        "    p.register_post_accumulate_grad_hook(step)"
    )


def chunked_loss(head: str, rows: int, *, shifted: bool) -> str:
    """The loss of a language model of transformers, from the module that makes its scores."""
    ends = 'hidden[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()   # each foretells the next'
    if not shifted:
        ends = 'hidden.flatten(0, 1), batch["labels"].flatten()'
    return (
        "from torch.nn.functional import cross_entropy\nfrom torch.utils.checkpoint import checkpoint\n\n"
        "def chunk_loss(hidden, labels):\n"
        f'    return cross_entropy(model.{head}(hidden).float(), labels, ignore_index=-100, reduction="sum")\n\n'
        "def loss_of(batch):\n"
        '    hidden = model.base_model(**{name: value for name, value in batch.items() if name != "labels"})[0]\n'
        f"    hidden, labels = {ends}\n"
        f"    pieces = zip(hidden.split({rows}), labels.split({rows}))\n"
        "    total = sum(checkpoint(chunk_loss, *piece, use_reentrant=False) for piece in pieces)\n"
        "    return total / (labels != -100).sum()\n\n"
        "loss = loss_of(batch)"
    )


def smaller_input(batch: Any, cut: dict[int, tuple[int, ...]]) -> str:
    """Samples made smaller; `cut` has the new shape for each leaf that is changed, by its identity."""
    lines = []
    if isinstance(batch, dict):
        for name, leaf in batch.items():
            if id(leaf) in cut:
                lines.append(_cut(f'batch["{name}"]', leaf, cut[id(leaf)]))
    else:
        leaves = [leaf for leaf in batch if id(leaf) in cut] if isinstance(batch, (tuple, list)) else [batch]
        lines = [_cut(_trace_code_called(leaf), leaf, cut[id(leaf)]) for leaf in leaves if id(leaf) in cut]
    return "\n".join(dict.fromkeys(lines)) or "# crop or resize the samples, or cut the sequences"


def smaller_config_code(shape: dict[str, int], name: str) -> str:
    """A model of transformers with the sizes of another."""
    return (
        f"for name, value in {shape!r}.items():\n    setattr(model.config, name, value)\n"
        f"model = type(model)(model.config)   # and the weights of {name}"
    )


def _trace_code_called(leaf: torch.Tensor) -> str:
    return (
        "images"
        if leaf.dim() > 3
        else "masks"
        if leaf.dim() == 3 and not leaf.is_floating_point()
        else "tokens"
    )


def _cut(name: str, leaf: torch.Tensor, shape: tuple[int, ...]) -> str:
    if leaf.dim() == 4 and leaf.is_floating_point():
        return f"{name} = torch.nn.functional.interpolate({name}, size={tuple(shape[-2:])})"
    axes = [f":{new}" if new != old else ":" for old, new in zip(leaf.shape, shape, strict=True)]
    while axes[-1] == ":":
        axes.pop()
    return f"{name} = {name}[{', '.join(axes)}].contiguous()"


def _own_names(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    """As the user's own model has them: a script's modules lie in a holder of ours."""
    if type(model) is nn.Module:
        return tuple(name.partition(".")[2] for name in names)
    return tuple(names)


_CHUNK = 1024
# From so many classes on an output layer is one over words; from so many columns on a row may be a sequence.
_VOCABULARY, _LENGTH = 8192, 8
_RANK, _SCALING = 8, 1.0
# Narrower layers gain nothing, and where linear layers hold less than this share, the rest is what would be trained.
_LEAST_WIDTH, _LEAST_SHARE = 64, 0.1
# torchao quantizes moments of so many numbers and more, in blocks, and keeps the values of a byte with them.
_LEAST_QUANTIZED, _BLOCK, _VALUES = 4096, 256, 256
# Fields by which configs of transformers scale or bound the scores themselves.
_CHANGES_SCORES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
SEVERAL = "not tried on a step with several optimizers"
_FOR_TURNS = {"smaller_input"}


def apply(job: Any, names: tuple[str, ...]) -> None:
    """Change the job by each named remedy; raises EstimateError where one has nothing to change."""
    for name in names:
        if job.turns and name not in _FOR_TURNS:
            raise EstimateError(SEVERAL, received="a step with several optimizers is not taken apart for it")
        _REMEDIES[name](job)


def remember_code(job: Any, name: str, code: str) -> None:
    """What a user writes to have this remedy on this very model: among the trace's facts."""
    job.facts["code"] = {**job.facts.get("code", {}), name: code}


def _lora(job: Any) -> None:
    """Small matrices next to the frozen weights of linear layers, as peft's `all-linear` adds them."""
    head, model = _head(job.model), job.model
    wide = [
        layer
        for layer in _called(model)
        if _is_linear(layer) and layer is not head and min(layer.weight.shape) > _LEAST_WIDTH
    ]
    every = sum(parameter.numel() for parameter in model.parameters())
    if sum(layer.weight.numel() for layer in wide) < _LEAST_SHARE * every:
        raise EstimateError("no linear layers to adapt")
    model.requires_grad_(False)
    for layer in wide:
        _add_low_rank(layer)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    job.optimizer = partial(_another, *_optimizer_kind(job))
    job.notes.append(f"trains {trained:,} numbers, with {every:,} frozen ones ({trained / every:.2%})")
    job.facts["pretrained"] = any(_is_published(module) for module in model.modules())


def _called(model: nn.Module) -> list[Any]:
    """The modules whose forward is called: attention of `torch.nn` uses its output layer's weights without that."""
    modules = list(model.modules())
    unused = {id(c) for part in modules if isinstance(part, nn.MultiheadAttention) for c in part.children()}
    return [module for module in modules if id(module) not in unused]


def _is_linear(layer: nn.Module) -> bool:
    """GPT-2's Conv1D of transformers is a linear layer with its weight turned."""
    return isinstance(layer, nn.Linear) or (type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"))


def _is_published(module: nn.Module) -> bool:
    """Whether it is of a library whose models come with weights: transformers or timm."""
    return bool(getattr(getattr(module, "config", None), "model_type", None)) or bool(
        getattr(module, "pretrained_cfg", None)
    )


def _add_low_rank(layer: Any) -> None:
    """In place, as other code may look at the layer's own weight.

    As peft does it: next to weights of half precision the small matrices are float32, and what goes through them too.
    """
    dtype = torch.float32 if layer.weight.dtype in (torch.float16, torch.bfloat16) else layer.weight.dtype
    kind: Any = {"dtype": dtype, "device": layer.weight.device}
    turned = not isinstance(layer, nn.Linear)
    wide, narrow = layer.weight.shape if turned else reversed(layer.weight.shape)
    layer.low_down = nn.Linear(wide, _RANK, bias=False, **kind)
    layer.low_up = nn.Linear(_RANK, narrow, bias=False, **kind)
    plain = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        result = plain(x)
        added = layer.low_up(layer.low_down(x.to(kind["dtype"]))) * _SCALING
        adapted: torch.Tensor = result + added
        return adapted.to(result.dtype)

    layer.forward = forward


def _in_backward(job: Any) -> None:
    kind, options = _optimizer_kind(job)

    class Inside(torch.optim.Optimizer):
        """Steps each parameter as soon as its gradient is there."""

        def __init__(self, parameters: list[torch.Tensor]) -> None:
            super().__init__(parameters, {})
            self._each = [kind([parameter], **options) for parameter in parameters]
            for parameter, one in zip(parameters, self._each, strict=True):
                parameter.register_post_accumulate_grad_hook(self._hook(one))  # type: ignore[no-untyped-call]
                one.state = self.state  # so that the tracer sees whose memory it is

        @staticmethod
        def _hook(one: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
            def step(_: torch.Tensor) -> None:
                one.step()
                one.zero_grad()

            return step

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Done already."""

    job.optimizer = lambda parameters: Inside(list(parameters))
    remember_code(job, "in-backward", in_backward(kind, options))


def _eight_bit(job: Any) -> None:
    """As torchao's AdamW8bit: a byte for each number of a moment, a float for each block, and a table of the values."""

    class EightBit(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in (
                p for group in self.param_groups for p in group["params"] if p.grad is not None
            ):
                state, size = self.state[parameter], parameter.numel()
                small = size < _LEAST_QUANTIZED or size % _BLOCK
                if not state:
                    for moment in ("first", "second"):
                        state |= (
                            {moment: torch.zeros_like(parameter)} if small else _quantized(parameter, moment)
                        )
                if not small:
                    # Its compiled step keeps both moments in full until they are quantized: so measured on a CPU.
                    wide = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
                    del wide

    job.optimizer = EightBit


def _quantized(parameter: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    scales, values = (torch.zeros(n, device=parameter.device) for n in (parameter.numel() // _BLOCK, _VALUES))
    return {f"{name} codes": torch.zeros_like(parameter, dtype=torch.uint8), f"{name} scales": scales,
            f"{name} values": values}  # fmt: skip


def _offload(job: Any) -> None:
    """What autograd keeps goes to the host; how much of it lies there at once is among the trace's facts."""
    loss = job.loss

    def offloaded(model: Any, batch: Any) -> torch.Tensor:
        moved = _Moved()
        with moved:
            result: torch.Tensor = loss(model, batch)
        before = job.facts.get("moved_to_host", (0, 0))
        job.facts["moved_to_host"] = (max(before[0], moved.asked), max(before[1], moved.pinned))
        return result

    job.loss = offloaded


class _Moved(torch.autograd.graph.save_on_cpu):
    """As `save_on_cpu`, counting: the bytes, and what pinned memory takes for them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.pinned = 0
        pack = self.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            size = tensor.numel() * tensor.element_size()
            self.asked += size
            # PyTorch's allocator of pinned memory rounds every block up to a power of two.
            self.pinned += 1 << (size - 1).bit_length() if size else 0
            return pack(tensor)

        self.pack_hook = counted


def _chunked_loss(job: Any) -> None:
    body: Any = getattr(job.model, "base_model", None)
    config: Any = getattr(job.model, "config", None)
    name = (
        _head_part(job.model, body) if isinstance(body, nn.Module) and isinstance(job.batch, dict) else None
    )
    if name is None or "labels" not in job.batch or getattr(config, "is_encoder_decoder", False):
        _name_the_vocabulary(job.model)
        raise EstimateError("no output layer over a vocabulary")
    changed = [field for field in _CHANGES_SCORES if getattr(config, field, None) not in (None, 1, 1.0)]
    if changed:
        raise EstimateError("the scores are changed again", received=f"the model changes its scores after the output "
                            f"layer (`{changed[0]}` of its config): the loss would be another one")  # fmt: skip
    head: Any = getattr(job.model, name)

    def piece(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(hidden).float(), labels, reduction="sum")

    shifted = "Masked" not in type(job.model).__name__

    def chunked(model: Any, batch: Any) -> torch.Tensor:
        hidden = body(**{name: value for name, value in batch.items() if name != "labels"})[0]
        labels = batch["labels"]
        if shifted:
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        total: torch.Tensor = sum(
            checkpoint(piece, one, other, use_reentrant=False)
            for one, other in zip(
                hidden.flatten(0, 1).split(_CHUNK), labels.flatten().split(_CHUNK), strict=True
            )
        )
        return total.div((labels != -100).sum())

    job.loss = chunked
    remember_code(job, "chunked-loss", chunked_loss(name, _CHUNK, shifted=shifted))


def _head_part(model: nn.Module, body: nn.Module) -> str | None:
    """The name of the part that makes scores of what the body returns; None where that is not one part alone."""
    head = _head(model)
    others = {
        name: part
        for name, part in model.named_children()
        if part is not body and any(True for _ in part.parameters())
    }
    if not isinstance(head, nn.Linear) or len(others) != 1 or body is model:
        return None
    name, part = next(iter(others.items()))
    return name if any(inner is head for inner in part.modules()) else None


def _name_the_vocabulary(model: nn.Module) -> None:
    """Where the model is no library's, only its author can take the output layer out of `forward`."""
    wide = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features >= _VOCABULARY
    ]
    if wide:
        name, layer = wide[-1]
        raise EstimateError(
            "the output layer is inside of forward()",
            received=f"`{name}` makes scores for {layer.out_features:,} classes inside of forward(): return what goes "
            "into it, and give it and the loss 1024 rows at a time, as `buoy explain plan` shows",
        )


def _smaller_input(job: Any) -> None:
    changed: dict[int, tuple[int, ...]] = {}
    leaves = [leaf for leaf in tree_flatten(job.batch)[0] if isinstance(leaf, torch.Tensor)]
    sides = {tuple(leaf.shape[-2:]) for leaf in leaves if leaf.dim() >= 4}

    def smaller(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
            return leaf
        if leaf.dim() >= 4 or tuple(leaf.shape[-2:]) in sides:  # images, and a class for each of their pixels
            shape = (*leaf.shape[:-2], max(1, leaf.shape[-2] // 2), max(1, leaf.shape[-1] // 2))
        elif leaf.shape[1] >= _LENGTH and (not leaf.is_floating_point() or leaf.dim() == 3):
            shape = (leaf.shape[0], max(1, leaf.shape[1] // 2), *leaf.shape[2:])
        else:
            return leaf  # features or columns of numbers, not a length
        changed[id(leaf)] = tuple(shape)
        return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)

    before = job.batch
    job.batch = tree_map(smaller, before)
    if not job.turns and type(job.model) is not nn.Module:  # a script's batch is called by names of ours
        remember_code(job, "smaller-input", smaller_input(before, changed))
    if not changed:
        raise EstimateError("the inputs have no side or length")


def _smaller_model(job: Any) -> None:
    """The next smaller sibling in place of the model, or of the largest known part of it."""
    for module in job.model.modules():
        sibling, made, code = _sibling_of(module)
        if sibling is not None:
            # Whoever holds the model (a script's step, a closure) then holds the smaller one.
            module.__dict__ = made.__dict__
            job.optimizer = partial(_another, *_optimizer_kind(job))
            job.notes.append(f"{sibling.name} instead")
            remember_code(job, "smaller-model", code)
            return
    if any(_is_published(module) for module in job.model.modules()):
        raise EstimateError(
            "no smaller sibling in the table", received="none of this size and family is in the table"
        )
    raise EstimateError("no smaller sibling is known")


def _sibling_of(module: nn.Module) -> tuple[Sibling | None, Any, str]:
    config: Any = getattr(module, "config", None)
    found = smaller_config(config) if config is not None else None
    if found is not None:
        changed = type(config)(**{**config.to_dict(), **found.shape})
        return found, type(module)(changed).train(), smaller_config_code(found.shape, found.name)
    name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    found = smaller("timm", name) if name else None
    if found is not None:
        classes = getattr(module, "num_classes", 1000)
        code = f'import timm\nmodel = timm.create_model("{found.name}", num_classes={classes})'
        return found, import_module("timm").create_model(found.name, num_classes=classes).train(), code
    return None, None, ""


def _pruned(job: Any) -> None:
    """As torch.nn.utils.prune does it: the weights stay, a mask is added, and the product is made in each step."""
    from torch.nn.utils import prune

    layers = [
        layer for layer in _called(job.model)
        if isinstance(getattr(layer, "weight", None), nn.Parameter)
        and layer.weight.dim() > 1 and not isinstance(layer, nn.Embedding)
    ]  # fmt: skip
    if not layers:
        raise EstimateError("no layers to prune")
    for layer in layers:
        prune.custom_from_mask(layer, "weight", torch.ones_like(layer.weight, requires_grad=False))  # type: ignore[no-untyped-call]
    job.optimizer = partial(_another, *_optimizer_kind(job))


def _head(model: nn.Module) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def _another(kind: Any, options: dict[str, Any], parameters: Any) -> Any:
    return kind(parameters, **options)


def _optimizer_kind(job: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class and settings, to make others like it."""
    made = job.optimizer
    if not isinstance(made, torch.optim.Optimizer):
        made = made([nn.Parameter(torch.zeros(1))])
    known = inspect.signature(type(made)).parameters
    return type(made), {name: value for name, value in made.defaults.items() if name in known}


_REMEDIES: dict[str, Callable[[Any], None]] = {
    "lora": _lora, "in_backward": _in_backward, "eight_bit": _eight_bit, "offload": _offload, "pruned": _pruned,
    "chunked_loss": _chunked_loss, "smaller_input": _smaller_input, "smaller_model": _smaller_model,
}  # fmt: skip
