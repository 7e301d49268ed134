"""Buffers that a module keeps out of its state_dict (`persistent=False`), as far as they change in training.

Most of them are constants that the module makes itself: masks, positions, frequencies. They are left alone. One that
is written, such as a running mean, is a part of the training as any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from buoy.torch.grown import is_expanded
from buoy.torch.tensors import WORDS

_COMPILED = "_orig_mod."
_SMALL = 1 << 16  # bytes that may be copied to be compared at each checkpoint


class LooseBuffers:
    """Those of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_first = {name: _Mark(owner._buffers[key]) for name, owner, key in self._all()}

    def changed(self) -> dict[str, torch.Tensor]:
        """Those that were written or replaced since the module was tracked."""
        found = {}
        for name, owner, key in self._all():
            buffer = owner._buffers[key]
            if buffer is None or not _can_be_saved(buffer):
                continue
            if name not in self._at_first or self._at_first[name].is_left_by(buffer):
                found[name] = buffer.detach().cpu()
        return found

    def load(self, stored: Mapping[str, torch.Tensor]) -> list[str]:
        """Give them back; which of them have no place here."""
        places = {name: (owner, key) for name, owner, key in self._all()}
        for name, value in stored.items():
            if name not in places:
                continue
            owner, key = places[name]
            here = owner._buffers[key]
            fits = here is not None and here.shape == value.shape and here.dtype == value.dtype
            if here is not None and fits and not is_expanded(here):
                with torch.no_grad():
                    here.copy_(value)
            else:  # a cache that had grown, or what cannot be written
                owner._buffers[key] = value.to(self._device(here), copy=True)
        return [name for name in stored if name not in places]

    def _all(self) -> Iterator[tuple[str, nn.Module, str]]:
        for path, owner in self._module.named_modules():
            for key in owner._non_persistent_buffers_set & owner._buffers.keys():
                yield f"{path}.{key}".lstrip(".").replace(_COMPILED, ""), owner, key

    def _device(self, here: torch.Tensor | None) -> torch.device | None:
        known = here if here is not None else next(self._module.parameters(), None)
        return known.device if known is not None else None


def buffers_of(things: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """What the modules among tracked things have changed beside their state_dict, by name; for the checkpoint."""
    loose = {name: thing.loose.changed() for name, thing in things.items() if hasattr(thing, "loose")}
    return {name: buffers for name, buffers in loose.items() if buffers}


def load_buffers(
    things: Mapping[str, Any], stored: Mapping[str, Mapping[str, torch.Tensor]], say: Callable[[str], None]
) -> None:
    """Give them back."""
    for name, buffers in stored.items():
        if name in things and hasattr(things[name], "loose"):
            without = things[name].loose.load(buffers)
            if without:
                say(f"saved, but not in {name} any more: the buffers {', '.join(without)}")


class _Mark:
    """How a buffer was found."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        self._buffer = weakref.ref(buffer) if buffer is not None else None
        self._version = _version(buffer)
        small = buffer is not None and buffer.nbytes <= _SMALL and _can_be_saved(buffer)
        self._copy = buffer.detach().clone() if buffer is not None and small else None

    def is_left_by(self, buffer: torch.Tensor) -> bool:
        """It was replaced or written since."""
        if self._buffer is None or self._buffer() is not buffer or self._version != _version(buffer):
            return True
        # torch counts what is written, but not what is written through `.data`.
        return self._copy is not None and not torch.equal(self._copy, buffer)


def _version(buffer: torch.Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _can_be_saved(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.dtype in WORDS and buffer.device.type != "meta"
