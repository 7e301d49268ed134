"""Remedies that are a switch of PyTorch: mixed precision, activation checkpointing, expandable segments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from buoy._compat import torch as compat
from buoy.errors import UsageError
from buoy.torch.state.state_dict import unwrapped
from buoy.torch.step.gradient import LossFunction

NAMES = ("amp", "checkpointing", "expandable_segments")


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise `UsageError` where one of these is no remedy that can be switched on.

    >>> refuse_unknown(["amp"])
    """
    unknown = set(names) - set(NAMES)
    if unknown:
        raise UsageError("unknown remedy", received=", ".join(sorted(map(str, unknown))),
                         expected=", ".join(NAMES), hint="`buoy plan` shows what each would do")  # fmt: skip


class Switches:
    """The remedies that the user asked for; each is a line and an event in the flight log once it is applied."""

    def __init__(
        self, names: tuple[str, ...] | str, say: Callable[[str], object], event: Callable[..., object]
    ) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        """What was asked for."""
        self._say, self._event = say, event
        refuse_unknown(self.names)
        self._told_amp = False
        if "expandable_segments" in self.names:
            how = _expand_segments()
            self._note("expandable_segments", f"expandable segments, {how}", how=how)

    def track(self, modules: Iterable[torch.nn.Module]) -> None:
        """Apply what belongs to models."""
        for module in modules if "checkpointing" in self.names else ():
            blocks = _checkpoint(unwrapped(module))
            what = (
                f"{blocks} blocks of {type(unwrapped(module)).__name__}"
                if blocks
                else "the model's own switch"
            )
            self._note("checkpointing", f"activation checkpointing, {what}", blocks=blocks)

    def around(self, loss_fn: LossFunction, parameter: torch.Tensor, scaler: Any) -> LossFunction:
        """The loss function in mixed precision on this one's device, where that was asked for."""
        if "amp" not in self.names:
            return loss_fn
        device = parameter.device
        # Where bfloat16 is only emulated it saves memory and costs more time than it may.
        coarse = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        if coarse and not isinstance(scaler, torch.amp.GradScaler):
            raise UsageError("this GPU has no bfloat16: float16 needs a scaler", received='remedies=("amp",)',
                             expected="run.backward(..., scaler=torch.amp.GradScaler())",
                             hint='in a Trainer use its own switch: precision="16-mixed", or fp16=True')  # fmt: skip
        dtype = torch.float16 if coarse else torch.bfloat16
        if not self._told_amp:
            self._told_amp = True
            word = str(dtype).partition(".")[2]
            self._note("amp", f"mixed precision, {word} on {device.type}", dtype=word)

        @functools.wraps(loss_fn)
        def mixed(part: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return loss_fn(part)

        return mixed

    def _note(self, name: str, words: str, **how: object) -> None:
        self._say(f"remedy applied: {words}")
        self._event("remedy", name=name, **how)


def _expand_segments() -> str:
    setting = "expandable_segments:True"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        compat.set_allocator(setting)
        return "set in the allocator"
    present = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if setting not in (present or ""):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"{present},{setting}" if present else setting
    return "through PYTORCH_CUDA_ALLOC_CONF"


def _checkpoint(module: torch.nn.Module) -> int | None:
    """Compute the activations inside each block again in backward; the number of blocks, None if it knows itself."""
    own = getattr(module, "gradient_checkpointing_enable", None)
    if callable(own):  # Hugging Face's models know their blocks
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return None
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
        # Methods, not closures: a copy of the block must compute with its own weights.
        vars(block)["forward_once"] = block.forward
        block.forward = MethodType(_recomputed, block)
    return len(longest)


def _recomputed(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = vars(block)["forward_once"]
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


_recomputed.__name__ = "forward"  # a pickled model finds its class's own under that name
