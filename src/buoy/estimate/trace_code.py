"""What a person writes to have a remedy, for the very model and batch it was applied to; runs as it stands.

The person's own names are assumed: `model`, `batch`, `optimizer`, `loss_of(batch)`, and `images` or `tokens` for what a
batch holds.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


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
        lines = [_cut(_called(leaf), leaf, cut[id(leaf)]) for leaf in leaves if id(leaf) in cut]
    return "\n".join(dict.fromkeys(lines)) or "# crop or resize the samples, or cut the sequences"


def smaller_config(shape: dict[str, int], name: str) -> str:
    """A model of transformers with the sizes of another."""
    return (
        f"for name, value in {shape!r}.items():\n    setattr(model.config, name, value)\n"
        f"model = type(model)(model.config)   # and the weights of {name}"
    )


def _called(leaf: torch.Tensor) -> str:
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
    """As the person's own model has them: a script's modules lie in a holder of ours."""
    if type(model) is nn.Module:
        return tuple(name.partition(".")[2] for name in names)
    return tuple(names)
