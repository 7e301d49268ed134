"""An unmodified script, run up to its first optimizer step: what it called from its batch to its loss, to be traced.

Runs in a child process. Outermost module calls and the functions between them are written down with what they were
given; `backward` is not run. At the first `optimizer.step` the script is left; where it built several optimizers, once
each came to its step. `build` then returns the same step for the tracer: the modules, the optimizers, the batch, and
losses that call them in the same order.

A script's calls and the tensors in what they are given and return: found, replaced, and known by where they lie.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from buoy._compat.torch import parameters_of
from buoy.estimate.child import WRITE_BUILD, EstimateError, in_time
from buoy.estimate.tracing.build import eager_instead_of_compiled
from buoy.estimate.tracing.steps import Turn
from buoy.torch.plan.gpu import HOST, AskedPrecision, on_host, without_gpu
from buoy.units import format_bytes


@dataclass(slots=True)
class Call:
    """One call of the step: a module or a function, and what it was given."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    sources: dict[int, From]
    """Where its tensors came from then: what is changed in place comes from elsewhere later."""


@dataclass(frozen=True, slots=True)
class From:
    """Where a tensor comes from: an earlier call's result."""

    call: int
    path: tuple[Any, ...]


@dataclass(slots=True)
class SeenTurn:
    """An optimizer's step and the losses that were differentiated for it."""

    optimizer: torch.optim.Optimizer
    losses: list[tuple[From, bool]]
    """Each with whether its graph was kept."""
    calls: int
    """How many calls had been made by then."""


def remembered_as_buffers(holder: nn.Module) -> None:
    """Tensors that a module keeps as plain attributes, such as a mask made in its first call, go where it goes."""
    for module in holder.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor in nested tuples, lists and mappings, with the way to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, (*path, index))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: mapped(inner, change) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(inner, change) for inner in value)
    if isinstance(value, Mapping):  # a tokenizer's batch
        return {key: mapped(inner, change) for key, inner in value.items()}
    return value


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """What lies at the end of a way."""
    for key in path:
        value = value[key]
    return value


def modules_alive() -> list[nn.Module]:
    """The modules that exist while the script is at its step; a part of another one is not named itself."""
    gc.collect()
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def not_stepped(
    built: list[weakref.ref[torch.optim.Optimizer]], stepped: list[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The optimizers that exist and train something which none that stepped does: one around another is the other."""
    trained = {id(parameter) for optimizer in stepped for parameter in _parameters(optimizer)}
    alive = [optimizer for made in built if (optimizer := made()) is not None]
    return [
        optimizer
        for optimizer in alive
        if any(p.requires_grad and id(p) not in trained for p in _parameters(optimizer))
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hold_others(holder: nn.Module, others: list[nn.Module]) -> list[str]:
    """Let the holder have the weights that exist besides the step's; returns what to say about them."""
    inside = {id(value) for value in (*holder.parameters(), *holder.buffers())}
    names: dict[str, int] = {}
    for module in others:
        for value in (*module.parameters(), *module.buffers()):
            if id(value) not in inside:
                inside.add(id(value))
                holder.register_buffer(f"other{len(inside)}", value.detach(), persistent=False)
                size = value.numel() * value.element_size()
                names[type(module).__name__] = names.get(type(module).__name__, 0) + size
    if not names:
        return []
    said = ", ".join(f"{name} {format_bytes(size)}" for name, size in names.items())
    return [f"modules other than the step's own are counted as held on the device: {said}"]


_found: _Script | None = None
# How many further steps a script is followed, where an optimizer has not stepped yet.
_REPEATED_STEPS = 8


class _Reached(BaseException):
    """The first optimizer step; not an Exception, so that the script's own handlers let it pass."""


def run(path: str, arguments: list[str], timeout: float) -> dict[str, Any]:
    """Run the script; returns `{"accumulate", "autocast"}`, raises EstimateError where no step came."""
    global _found
    script = _Script()
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    eager = eager_instead_of_compiled(script.notes)
    with script, script.precision, without_gpu(), eager, in_time(timeout, "optimizer step"):
        try:
            runpy.run_path(path, run_name="__main__")
        except _Reached:
            pass
        except (Exception, SystemExit) as error:
            if script.turns:
                pass  # the step is known: what came after it only looked for the other optimizers'
            elif not isinstance(error, SystemExit):
                raise
            else:
                raise EstimateError(
                    "the script ended before its first optimizer step", received=f"exit code {error.code}",
                    expected="a training loop", hint="pass its arguments after `--`: `buoy plan train.py -- --data d`",
                ) from None  # fmt: skip
    if script.optimizer is None or script.loss is None:
        raise EstimateError(
            "the script ended without an optimizer step on a loss",
            received="no call of `optimizer.step` after `loss.backward`",
            expected="a PyTorch training loop with an optimizer that steps",
            hint=WRITE_BUILD,
        )
    if script.idle:
        raise EstimateError(
            "an optimizer of the script was not seen to step",
            received=", ".join(type(optimizer).__name__ for optimizer in script.idle),
            expected="optimizers that each step within the first batches",
            hint=f"make it only where it is used, or {WRITE_BUILD}",
        )
    _found = script
    return {
        "accumulate": 1 if script.takes_turns else max(1, script.backwards),
        "autocast": script.precision.found,
    }


def build() -> dict[str, Any]:
    """The script's step, for the tracer."""
    assert _found is not None, "run a script first"
    return _found.step()


class _Script(TorchFunctionMode):
    """What the script does with modules and tensors, from outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: dict[int, From] = {}
        self.kept: list[Any] = []  # tensors are known by id: they must stay
        self.loss: From | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.backwards = 0
        self.turns: list[SeenTurn] = []
        self.built: list[weakref.ref[torch.optim.Optimizer]] = []
        self.idle: list[torch.optim.Optimizer] = []
        """Optimizers that were built and have not stepped yet."""
        self.others: list[nn.Module] = []
        """Modules with weights that the step does not call: a moving average, a teacher."""
        self.notes: list[str] = []
        self._losses: list[tuple[From, bool]] = []
        self._repeated = 0
        self.precision = AskedPrecision()
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> _Script:
        call = nn.Module.__call__
        init = torch.optim.Optimizer.__init__
        script = self

        def built(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            script.built.append(weakref.ref(optimizer))

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if script.precision.is_inside or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            script.precision.is_inside = True
            try:
                result = call(module, *args, **kwargs)
            finally:
                script.precision.is_inside = False
            # What has no weights and is given none of our results makes data: torchvision's transforms are modules too.
            if script._derived((args, kwargs)) or next(module.parameters(), None) is not None:
                script._note(module, args, kwargs, result)
            return result

        nn.Module.__call__ = called  # type: ignore[method-assign]
        torch.optim.Optimizer.__init__ = built  # type: ignore[method-assign, assignment]
        handle = register_optimizer_step_pre_hook(self._stepping)
        self._undo = [
            handle.remove,
            lambda: setattr(nn.Module, "__call__", call),
            lambda: setattr(torch.optim.Optimizer, "__init__", init),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, named = on_host(args, dict(kwargs or {}))
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], HOST, *args[2:])  # the number of a GPU
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.backward:
            self.backwards += 1
            self.loss = self.made.get(id(args[0])) or (self.loss if self.turns else None)
            if id(args[0]) in self.made:
                kept = named.get("retain_graph", args[2] if len(args) > 2 else None)
                self._losses.append((self.made[id(args[0])], bool(kept)))
            self._let_go_of_accumulated()
            self._give_gradients()
            return None  # nothing is trained; the gradients' memory is the tracer's to find
        result = func(*args, **named)
        if not self.precision.is_inside and torch.is_grad_enabled() and self._derived((args, named)):
            self._note(func, args, named, result)
        return result

    def _give_gradients(self) -> None:
        """Zeros, for scripts that use them themselves."""
        modules = [call.function for call in self.calls if isinstance(call.function, nn.Module)]
        for parameter in {p for module in modules for p in module.parameters() if p.requires_grad}:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> dict[str, Any]:
        """The calls that lead to the loss, as what a build function returns."""
        assert self.loss is not None and self.optimizer is not None
        turns = self.turns if self.takes_turns else []
        ends = [loss for turn in turns for loss, _ in turn.losses] or [self.loss]
        needed = self._leading_to(ends)
        holder = nn.Module()
        for index in needed:
            module = self.calls[index].function
            if isinstance(module, nn.Module):
                holder.add_module(self._name(module, holder), module)
        remembered_as_buffers(holder)
        batch, constants = self._given(needed, holder)
        parameters = {id(parameter): parameter for parameter in holder.parameters()}
        owned = {name: holder.get_parameter(name) for name, _ in holder.named_parameters()}
        names = {id(parameter): name for name, parameter in owned.items()}
        for parameter in parameters.values():
            parameter.grad = None
        calls = self.calls
        results: dict[int, Any] = {}

        def loss_at(number: int, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            """The calls up to the loss of this number, but for those made for an earlier one."""
            if number == 0:
                results.clear()

            def value(tensor: Any) -> Any:
                source = call.sources.get(id(tensor))
                if source is not None and source.call in results:
                    return at(results[source.call], source.path)
                if id(tensor) in names:
                    return model.get_parameter(names[id(tensor)])
                if id(tensor) in constants:
                    return getattr(model, constants[id(tensor)])
                return batch.get(f"t{id(tensor)}", tensor)

            for index in needed:
                if index <= ends[number].call and index not in results:
                    call = calls[index]
                    args, kwargs = mapped(call.args, value), mapped(call.kwargs, value)
                    results[index] = call.function(*args, **kwargs)
            found: torch.Tensor = at(results[ends[number].call], ends[number].path)
            later = [end.call for end in ends[number + 1 :]]
            used = {
                source.call
                for index in needed
                if later and ends[number].call < index <= max(later)
                for source in calls[index].sources.values()
            }
            for index in set(results) - used - set(later):
                del results[index]
            return found

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return sum(loss_at(number, model, batch) for number in range(len(ends)))  # type: ignore[return-value]

        step: dict[str, Any] = {"model": holder, "batch": batch, "optimizer": self.optimizer, "loss": loss}
        numbers = iter(range(len(ends)))
        step["turns"] = [
            Turn([(partial(loss_at, next(numbers)), kept) for _, kept in turn.losses], turn.optimizer)
            for turn in turns
        ]
        step["notes"] = self.notes + hold_others(holder, self.others)
        return step

    def _note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        index = len(self.calls)
        given = [id(tensor) for _, tensor in tensors_in((args, kwargs))]
        sources = {each: self.made[each] for each in given if each in self.made}
        self.calls.append(Call(function, args, kwargs, sources))
        if isinstance(function, nn.Module):
            self.precision.called()
        self.kept.append((args, kwargs, result))
        for path, tensor in tensors_in(result):
            self.made[id(tensor)] = From(index, path)

    def _derived(self, values: Any) -> bool:
        return any(
            id(tensor) in self.made or (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
            for _, tensor in tensors_in(values)
        )

    @property
    def takes_turns(self) -> bool:
        """Whether the step has more than one optimizer."""
        return len(self.turns) > 1

    def _leading_to(self, ends: list[From]) -> list[int]:
        wanted, found = [end.call for end in ends], set()
        while wanted:
            index = wanted.pop()
            if index in found:
                continue
            found.add(index)
            wanted += [source.call for source in self.calls[index].sources.values()]
        return sorted(found)

    def _given(self, needed: list[int], holder: nn.Module) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
        """Tensors from outside: those with the batch's first dimension, and constants, kept as buffers.

        Weights that were used without calling their module become the holder's own.
        """
        loose = {
            id(tensor): tensor
            for index in needed
            for _, tensor in tensors_in((self.calls[index].args, self.calls[index].kwargs))
            if isinstance(tensor, nn.Parameter) and id(tensor) not in map(id, holder.parameters())
        }
        for key, parameter in loose.items():
            parameters_of(holder)[f"weight{key}"] = (
                parameter  # as it is: while building, registering gives up its memory
            )
        inside = {id(value) for value in (*holder.parameters(), *holder.buffers())}
        outside = {
            id(tensor): tensor
            for index in needed
            for _, tensor in tensors_in((self.calls[index].args, self.calls[index].kwargs))
            if id(tensor) not in inside and id(tensor) not in self.calls[index].sources
        }
        size = next((tensor.shape[0] for tensor in outside.values() if tensor.dim()), None)
        batch = {
            f"t{key}": tensor for key, tensor in outside.items() if tensor.dim() and tensor.shape[0] == size
        }
        constants = {key: f"constant{key}" for key in outside if f"t{key}" not in batch}
        for key, name in constants.items():
            holder.register_buffer(name, outside[key].detach())
        return batch, constants

    def _name(self, module: nn.Module, holder: nn.Module) -> str:
        taken = dict(holder.named_children())
        name = type(module).__name__.lower()
        return next(
            n for n in (name, *(f"{name}{i}" for i in range(2, 1000))) if taken.get(n, module) is module
        )

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Before a step; where its loss is made in a closure (Lightning, LBFGS), after that."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._come_to_step(optimizer)
            return None

        def closed() -> Any:
            result = closure()
            self._come_to_step(optimizer)
            return result

        return (args[0], closed, *args[2:]), {name: kwargs[name] for name in kwargs if name != "closure"}

    def _come_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.loss is None:
            return
        before = next((turn for turn in self.turns if turn.optimizer is optimizer), None)
        if before is not None:
            self._repeated += 1
            if not self._losses:
                before = None  # it steps again on what it had
            else:
                self.turns.remove(before)
        if before is not None or not any(turn.optimizer is optimizer for turn in self.turns):
            self.turns.append(SeenTurn(optimizer, self._losses, len(self.calls)))
        self._losses = []
        if before is not None:
            needed = set(self._leading_to([loss for turn in self.turns for loss, _ in turn.losses]))
            self._forget(set(range(before.calls)) - needed)
        if self.optimizer is None:
            self.optimizer = optimizer
        self.idle = not_stepped(self.built, [turn.optimizer for turn in self.turns])
        if not self.idle or self._repeated >= _REPEATED_STEPS:
            self.others = modules_alive()
            raise _Reached
        # Nothing is trained while the others are waited for: without gradients a step changes nothing.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = None

    def _let_go_of_accumulated(self) -> None:
        """Only the last of the losses accumulated for one optimizer is traced, and each holds a batch's activations."""
        alive = not_stepped(self.built, [])
        if len(self._losses) < 2 or self.turns or not_stepped(self.built, alive[:1]):
            return
        *passed, last = self._losses
        self._losses = [loss for loss in passed if loss[1]] + [
            last
        ]  # a graph that was kept may be used again
        needed = set(self._leading_to([loss for loss, _ in self._losses]))
        gone = set(self._leading_to([loss for loss, kept in passed if not kept])) - needed
        for index, call in enumerate(self.calls):
            # What was made of them besides the loss (how many were right) holds them too.
            if index not in needed and any(source.call in gone for source in call.sources.values()):
                gone.add(index)
        self._forget(gone)

    def _forget(self, gone: set[int]) -> None:
        """Let go of calls that no loss needs any more."""
        self.made = {key: source for key, source in self.made.items() if source.call not in gone}
        for index in gone:
            self.kept[index] = None
            self.calls[index] = Call(_forgotten, (), {}, {})


def _forgotten(*_: Any, **__: Any) -> None:
    raise AssertionError("a call that no loss needs was asked for")
