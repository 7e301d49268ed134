"""Remedies that are a switch of PyTorch: mixed precision, activation checkpointing, expandable segments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from buoy.errors import UsageError
from buoy.torch.backward import LossFunction

NAMES = ("amp", "checkpointing", "expandable_segments")


class Switches:
    """The remedies that a person asked for; each is an event in the flight log once it is applied."""

    def __init__(self, names: tuple[str, ...] | str, event: Callable[..., object]) -> None:
        self._names = (names,) if isinstance(names, str) else tuple(names)
        self._event = event
        unknown = set(self._names) - set(NAMES)
        if unknown:
            raise UsageError("unknown remedy", received=", ".join(sorted(unknown)), expected=", ".join(NAMES),
                             hint="`buoy plan` shows what each would do")  # fmt: skip
        if "expandable_segments" in self._names:
            self._note("expandable_segments", how=_expand_segments())

    def track(self, modules: Iterable[torch.nn.Module]) -> None:
        """Apply what belongs to models."""
        for module in modules if "checkpointing" in self._names else ():
            self._note("checkpointing", blocks=_checkpoint(module))

    def around(self, loss_fn: LossFunction, device: torch.device, scaler: Any) -> LossFunction:
        """The loss function in mixed precision, where that was asked for."""
        if "amp" not in self._names:
            return loss_fn
        coarse = device.type == "cuda" and not torch.cuda.is_bf16_supported()
        if coarse and scaler is None:
            raise UsageError("this GPU has no bfloat16: float16 needs a scaler", received='remedies=("amp",)',
                             expected="run.backward(..., scaler=torch.amp.GradScaler())")  # fmt: skip
        dtype = torch.float16 if coarse else torch.bfloat16

        @functools.wraps(loss_fn)
        def mixed(part: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return loss_fn(part)

        return mixed

    def _note(self, name: str, **how: object) -> None:
        self._event("remedy", name=name, **how)


def _expand_segments() -> str:
    setting = "expandable_segments:True"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.memory._set_allocator_settings(setting)
        return "allocator"
    present = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if setting not in (present or ""):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"{present},{setting}" if present else setting
    return "environment"


def _checkpoint(module: torch.nn.Module) -> int:
    """Compute the activations inside each block again in backward; the number of blocks."""
    own = getattr(module, "gradient_checkpointing_enable", None)
    if callable(own):  # Hugging Face's models know their blocks
        own()
        return -1
    longest: list[torch.nn.Module] = []
    for part in module.modules():
        if isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential)):
            blocks = [child for child in part if any(True for _ in child.parameters())]
            longest = max(longest, blocks, key=len)
    if len(longest) < 2:
        raise UsageError("there are no blocks to checkpoint", received=type(module).__name__,
                         expected="a model with a ModuleList or Sequential of layers",
                         hint="call torch.utils.checkpoint.checkpoint in its forward")  # fmt: skip
    for block in longest:
        block.forward = _recomputed(block.forward)
    return len(longest)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
