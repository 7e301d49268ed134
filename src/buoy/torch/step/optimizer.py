"""An optimizer's step that happens whole or has not happened.

With room to spare the step runs as it is. Where memory is short, it is done parameter by parameter, each with a
copy to go back to. Copies of everything at every step would cost more than the step itself.

A gradient scaler whose own small allocations may fail: what has changed nothing yet is simply done again.

The way back from an optimizer's step that failed: copies of tensors, and plain values as they were.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.optim import Optimizer

from buoy._compat import torch as compat
from buoy.flight.last_words import leave_out_ours
from buoy.microbatch.errors import BadLoss, OutOfMemory, TornStep, is_oom
from buoy.torch.memory.device import release

if TYPE_CHECKING:
    from buoy.torch.step.transaction import Transaction

_NOT_ITS_OWN = ("state", "param_groups", "step", *compat.OPTIMIZER_MARKS)
"""Kept elsewhere, or written by what is around the step."""
_DEEP = 6
"""Containers in containers: one that holds itself has no end."""


class PlainValues:
    """What an optimizer counts and remembers besides tensors: options of groups, state, attributes.

    Tensors stay the ones they were; what is in them is not looked at.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], groups: list[dict[str, Any]]
    ) -> None:
        self._state = optimizer.state
        self._parameters = parameters
        self._known = {
            parameter: _kept(self._state[parameter]) for parameter in parameters if parameter in self._state
        }
        self._back = [_kept(group, besides=("params",)) for group in groups]
        self._back.append(_kept(vars(optimizer), besides=_NOT_ITS_OWN))

    def __call__(self) -> None:
        """As they were."""
        for parameter in self._parameters:
            if parameter in self._known:
                self._state[parameter] = self._known[parameter]()
            else:
                self._state.pop(parameter, None)
        for back in self._back:
            back()


class Undo:
    """Copies of some parameters and all that belongs to them, and the way back."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        groups: list[dict[str, Any]],
        whole: bool,
        copies: bool = True,
    ) -> None:
        self._plain = PlainValues(optimizer, parameters, groups)
        found: list[Any] = list(parameters)
        # A fused step with a gradient scale divides the gradients too; a closure makes others.
        self._grads = [(parameter, parameter.grad) for parameter in parameters] if whole else []
        if whole or getattr(optimizer, "grad_scale", None) is not None:
            found += [parameter.grad for parameter in parameters]
        state = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
        if whole and not is_lbfgs(optimizer):
            found += tensors_in([state, own_values(optimizer)])
        else:  # of the many gradients that LBFGS keeps in lists none is ever written to
            found += [value for values in state for value in values.values()]
        unique = {id(tensor): tensor for tensor in found if copies and isinstance(tensor, torch.Tensor)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in unique.values()]

    def __call__(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
        for parameter, gradient in self._grads:
            parameter.grad = gradient
        self._plain()


def is_lbfgs(optimizer: Optimizer) -> bool:
    """PyTorch's only optimizer that computes the loss several times in one step."""
    return isinstance(optimizer, torch.optim.LBFGS)


def own_values(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer of somebody else may count or remember in."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_ITS_OWN}


def tensors_in(value: Any, depth: int = _DEEP) -> Iterator[torch.Tensor]:
    """Every tensor in these containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)


def _kept(value: Any, besides: tuple[str, ...] = (), depth: int = _DEEP) -> Callable[[], Any]:
    """A function that gives the same object back, with what it holds now."""
    if not depth:
        return lambda: value
    if isinstance(value, dict):
        held = {key: _kept(item, (), depth - 1) for key, item in value.items() if key not in besides}

        def dict_back() -> Any:
            for key in [key for key in value if key not in held and key not in besides]:
                del value[key]
            for key, back in held.items():
                value[key] = back()
            return value

        return dict_back
    if isinstance(value, (list, deque)):
        items = [_kept(item, (), depth - 1) for item in value]

        def list_back() -> Any:
            then = [back() for back in items]
            value.clear()
            value.extend(then)
            return value

        return list_back
    if type(value) is set:
        members = set(value)

        def set_back() -> Any:
            value.clear()
            value.update(members)
            return value

        return set_back
    return lambda: value


_TRIES = 3
_PATIENCE = 32  # steps
_SMALLER = "a smaller optimizer (SGD, Adafactor), or fewer trained parameters"


def make_atomic(optimizer: Optimizer, guard: Transaction) -> None:
    """Replace this optimizer's `step`; the second time only the guard is another."""
    plain = optimizer.step
    known = getattr(plain, "atomic", None)
    if known is not None:
        known.guard_by(guard)
        return
    atomic = _AtomicStep(optimizer, plain, guard)

    # A method, since schedulers take `step.__func__`; and with the attributes by which they know their own wrapper.
    @functools.wraps(getattr(plain, "__func__", plain))
    def step(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return atomic(closure, args, kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    step.atomic = atomic  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


class _AtomicStep:
    def __init__(self, optimizer: Optimizer, plain: Callable[..., Any], guard: Transaction) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._guards: list[ref[Transaction]] = []
        self.guard_by(guard)
        self._known = (0, -1, -1)
        self._tensors: list[torch.Tensor] = []
        self._keys: set[torch.Tensor] = set()
        self._committed = 0
        self._separable = _is_separable(optimizer)
        self._need: int = 0
        self._is_stateless = False
        self._short = 0  # steps in a row without room for copies
        # Somebody else's wrapper does more than the class's step: it is only ever called whole.
        self._foreign = "step" in vars(optimizer) and not compat.is_wrapped_by_scheduler(plain)

    def guard_by(self, guard: Transaction) -> None:
        """The newest run is asked and told; of none may a loss be under way."""
        self._guard = guard
        self._guards = [known for known in self._guards if known() not in (None, guard)] + [ref(guard)]

    def __call__(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        guard = self._guard
        for known in self._guards:
            each = known()
            if each is not None and each.inside:
                raise self._stepped_inside()
        separable = self._separable
        loss = None
        if closure is not None and separable:  # these call it once, at the start
            with torch.enable_grad():
                loss = closure()
            closure = None
        passed = () if closure is None else (closure,)
        self._look()
        first = self._tensors[0]
        if guard.has_room(first, self._need):
            made = self._done(passed, args, kwargs, is_roomy=True)
        else:
            with guard.limited(first):
                made = self._done(passed, args, kwargs, is_roomy=False)
        return loss if loss is not None else made

    def _stepped_inside(self) -> BadLoss:
        in_backward = compat.is_in_backward()
        return BadLoss("a gradient hook steps the optimizer inside the backward pass" if in_backward else
                       "the loss function steps the optimizer itself",
                       received=f"{type(self._optimizer).__name__}.step() inside run.backward",
                       expected="only the gradient" if in_backward else "only the loss",
                       hint="step after run.backward(...)")  # fmt: skip

    def _done(self, passed: Any, args: Any, kwargs: Any, is_roomy: bool) -> Any:
        """Whole, or parameter by parameter."""
        optimizer, guard, separable = self._optimizer, self._guard, self._separable
        hooked, makes_state = False, self._makes_state()
        # The step that makes state is the one that may not fit; by parameter it takes no more than whole. A fused one
        # leaves no mark on what it has written, so that nobody could say how far it came.
        is_unmarked = makes_state and any(group.get("fused") for group in optimizer.param_groups)
        if makes_state and not self._foreign:
            is_plain = is_roomy and not is_unmarked
        else:
            is_plain = is_roomy or not self._has_room_for_copies()
        if is_plain and not is_lbfgs(optimizer):  # whose step takes far longer than copies do
            # What the step may change, and by version counters whether it did: far cheaper than a copy.
            tensors, versions, known = self._tensors, compat.versions_of(self._tensors), self._keys
            plain = (
                None
                if separable
                else PlainValues(optimizer, list(_parameters(optimizer)), optimizer.param_groups)
            )
            error: BaseException
            try:
                return self._plain(*passed, *args, **kwargs)
            except Exception as caught:  # handled below, outside, where its frames can be let go
                if not is_oom(caught):
                    raise
                error = caught
            if is_unmarked or versions != compat.versions_of(tensors):
                room = (
                    "although there was room before"
                    if is_roomy
                    else "without room for a copy to roll back to"
                )
                raise TornStep(
                    f"{type(optimizer).__name__}.step() ran out of memory half-way, {room}",
                    received=str(error).split("\n")[0], expected="a step that is done whole",
                    hint="weights and optimizer state are partly updated: resume from the last checkpoint",
                ) from error  # fmt: skip
            for parameter in [parameter for parameter in optimizer.state if parameter not in known]:
                del optimizer.state[parameter]
            if plain is not None:
                plain()
            hooked = not self._foreign  # the hooks before the step have run; those after it have not
            release(error)
            guard.recovered("optimizer step")
            del error
        if self._foreign:
            return self._tried(list(_parameters(optimizer)), optimizer.param_groups,
                               functools.partial(self._plain, *passed, *args, **kwargs))  # fmt: skip
        return self._unwrapped(passed, args, kwargs, separable, hooked)

    def _look(self) -> None:
        """Once per optimizer, state and gradients being what they were: what a step changes, and needs.

        Somebody else's may keep tensors anywhere, and others at every step.
        """
        state = self._optimizer.state
        trained = 0
        for group in self._optimizer.param_groups:
            trained += len(group["params"])
        key = (id(state), len(state), trained)
        if key != self._known or not self._separable:
            kept = [v for values in state.values() for v in values.values() if isinstance(v, torch.Tensor)]
            if not self._separable:
                kept = list(tensors_in([*state.values(), own_values(self._optimizer)]))
            self._tensors, self._known = [*_parameters(self._optimizer), *kept], key
            self._keys, self._need = set(state), _need(self._optimizer)
            self._is_stateless = not self._separable or expected_state(self._optimizer) == 0

    def _unwrapped(self, passed: Any, args: Any, kwargs: Any, separable: bool, hooked: bool) -> Any:
        """The class's own step between its hooks, which run once however often the step is tried."""
        optimizer = self._optimizer
        compat.mark_stepped(optimizer)
        if not hooked:
            _run_hooks(optimizer, "pre", args, kwargs)
        raw = functools.partial(_raw_step(optimizer), optimizer, *passed, *args, **kwargs)
        if separable:
            made = self._by_parameter(raw)
        else:  # parameters that depend on each other, or code that we do not know
            made = self._tried(list(_parameters(optimizer)), optimizer.param_groups, raw)
        _run_hooks(optimizer, "post", args, kwargs)
        return made

    def _by_parameter(self, step: Callable[[], Any]) -> Any:
        """Each parameter alone, with a copy of it and its state while it is changed.

        The largest comes first: if it does not fit, nothing is done yet.
        """
        optimizer = self._optimizer
        groups = optimizer.param_groups
        self._committed = 0
        made, state, known = None, optimizer.state, set(optimizer.state)
        trained = [(each, group) for group in groups for each in group["params"] if each.grad is not None]
        for parameter, group in sorted(trained, key=lambda pair: -_bytes(pair[0])):
            parameters = group["params"]
            try:
                optimizer.param_groups, group["params"] = [group], [parameter]
                made = self._tried([parameter], [group], step)
                self._committed += 1
            finally:
                optimizer.param_groups, group["params"] = groups, parameters
        for parameter in [each for each, _ in trained if each in state and each not in known]:
            state[parameter] = state.pop(parameter)  # in the order that a whole step leaves
        return made

    def _tried(
        self, parameters: list[torch.Tensor], groups: list[dict[str, Any]], step: Callable[[], Any]
    ) -> Any:
        for number in range(_TRIES):
            undo = None
            error: BaseException
            way_back = self._guard.way_back() if is_lbfgs(self._optimizer) else None
            # A last try without a copy, as in the plain loop. What has no state yet is mostly written to at the very
            # end of its step, when it has had all its memory; and what it needs at least is asked for before.
            is_bare = number == _TRIES - 1 and self._is_alone(parameters)
            versions = compat.versions_of(parameters)
            try:
                undo = Undo(
                    self._optimizer, parameters, groups, whole=not self._separable, copies=not is_bare
                )
                if is_bare:
                    _ = [torch.empty_like(parameters[0]) for _ in range(_least(self._optimizer))]
                    del _
                return step()
            except BaseException as caught:  # noqa: BLE001 - Ctrl-C must not leave half a step either
                error = caught
            if undo is not None:
                undo()
            if way_back is not None:
                way_back()
            del undo, way_back
            if not is_oom(error):
                raise error
            release(error)
            if number < _TRIES - 1:
                self._guard.recovered("optimizer step")
        name, first = type(self._optimizer).__name__, str(error).split("\n")[0]
        if self._committed or (is_bare and versions != compat.versions_of(parameters)):
            raise TornStep(f"{name}.step() ran out of memory after {self._committed} of its parameters",
                           received=first, expected="room for one parameter's update and a copy",
                           hint="weights are partly updated: resume from the last checkpoint") from error  # fmt: skip
        alone = ", not even for one parameter" if self._separable else ""
        expected = "room for one parameter's update and a copy" if alone else "room for the update and a copy"
        raise OutOfMemory(f"{name}.step() does not fit{alone}", received=first, expected=expected,
                          hint=_SMALLER) from error  # fmt: skip

    def _is_alone(self, parameters: list[torch.Tensor]) -> bool:
        return self._separable and len(parameters) == 1 and parameters[0] not in self._optimizer.state

    def _makes_state(self) -> bool:
        """Whether this step is one that does: the first, or that of a layer that was thawed."""
        state = self._optimizer.state
        if self._is_stateless or len(state) == self._known[2]:
            return False
        return any(each.grad is not None and each not in state for each in _parameters(self._optimizer))

    def _has_room_for_copies(self) -> bool:
        """Ask now for what the largest parameter's copies will need, rather than find out half-way."""
        need = _need_with_copies(self._optimizer)
        # Collecting garbage takes longer than a step: where it did not help, it is not asked for at every one.
        tries = 1 if self._short % _PATIENCE else _TRIES
        for number in range(tries):
            error: BaseException
            try:
                torch.empty(need, dtype=torch.uint8, device=_device(self._optimizer))
                self._short = 0
                return True
            except Exception as caught:
                if not is_oom(caught):
                    raise
                error = caught
            if number < tries - 1:
                release(error)
            del error
        self._short += 1
        return False


def _is_separable(optimizer: Optimizer) -> bool:
    """Whether stepping one parameter after the other is the same as stepping all: torch's own, but for LBFGS."""
    code = inspect.unwrap(type(optimizer).step)
    return code.__module__.startswith("torch.optim.") and type(optimizer).__name__ != "LBFGS"


def _raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The class's own step without torch's wrapper that runs the hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _run_hooks(optimizer: Optimizer, when: str, args: Any, kwargs: Any) -> None:
    for hook in compat.step_hooks(optimizer, when):
        hook(optimizer, (optimizer, *args), kwargs)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _device(optimizer: Optimizer) -> torch.device:
    return next(_parameters(optimizer)).device


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _need(optimizer: Optimizer) -> int:
    """An upper bound of what a step allocates."""
    sizes = [_bytes(parameter) for parameter in _parameters(optimizer) if parameter.grad is not None]
    together = optimizer.defaults.get("foreach") or (
        optimizer.defaults.get("foreach") is None and _device(optimizer).type != "cpu"
    )
    need = 4 * max(sizes, default=0) + (3 * sum(sizes) if together else 0)
    return need + (0 if optimizer.state else expected_state(optimizer))


def _need_with_copies(optimizer: Optimizer) -> int:
    """What a step parameter by parameter takes at its worst: new state, and copies and temporaries of one parameter."""
    trained = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
    if not trained:
        return 0
    largest = max(trained, key=_bytes)
    kept = [value for value in optimizer.state.get(largest, {}).values() if isinstance(value, torch.Tensor)]
    return (
        3 * _bytes(largest) + sum(map(_bytes, kept)) + (0 if optimizer.state else expected_state(optimizer))
    )


def _least(optimizer: Optimizer) -> int:
    """How many tensors like a parameter its first step makes at least."""
    total = sum(_bytes(parameter) for parameter in _parameters(optimizer) if parameter.grad is not None)
    is_adam = type(optimizer).__name__ in ("Adam", "AdamW") and not optimizer.defaults.get("fused")
    return expected_state(optimizer) // max(1, total) + is_adam  # and a denominator


def expected_state(optimizer: Optimizer) -> int:
    """Bytes of state that the first step will make; three times the parameters where nothing is known."""
    name, defaults = type(optimizer).__name__, optimizer.defaults
    if name == "SGD" and not defaults.get("momentum"):
        return 0
    total = sum(_bytes(parameter) for parameter in _parameters(optimizer) if parameter.grad is not None)
    if name == "SGD":
        return total
    if name == "Adafactor":
        return total // 8
    return total * (
        3 if defaults.get("amsgrad") or name not in ("Adam", "AdamW", "RMSprop", "Adagrad") else 2
    )


def make_scaler_safe(scaler: Any, optimizers: list[Optimizer], guard: Transaction) -> None:
    """Replace the methods of this scaler that allocate; a second time changes nothing.

    `step` needs no more: what it calls of ours is safe by itself, and it changes nothing before.
    """
    for name in ("unscale_", "step", "update"):
        plain = getattr(scaler, name, None)
        if plain is not None and not hasattr(plain, "is_safe"):
            setattr(scaler, name, _repeated(scaler, plain, optimizers, guard))


def _repeated(
    scaler: Any, plain: Callable[..., Any], optimizers: list[Optimizer], guard: Transaction
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def safe(*args: Any, **kwargs: Any) -> Any:
        for number in range(_TRIES):
            before = _versions(scaler, optimizers)
            stages = {key: dict(state) for key, state in compat.scaler_stages(scaler).items()}
            error: BaseException
            try:
                return plain(*args, **kwargs)
            except Exception as caught:
                if not is_oom(caught) or before != _versions(scaler, optimizers) or number == _TRIES - 1:
                    leave_out_ours(caught)
                    raise
                error = caught
            release(error)
            # In place: `step` holds on to its own.
            for key, state in list(compat.scaler_stages(scaler).items()):
                if key in stages:
                    state.clear()
                    state.update(stages[key])
                else:
                    del compat.scaler_stages(scaler)[key]
            guard.recovered("gradient scaler")
        raise AssertionError  # the last try returns or raises

    safe.is_safe = True  # type: ignore[attr-defined]
    return safe


def _versions(scaler: Any, optimizers: list[Optimizer]) -> list[int]:
    """Whether anything was changed: the scale, the gradients, the weights."""
    tensors = compat.scaler_tensors(scaler)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [parameter, parameter.grad]
    return compat.versions_of([tensor for tensor in tensors if tensor is not None])
