"""What a PyTorch training holds, as trees of plain values and tensors; checked against a checkpoint, then loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from buoy._compat.torch import (
    COMPILED,
    EXTRA_STATE,
    is_fsdp_shard,
    loads_as_usual,
    original_module,
)
from buoy._compat.torchmetrics import is_metric
from buoy.checkpoint.encoding import CannotSave, Tensor
from buoy.checkpoint.store import DamagedCheckpoint, StoredTensor
from buoy.checkpoint.values import Value, leaves, refuse, shape_of, value_of
from buoy.errors import BuoyError
from buoy.torch.data.loader import is_loader
from buoy.torch.data.rng import generator_state, set_generator_state
from buoy.torch.state.forgotten import Beside
from buoy.torch.state.tensors import WORDS, kept, lent, no_bytes

_HEAVY = 9
_PARAMETER_SIZED = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "acc_delta",
    "sum",
)
# Optimizers that make their state in the first step: how many tensors of a parameter's size.
_STATE_OF_FIRST_STEP: dict[str, Callable[[dict[str, Any]], int]] = {
    "Adam": lambda group: 3 if group.get("amsgrad") else 2,
    "AdamW": lambda group: 3 if group.get("amsgrad") else 2,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "Adamax": lambda group: 2,
    "Adadelta": lambda group: 2,
    "SGD": lambda group: 1 if group.get("momentum") else 0,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
}


class Tracked(Value, Protocol):
    """Something whose state is a part of the run."""

    @property
    def tensor(self) -> Callable[[StoredTensor], torch.Tensor]:
        """How its stored tensors are to be made: `lent` or `kept`."""
        ...

    @property
    def weight(self) -> int:
        """Light things are loaded first: they may still refuse, and what they held before can be copied."""
        ...


def tracked(name: str, value: Any, others: Iterable[object] = ()) -> Tracked | None:
    """How this object is saved and loaded; None: a loader, whose place `batches` keeps.

    `others` that are tracked: the parameters of modules among them are these modules' own, wherever else they lie.
    """
    if is_loader(value):
        return None
    if isinstance(value, nn.Module):
        return _Module(name, value)
    if isinstance(value, torch.optim.Optimizer):
        for number, parameter in enumerate(p for group in value.param_groups for p in group["params"]):
            _refuse_shard(name, f"param_groups: parameter {number}", parameter, value)
        return _Optimizer(value)
    if isinstance(value, torch.Tensor):
        return _Tensor(value)
    owned = {id(p) for each in others if isinstance(each, nn.Module) for p in each.parameters()}

    def refill(there: object, stored: object) -> bool:
        return id(there) not in owned and _into_what_is_trained(there, stored)

    beside = value_of(value, generator_state, set_generator_state, refill)
    if beside is None:
        refuse(name, value, expected="a model, an optimizer, a tensor", owner="run")
    return _Beside(beside)


def load_all(states: dict[str, Any], things: dict[str, Tracked]) -> None:
    """Load what fits, or nothing: all are checked first, and a failure half-way is undone."""
    wrong = [f"{name}: {words}" for name, thing in things.items() for words in thing.mismatches(states[name])]
    if wrong:
        raise BuoyError(
            "the checkpoint belongs to another training; nothing was loaded",
            received=f"{len(wrong)} difference{'s' if len(wrong) > 1 else ''}",
            details=wrong[:10] + ([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []),
            expected="the same names, shapes and types as in the checkpoint",
            hint="build the same model and optimizer, or start a new run in another folder",
        )
    undo: list[tuple[Tracked, Any]] = []
    for name in sorted(things, key=lambda name: things[name].weight):
        thing = things[name]
        try:
            if thing.weight < _HEAVY:
                undo.append((thing, _own(thing.state())))
            thing.load(states[name])
        except DamagedCheckpoint:
            _undo(undo)
            raise
        except Exception as error:
            _undo(undo)
            raise BuoyError(
                f"{name} refused its state; nothing was loaded",
                received=f"{type(error).__name__}: {error}",
                expected="a load_state_dict() that takes what state_dict() gave",
                hint="start a new run in another folder if its class has changed",
            ) from error


def settings_of(things: Mapping[str, Tracked]) -> dict[str, list[dict[str, Any]]]:
    """With what the script has built its optimizers (learning rate, decay), by their names."""
    return {name: thing.settings for name, thing in things.items() if isinstance(thing, _Optimizer)}


def changed_settings(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a script says now of an optimizer that it said otherwise before, in words.

    >>> changed_settings([{"lr": 0.1}], [{"lr": 0.5}])
    ['lr=0.5 (was 0.1)']
    """
    found: dict[str, None] = {}
    for old, new in zip(before, now, strict=False):
        for name, value in new.items():
            if name in old and old[name] != value:
                found[f"{name}={value} (was {old[name]})"] = None
    return list(found)


def _undo(loaded: list[tuple[Tracked, Any]]) -> None:
    for thing, before in loaded:
        try:
            thing.load(before)
        except Exception:  # noqa: BLE001 - it is the one that refused
            continue


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif (inner := original_module(module)) is not None:
            module = inner
        else:
            return module


_SHELLS = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}


def inside_shell(value: Any) -> Any:
    """The user's own optimizer or scheduler in the shell that Hugging Face's accelerate makes; else the value itself.

    Known by its class: accelerate is never imported.
    """
    kind = type(value)
    is_shell = kind.__module__.startswith("accelerate.") and kind.__name__ in _SHELLS
    return getattr(value, _SHELLS[kind.__name__]) if is_shell else value


def parts(objects: Iterable[object]) -> tuple[list[nn.Module], list[torch.optim.Optimizer], list[Any]]:
    """The modules that are trained, the optimizers and the gradient scalers among what is tracked."""
    things = list(objects)
    return (
        [thing for thing in things if isinstance(thing, nn.Module) and not isinstance(thing, AveragedModel)],
        [thing for thing in things if isinstance(thing, torch.optim.Optimizer)],
        [thing for thing in things if isinstance(thing, torch.amp.GradScaler)],
    )


def calls_backward_itself(value: object) -> bool:
    """An optimizer whose step calls its closure: the first `backward` comes from inside its first step."""
    return isinstance(value, torch.optim.LBFGS)


def on_step(optimizer: object, call: Callable[[], None]) -> Any:
    """Have `call` called after each step of an optimizer; a handle with `remove()`, None for anything else."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    return optimizer.register_step_post_hook(lambda *_: call())


class _Module:
    tensor = staticmethod(lent)
    weight = _HEAVY

    def __init__(self, name: str, module: nn.Module) -> None:
        self._module = unwrapped(module)
        if is_metric(self._module):
            self._module.persistent(True)  # type: ignore[operator]  # its counts belong into its state_dict
        for key, value in [*self._module.named_parameters(), *self._module.named_buffers()]:
            _refuse_shard(name, key, value, self._module)
            if nn.parameter.is_lazy(value):
                raise CannotSave(
                    f"{name}.{key} has no shape yet",
                    received="a lazy module",
                    expected="a model that has seen a batch",
                    hint="run one batch through it before `track`",
                )
        self.beside = Beside(self._module)

    def state(self) -> object:
        return {key.replace(COMPILED, ""): value for key, value in self._module.state_dict().items()}

    def mismatches(self, state: Any) -> list[str]:
        mine: dict[str, Any] = self.state()  # type: ignore[assignment]
        wrong = [f"{key} is missing from the checkpoint" for key in mine if key not in state]
        reshaped = self.beside.reshaped
        wrong += [
            f"{key} is in the checkpoint, but not here"
            for key in state
            if key not in mine and key not in reshaped
        ]
        for key, value in mine.items():
            other = state.get(key) if key not in reshaped else None
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
                wrong += _differences(key, value, other)
        return wrong

    def load(self, state: Any) -> None:
        self.beside.make_room(state)
        names = {key.replace(COMPILED, ""): key for key in self._module.state_dict()}
        whole = {names[key]: value for key, value in state.items()}
        own_ways = tuple(_own_ways(self._module))
        for key, value in whole.items():
            if key.startswith(own_ways) or key.endswith(EXTRA_STATE) or not isinstance(value, torch.Tensor):
                whole[key] = _own(value)
        self._module.load_state_dict(whole)


class _Optimizer:
    tensor = staticmethod(kept)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.settings = [
            {name: value for name, value in group.items() if type(value) in (bool, int, float)}
            for group in optimizer.param_groups
        ]
        """As the script has built it, group by group."""

    @property
    def weight(self) -> int:
        return _HEAVY if self._optimizer.state else 1  # a new one has nothing yet that takes room

    def added_groups(self) -> int:
        """How many parameter groups it has got since."""
        return len(self._optimizer.param_groups) - len(self.settings)

    def state(self) -> object:
        return self._optimizer.state_dict()

    def expected(self) -> object:
        """The state with the tensors that its first step will make."""
        state = self._optimizer.state_dict()
        count = _STATE_OF_FIRST_STEP.get(type(self._optimizer).__name__)
        if state["state"] or count is None:
            return state
        return {
            **state,
            "state": [
                Tensor(WORDS[parameter.dtype], tuple(parameter.shape), no_bytes)
                for group in self._optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad and parameter.dtype in WORDS
                for _ in range(count(group))
            ],
        }

    def mismatches(self, state: Any) -> list[str]:
        mine = self._optimizer.param_groups
        theirs = state.get("param_groups", [])
        if len(mine) != len(theirs):
            return [
                f"has {len(mine)} parameter groups, the checkpoint {len(theirs)}: make all of them before it is loaded"
            ]
        wrong: list[str] = []
        for place, (group, other) in enumerate(zip(mine, theirs, strict=True)):
            if len(group["params"]) != len(other["params"]):
                wrong.append(
                    f"group {place} has {len(group['params'])} parameters, the checkpoint {len(other['params'])}"
                )
                continue
            for parameter, number in zip(group["params"], other["params"], strict=True):
                for key, value in state["state"].get(number, {}).items():
                    if key in _PARAMETER_SIZED and value is not None and value.shape != parameter.shape:
                        wrong.append(
                            f"{key} of parameter {number} is {shape_of(value)} in the checkpoint, "
                            f"the parameter is {shape_of(parameter)}"
                        )
        return wrong

    def load(self, state: Any) -> None:
        built = [dict(group) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state)
        for place, (before, group) in enumerate(zip(built, self._optimizer.param_groups, strict=True)):
            wrong = [name for name, value in before.items() if not _are_alike(value, group.get(name, ...))]
            if wrong:  # torch takes any, and its next step would fail
                raise ValueError(f"group {place} was saved without a usable {', '.join(wrong)}")
        # Read side by side with their parameters, which may lie otherwise than those that were saved.
        for group in self._optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                moments = self._optimizer.state.get(parameter, {})
                for name, value in moments.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        moments[name] = _lying_as(parameter, value)


class _Beside:
    """A value that people keep beside their models."""

    tensor = staticmethod(kept)
    weight = 0

    def __init__(self, value: Value) -> None:
        self.state, self.mismatches, self.load = value.state, value.mismatches, value.load


def _are_alike(built: object, saved: object) -> bool:
    """Whether a setting that was saved can stand for the one that the script has given."""
    if built is None or saved is None:
        return True
    if isinstance(built, tuple | list) and isinstance(saved, tuple | list):
        return len(built) == len(saved) and all(map(_are_alike, built, saved))
    figures = (int, float, torch.Tensor)
    return isinstance(saved, figures if isinstance(built, figures) else type(built))


def _lying_as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(
        value
    )


def _into_what_is_trained(there: object, stored: object) -> bool:
    """A tensor in a container that is trained itself: its optimizer holds the very same, so no other may replace it."""
    if not (isinstance(there, torch.Tensor) and there.is_leaf and there.requires_grad):
        return False
    if not isinstance(stored, torch.Tensor) or _differences("it", there, stored):
        return False
    with torch.no_grad():
        there.copy_(stored)
    return True


class _Tensor:
    tensor = staticmethod(lent)
    weight = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def state(self) -> object:
        return self._tensor

    def mismatches(self, state: Any) -> list[str]:
        return _differences("it", self._tensor, state) if isinstance(state, torch.Tensor) else ["is a tensor"]

    def load(self, state: Any) -> None:
        with torch.no_grad():
            self._tensor.copy_(state)


def _refuse_shard(name: str, key: str, tensor: torch.Tensor, owner: object) -> None:
    """A checkpoint has one copy of everything, rank 0's: of a shard that would be a part only."""
    if type(tensor).__name__ == "DTensor" or is_fsdp_shard(tensor):
        how = "DTensor: FSDP2, or tensor parallel" if type(tensor).__name__ == "DTensor" else "FSDP"
    elif type(owner).__name__ == "ZeroRedundancyOptimizer":
        how = "ZeRO"
    else:
        return
    raise CannotSave(
        f"{name}.{key} is sharded over several processes",
        received=f"{type(owner).__name__} ({how})",
        expected="a model that every rank holds whole (one process, or DistributedDataParallel), and its optimizer",
        hint="save sharded models and their optimizers with `torch.distributed.checkpoint`; leave them out of `track`",
    )


def _differences(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    if mine.shape != theirs.shape:
        return [f"{name} is {shape_of(theirs)} in the checkpoint, but {shape_of(mine)} here"]
    if mine.dtype != theirs.dtype:
        return [f"{name} is {theirs.dtype} in the checkpoint, but {mine.dtype} here"]
    return []


def _own_ways(module: nn.Module) -> Iterator[str]:
    """Where in a module's state_dict are the parts that load in a way of their own: they may keep what they are given.

    torch's own way copies parameters and buffers.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        yield ""
    for path, part in module.named_modules():
        if not loads_as_usual(part):
            yield f"{path}." if path else ""


def _own(value: Any) -> Any:
    """A copy; of a tensor that was computed (a hidden state with its graph) the values, since torch copies no graph."""
    computed = (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_leaf)
    return copy.deepcopy(value, {id(leaf): leaf.detach().clone() for leaf in computed})
