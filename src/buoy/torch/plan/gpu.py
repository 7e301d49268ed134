"""What a script that is run for its plan asks of a GPU which is not here: its devices, and which mixed precision.

No GPU is touched, no more threads are made, and no process that trains is started.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn

from buoy._compat import patched
from buoy.estimate.child import WRITE_BUILD, EstimateError
from buoy.flight.imports import after_import

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_LIGHTNING = ["lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"]
# "auto" and -1 are all there are, which a plan's place may have one of.
_ONE = ("1", "auto", "-1", "[0]", "0,")


class AskedPrecision:
    """Listens to `torch.autocast`, accelerate (and with it transformers' Trainer) and Lightning while a script runs."""

    def __init__(self) -> None:
        self.found: str | None = None
        """`fp16` or `bf16`, once a module was called under it."""
        self.is_inside = False
        """Whether a module is being called."""
        self._open: list[str | None] = []
        """What those that are entered ask for, the innermost last: models turn it off for a line of their own."""
        self._opened_inside: str | None = None
        self._library: str | None = None
        """What a library was asked for that takes bfloat16 instead where there is no GPU."""
        self._undo: list[Callable[[], object]] = []
        self._is_listening = False

    def called(self) -> None:
        """A module was called just now."""
        self.found = (self._open[-1] if self._open else None) or self._opened_inside or self.found
        self._opened_inside = None

    def __enter__(self) -> AskedPrecision:
        ours = self
        self._is_listening = True

        def made(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            init(context, device_type, dtype, enabled, cache_enabled)
            # The context itself only says that it is off: CUDA is not here. One that is made inside of a module's call
            # is made again in the trace, and covers there what it covers here.
            wanted = enabled and not ours.is_inside
            context._asked = _NAMES.get(context.fast_dtype) if wanted else None

        def entered(context: Any) -> Any:
            asked = getattr(context, "_asked", None)
            asked = asked and (ours._library or asked)
            ours._open.append(asked)
            if ours.is_inside:
                ours._opened_inside = asked or ours._opened_inside
            return enter(context)

        def left(context: Any, *error: Any) -> Any:
            if ours._open:
                ours._open.pop()
            return leave(context, *error)

        init = self._replace(torch.autocast, "__init__", made)
        enter = self._replace(torch.autocast, "__enter__", entered)
        leave = self._replace(torch.autocast, "__exit__", left)
        after_import("accelerate.accelerator", self._hook_accelerate)
        after_import("transformers.training_args", self._hook_transformers)
        for name in _LIGHTNING:
            after_import(name, partial(self._hook_lightning, name))
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_listening = False
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _replace(self, owner: Any, name: str, ours: Any) -> Any:
        theirs = getattr(owner, name)
        setattr(owner, name, ours)
        self._undo.append(lambda: setattr(owner, name, theirs))
        return theirs

    def _hook_accelerate(self) -> None:
        """On a CPU it leaves out float16 without a word; bfloat16 it has, with all that it does around the model."""
        if not self._is_listening:
            return

        def made(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            # Older versions of transformers ask by the variable.
            asked = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
            if str(asked).lower() == "fp16":
                self._library, kwargs["mixed_precision"] = "fp16", "bf16"
            init(accelerator, *args, **kwargs)

        accelerator: Any = importlib.import_module("accelerate.accelerator").Accelerator
        init = self._replace(accelerator, "__init__", made)

    def _hook_transformers(self) -> None:
        """Its arguments are refused where the GPU that they ask for is not here."""
        if not self._is_listening:
            return
        arguments: Any = importlib.import_module("transformers.training_args")
        for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
            if hasattr(arguments, name):
                self._replace(arguments, name, lambda: True)

    def _hook_lightning(self, name: str) -> None:
        """The GPU it is told to use is the host here; float16 it then turns into bfloat16 itself."""
        if not self._is_listening:
            return

        def made(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if str(kwargs.get("precision")) in ("16", "16-mixed"):
                self._library = "fp16"
            if kwargs.get("accelerator") in ("gpu", "cuda"):
                devices, strategy = kwargs.get("devices", "auto"), kwargs.get("strategy", "auto")
                if str(devices) not in _ONE or strategy not in ("auto", "single_device"):
                    raise EstimateError(
                        "the script does not train on one GPU",
                        received=f"Trainer(devices={devices!r}, strategy={strategy!r})",
                        expected="a Lightning Trainer with one device",
                        hint='plan it with devices=1 and strategy="auto": each device holds the whole model, and '
                        "distributed training as much as the gradients on top",
                    )
                kwargs |= {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
            init(trainer, *args, **kwargs)

        init = self._replace(importlib.import_module(name).Trainer, "__init__", made)


HOST = torch.device("cpu")
# Processes that make data: the DataLoader's workers, pools and managers.
_DATA = ("torch.utils.data.", "multiprocessing.")


def on_host(args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Where the script asks for a GPU it gets the host: no GPU is touched, and the tracer puts everything on one."""

    def host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value

    if "device" in named:
        named["device"] = HOST if type(named["device"]) is int else host(named["device"])
    return tuple(host(value) for value in args), named


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """What scripts ask of CUDA besides its tensors; and no process of theirs trains."""
    quiet: dict[tuple[Any, str], Any] = {
        (torch.cuda, name): lambda *args, **kwargs: None
        for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
    }
    # Traces are forked off later: the threads of a pool would be missing there.
    quiet[torch, "set_num_threads"] = lambda number: None
    move = nn.Module.to

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        numbered = bool(args) and type(args[0]) is int
        return move(module, *(HOST, *args[1:]) if numbered else args, **kwargs)

    quiet[nn.Module, "to"] = moved
    quiet[BaseProcess, "start"] = _started(BaseProcess.start)
    with contextlib.ExitStack() as stack:
        for (owner, name), ours in quiet.items():
            stack.enter_context(patched(owner, name, ours))
        yield


def _started(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Starts workers that make data; a script that trains elsewhere would train for real there."""

    def started(process: Any) -> None:
        target = process._target
        if target is not None and not str(target.__module__).startswith(_DATA):
            raise EstimateError(
                "the script trains in processes of its own",
                received=f"it starts one for {target.__name__}()",
                expected="a training loop in the script's own process",
                hint=WRITE_BUILD,
            )
        start(process)

    return started
