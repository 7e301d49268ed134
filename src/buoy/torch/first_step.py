"""An unmodified script, run up to its first optimizer step: what it called from its batch to its loss, to be traced.

Runs in a child process. Outermost module calls and the functions between them are written down with what they were
given; `backward` is not run, and at the first `optimizer.step` the script is left. `build` then returns the same step
for the tracer: the modules, the optimizer, the batch, and a loss that calls them in the same order.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from buoy.estimate.patience import in_time
from buoy.estimate.request import EstimateError
from buoy.torch.without_gpu import HOST, on_host, without_gpu

_found: _Script | None = None
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


class _Reached(BaseException):
    """The first optimizer step; not an Exception, so that the script's own handlers let it pass."""


@dataclass(slots=True)
class _Call:
    """One call of the step: a module or a function, and what it was given."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    sources: dict[int, _From]
    """Where its tensors came from then: what is changed in place comes from elsewhere later."""


@dataclass(frozen=True, slots=True)
class _From:
    """Where a tensor comes from: an earlier call's result."""

    call: int
    path: tuple[Any, ...]


def run(path: str, arguments: list[str], timeout: float) -> dict[str, Any]:
    """Run the script; returns `{"accumulate", "autocast"}`, raises EstimateError where no step came."""
    global _found
    script = _Script()
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    with script, without_gpu(script.compiled), in_time(timeout, "optimizer step"):
        try:
            runpy.run_path(path, run_name="__main__")
        except _Reached:
            pass
        except SystemExit as error:
            raise EstimateError(
                "the script ended before its first optimizer step", received=f"exit code {error.code}",
                expected="a training loop", hint="pass its arguments after `--`: `buoy plan train.py -- --data d`",
            ) from None  # fmt: skip
    if script.optimizer is None or script.loss is None:
        raise EstimateError(
            "the script came to its end without an optimizer step on a loss",
            received="no call of `optimizer.step` after `loss.backward`",
            expected="a PyTorch training loop",
            hint="give a function that returns model and batch: `buoy plan train.py:build`",
        )
    _found = script
    own = not isinstance(script.optimizer, torch.optim.Optimizer)
    return {
        "accumulate": max(1, script.backwards),
        "autocast": script.autocast,
        "says": "the script changes its weights itself: counted without an optimizer's memory"
        if own
        else None,
    }


def build() -> dict[str, Any]:
    """The script's step, for the tracer."""
    assert _found is not None, "run a script first"
    return _found.step()


class _Script(TorchFunctionMode):
    """What the script does with modules and tensors, from outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made: dict[int, _From] = {}
        self.kept: list[Any] = []  # tensors are known by id: they must stay
        self.loss: _From | None = None
        self.optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None
        self.backwards = 0
        self.autocast: str | None = None
        self.compiled: list[bool] = []
        self._asked: str | None = None
        self._weights: set[int] = set()
        self._depth = 0
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> _Script:
        call, enter, leave = nn.Module.__call__, torch.autocast.__enter__, torch.autocast.__exit__
        script = self

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if script._depth or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            script._depth += 1
            try:
                result = call(module, *args, **kwargs)
            finally:
                script._depth -= 1
            # What has no weights and is given none of our results makes data: torchvision's transforms are modules too.
            if script._derived((args, kwargs)) or next(module.parameters(), None) is not None:
                script._note(module, args, kwargs, result)
            return result

        def entered(context: Any) -> Any:
            # Without a GPU the script's own request for mixed precision on one is turned off: it is kept here.
            wanted = getattr(context, "fast_dtype", None)
            script._asked = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(wanted) if wanted else None
            return enter(context)  # type: ignore[no-untyped-call]

        def left(context: Any, *error: Any) -> Any:
            script._asked = None
            return leave(context, *error)

        nn.Module.__call__ = called  # type: ignore[method-assign]
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
        torch.autocast.__exit__ = left  # type: ignore[method-assign]
        handle = register_optimizer_step_pre_hook(self._stepping)
        self._undo = [
            handle.remove,
            lambda: setattr(nn.Module, "__call__", call),
            lambda: setattr(torch.autocast, "__enter__", enter),
            lambda: setattr(torch.autocast, "__exit__", leave),
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
            self.loss = self.made.get(id(args[0]))
            self._give_gradients()
            return None  # nothing is trained; the gradients' memory is the tracer's to find
        if self._weights and any(changed.data_ptr() in self._weights for changed in _changed(func, args)):
            # `p.data.add_(p.grad, alpha=-lr)`: an update without an optimizer
            self.optimizer = partial(torch.optim.SGD, lr=0.1, foreach=False)
            raise _Reached
        result = func(*args, **named)
        if not self._depth and torch.is_grad_enabled() and self._derived((args, named)):
            self._note(func, args, named, result)
        return result

    def _give_gradients(self) -> None:
        """Zeros, for scripts that use them themselves."""
        modules = [call.function for call in self.calls if isinstance(call.function, nn.Module)]
        for parameter in {p for module in modules for p in module.parameters() if p.requires_grad}:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._weights.add(parameter.data_ptr())

    def step(self) -> dict[str, Any]:
        """The calls that lead to the loss, as what a build function returns."""
        assert self.loss is not None and self.optimizer is not None
        needed = self._leading_to(self.loss)
        holder = nn.Module()
        for index in needed:
            module = self.calls[index].function
            if isinstance(module, nn.Module):
                holder.add_module(self._name(module, holder), module)
        _remembered_as_buffers(holder)
        batch, constants = self._given(needed, holder)
        parameters = {id(parameter): parameter for parameter in holder.parameters()}
        owned = {name: holder.get_parameter(name) for name, _ in holder.named_parameters()}
        names = {id(parameter): name for name, parameter in owned.items()}
        for parameter in parameters.values():
            parameter.grad = None
        calls, last = self.calls, self.loss

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            results: dict[int, Any] = {}

            def value(tensor: Any) -> Any:
                source = call.sources.get(id(tensor))
                if source is not None and source.call in results:
                    return _at(results[source.call], source.path)
                if id(tensor) in names:
                    return model.get_parameter(names[id(tensor)])
                if id(tensor) in constants:
                    return getattr(model, constants[id(tensor)])
                return batch.get(f"t{id(tensor)}", tensor)

            for index in needed:
                call = calls[index]
                args, kwargs = _mapped(call.args, value), _mapped(call.kwargs, value)
                results[index] = call.function(*args, **kwargs)
            return _at(results[last.call], last.path)  # type: ignore[no-any-return]

        if self.compiled:
            torch.compile(holder)  # said while building: estimated as if it were not
        return {"model": holder, "batch": batch, "optimizer": self.optimizer, "loss": loss}

    def _note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        index = len(self.calls)
        given = [id(tensor) for _, tensor in _tensors((args, kwargs))]
        sources = {each: self.made[each] for each in given if each in self.made}
        self.calls.append(_Call(function, args, kwargs, sources))
        if isinstance(function, nn.Module) and self._asked:
            self.autocast = self._asked
        self.kept.append((args, kwargs, result))
        for path, tensor in _tensors(result):
            self.made[id(tensor)] = _From(index, path)

    def _derived(self, values: Any) -> bool:
        return any(
            id(tensor) in self.made or (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
            for _, tensor in _tensors(values)
        )

    def _leading_to(self, loss: _From) -> list[int]:
        wanted, found = [loss.call], set()
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
            for _, tensor in _tensors((self.calls[index].args, self.calls[index].kwargs))
            if isinstance(tensor, nn.Parameter) and id(tensor) not in map(id, holder.parameters())
        }
        for key, parameter in loose.items():
            holder._parameters[f"weight{key}"] = (
                parameter  # as it is: while building, registering gives up its memory
            )
        inside = {id(value) for value in (*holder.parameters(), *holder.buffers())}
        outside = {
            id(tensor): tensor
            for index in needed
            for _, tensor in _tensors((self.calls[index].args, self.calls[index].kwargs))
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

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.loss is not None:
            self.optimizer = optimizer
            raise _Reached


def _changed(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensors changed by `add_`, `-=` and `p.data = ...`; none by `__get__`, which reads `p.grad`."""
    name: str = func.__name__
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if not in_place and func is not torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return []
    return [tensor for _, tensor in _tensors(args[0])]


def _remembered_as_buffers(holder: nn.Module) -> None:
    """Tensors that a module keeps as plain attributes, such as a mask made in its first call, go where it goes."""
    for module in holder.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from _tensors(inner, (*path, index))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(inner, change) for inner in value)
    if isinstance(value, Mapping):  # a tokenizer's batch
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
