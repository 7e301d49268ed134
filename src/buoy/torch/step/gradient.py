"""The gradient of a batch from those of its micro-batches; whose gradients they are; where a batch came from.

The parameters of a training may be frozen and thawed on the way. A batch that was computed with gradients itself ends
the step: its own gradient is propagated, once, to what computed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch

from buoy._compat.torch import forget_parametrizations
from buoy.microbatch.batch import Batch, rebuilt
from buoy.microbatch.errors import BadLoss, CannotSplit, OutOfMemory, is_oom

LossFunction = Callable[[Any], Any]


class Step(NamedTuple):
    """What a step computes."""

    batch: Batch
    loss_fn: LossFunction
    reduction: str
    scaler: Any = None


class Accumulation:
    """Adds up the losses of micro-batches to that of the whole batch, so that their gradients do so in `.grad`."""

    def __init__(self, samples: int, reduction: str, leaves: list[torch.Tensor], scaler: Any = None) -> None:
        """`leaves`: what gets a gradient, and has none yet."""
        self.done, self.left = 0, samples
        """Samples so far, and to come."""
        self.has_weight = False
        """The loss function gives (sum, weight)."""
        self._samples, self._reduction, self._leaves, self._scaler = samples, reduction, leaves, scaler
        self._running: Any = None
        self._weights: Any = None
        self._divisor: Any = None

    def add(self, made: Any, size: int) -> Any:
        """What the loss function gave for the next micro-batch; its share of the whole, for the backward pass."""
        is_first, is_last = self.done == 0, size == self.left
        loss, weight = read_loss(made, self._reduction)
        share: Any
        _check(loss, self._scaler, self._leaves if is_first else [], None if is_first and is_last else size)
        if weight is None:
            is_whole = is_first and is_last
            share = loss if is_whole or self._reduction == "sum" else loss * (size / self._samples)
            value = share.detach()
        else:
            share, value = self._weighted(loss, weight, size, is_last), loss.detach()
        self._running = value if self._running is None else self._running + value
        self.done, self.left = self.done + size, self.left - size
        return share

    def _weighted(self, loss: torch.Tensor, weight: Any, size: int, is_last: bool) -> Any:
        self.has_weight = True
        if size < self._samples:
            weight = _exact(weight)
        self._weights = weight if self._weights is None else self._weights + weight
        if not is_last:
            if self._divisor is None:
                self._divisor = _at_least_one(weight * (self._samples / size))
            return loss / self._divisor
        _check_weight(self._weights)
        # Only now is the weight of the whole known: correct the parts before, then add this one.
        if self._divisor is not None:
            _scale([p.grad for p in self._leaves if p.grad is not None], self._divisor / self._weights)
        return loss / self._weights

    def loss(self) -> torch.Tensor:
        """Of the whole batch, detached."""
        assert self._running is not None
        if self._weights is None:
            return self._running  # type: ignore[no-any-return]
        return (self._running / self._weights).to(self._running.dtype)  # type: ignore[no-any-return]


def loss_of(loss_fn: LossFunction, part: Any) -> Any:
    """Inside `parametrize.cached()` each part computes its weights again: their graph goes with a backward pass."""
    __tracebackhide__ = True
    forget_parametrizations()
    return loss_fn(part)


def read_loss(made: Any, reduction: str) -> tuple[torch.Tensor, Any]:
    """The loss, and its weight where the loss function gave (sum, weight)."""
    weight = None
    if isinstance(made, tuple):
        if len(made) != 2:
            raise _bad("the loss function returned a tuple", made)
        made, weight = made
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise _bad("the weight of the loss is not one number", weight)
            if weight.requires_grad:
                raise BadLoss("the weight of the loss depends on trained parameters",
                              received="(sum, weight) with a weight that requires a gradient",
                              expected="a number that depends on the batch alone",
                              hint="`weight.detach()` if it is to count as a constant; otherwise return the quotient, "
                                   "which is computed whole as long as it fits")  # fmt: skip
            weight = weight.detach().reshape(())
        elif not isinstance(weight, (int, float)):
            raise _bad("the weight of the loss is not a number", weight)
        if _is_read(weight) and weight < 0:
            raise _no_weight("the weight of the loss is negative", weight)
    if not isinstance(made, torch.Tensor):
        raise _bad("the loss is not a tensor", made)
    if made.dim():
        if made.numel() != 1:
            raise _bad("the loss is not one number", made, '`.mean()` (or `.sum()` with reduction="sum")')
        made = made.reshape(())
    if not made.requires_grad:
        raise _bad("the loss does not depend on any parameter", made,
                   "no `.detach()`, `.item()` or `torch.no_grad()` between the model and the loss")  # fmt: skip
    if reduction not in ("mean", "sum"):
        raise BadLoss("unknown reduction", received=repr(reduction), expected='"mean" or "sum"',
                      hint="for a mean over tokens return (sum of the losses, number of tokens)")  # fmt: skip
    return made, weight


def _check(loss: torch.Tensor, scaler: Any, fresh: list[torch.Tensor], part: int | None) -> None:
    """`part`: its samples, where it is not the whole batch."""
    # Reading a number from an accelerator would stop its queue at every step.
    if scaler is None and loss.is_cpu and math.isnan(loss.item()):
        if part is not None:
            raise CannotSplit("the loss of a micro-batch is not a number (NaN)",
                              received=f"{loss.detach()} for {part} samples of it",
                              expected="a finite loss for every micro-batch",
                              hint="if all labels of a micro-batch are ignored, their mean is 0 / 0: "
                                   "return (sum of the losses, how many); a `.std()` or `.var()` over samples has "
                                   "no value for one: normalise before run.backward(...); the step "
                                   "was not taken, the weights are unchanged")  # fmt: skip
        raise BadLoss("the loss is not a number (NaN)", received=str(loss.detach()), expected="a finite loss",
                      hint="the step was not taken, the weights are unchanged; look at this batch, lower the learning "
                           "rate, or catch buoy.BuoyError to continue with the next batch")  # fmt: skip
    for parameter in fresh:
        if parameter.grad is not None:
            raise BadLoss("the loss function computed gradients itself", received="a call of .backward() in it",
                          expected="only the loss", hint="return the loss; buoy calls backward")  # fmt: skip


def _check_weight(weight: Any) -> None:
    """Of the whole batch; a part of it may well have none."""
    if _is_read(weight) and not weight > 0:
        raise _no_weight("the loss of this batch has no positive weight", weight)


def _is_read(weight: Any) -> bool:
    return not isinstance(weight, torch.Tensor) or weight.device.type == "cpu"


def _no_weight(what: str, weight: Any) -> BadLoss:
    return BadLoss(what, received=f"(sum, weight) with a weight of {float(weight):g}",
                   expected="a number above 0: of tokens, or of samples that are not ignored",
                   hint="the step was not taken; leave out batches in which everything is ignored")  # fmt: skip


_ONLY_THE_LOSS = "return only the loss, as one number; of a model's output its `.loss`"


def _bad(what: str, made: object, hint: str = _ONLY_THE_LOSS) -> BadLoss:
    if isinstance(made, torch.Tensor):
        received = f"a tensor of shape {list(made.shape)}, {made.dtype}"
    else:
        received = f"{type(made).__name__}: {made!r}"[:200]
    return BadLoss(what, received=received, expected="a scalar tensor, or (sum, weight)", hint=hint)


def _exact(weight: Any) -> Any:
    """Counts of tokens in double precision, where the device has it."""
    if isinstance(weight, torch.Tensor):
        return weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)
    return float(weight)


def _at_least_one(weight: Any) -> Any:
    return weight.clamp(min=1) if isinstance(weight, torch.Tensor) else max(1.0, weight)


def _scale(gradients: list[torch.Tensor], factor: Any) -> None:
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


_REQUIRES_GRAD = attrgetter("requires_grad")


class Trained:
    """Of some modules and optimizers. Modules are walked once; afterwards only flags are read."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor] = []
        """Frozen ones too: whatever thaws them, also a loss function, their gradients are guarded."""
        self.now: list[torch.Tensor] = []
        """Those that require a gradient, as of the last `look`; always the same list."""
        self.gradient_bytes = 0
        """What the gradients of these take."""
        self._known: set[int] = set()
        self._passing: list[ref[torch.Tensor]] = []
        self._flags: list[bool] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._groups = 0

    @property
    def first(self) -> torch.Tensor:
        """The one whose device counts."""
        return (self.now or self.all)[0]

    def add(
        self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        """These are trained too."""
        self._optimizers += optimizers
        self._append(parameter for module in modules for parameter in module.parameters())
        self.look()

    def also(self, untracked: list[torch.Tensor]) -> None:
        """These get a gradient too, though nobody tracked them; `look` reads their flags."""
        self._append(leaf for leaf in untracked if isinstance(leaf, torch.nn.Parameter))
        self._passing += [ref(leaf) for leaf in untracked if not isinstance(leaf, torch.nn.Parameter)]

    @property
    def guarded(self) -> list[torch.Tensor]:
        """All of them, and other tensors that get a gradient, as long as somebody has them: most live for a step."""
        if not self._passing:
            return self.all
        self._passing = [known for known in self._passing if known() is not None]
        return self.all + [leaf for known in self._passing if (leaf := known()) is not None]

    def look(self) -> bool:
        """What is trained now; whether that has changed. To be asked at each step."""
        groups = 0
        for optimizer in self._optimizers:
            groups += len(optimizer.param_groups)
        if groups != self._groups:
            self._groups = groups
            self._append(p for o in self._optimizers for group in o.param_groups for p in group["params"])
        flags = list(map(_REQUIRES_GRAD, self.all))
        if flags == self._flags:
            return False
        self._flags = flags
        self.now[:] = [parameter for parameter in self.all if parameter.requires_grad]
        self.gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.now)
        return True

    def _append(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                self.all.append(parameter)


class Upstream:
    """The arrays of a batch that require a gradient, and what stands for them in the step."""

    def __init__(self) -> None:
        self._from: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []

    def end_at(self, batch: object) -> Any:
        """The same batch with leaves."""
        return rebuilt(batch, self._leaf)

    def propagate(self) -> None:
        """The gradients of the batch, on to where it came from."""
        if not self.leaves:
            return
        arrived = [
            (one, leaf.grad)
            for one, leaf in zip(self._from, self.leaves, strict=True)
            if leaf.grad is not None
        ]
        try:
            if arrived:
                torch.autograd.backward([one for one, _ in arrived], [gradient for _, gradient in arrived])
        except Exception as error:
            if not is_oom(error):
                raise
            raise OutOfMemory("out of memory in the backward pass of the code that computed the batch",
                              received=str(error).split("\n")[0], expected="room for it besides the step",
                              hint="compute it in the loss function, where it can be split and retried; the step was "
                                   "not taken, the weights are unchanged") from None  # fmt: skip

    def _leaf(self, array: Any) -> Any:
        if not isinstance(array, torch.Tensor) or not array.requires_grad:
            return array
        leaf = array.detach().requires_grad_(True)
        self._from.append(array)
        self.leaves.append(leaf)
        return leaf


def has_upstream(arrays: list[Any]) -> bool:
    """Whether one of these requires a gradient."""
    for array in arrays:  # noqa: SIM110 - `any` makes a frame for each, at every step
        if isinstance(array, torch.Tensor) and array.requires_grad:
            return True
    return False


@contextmanager
def as_it_came(arrays: list[Any]) -> Iterator[None]:
    """A loss function may tell its input to require a gradient (R1's penalty): the next call finds it as it was."""
    plain = [array for array in arrays if isinstance(array, torch.Tensor) and not array.requires_grad]
    try:
        yield
    finally:
        for array in plain:
            if array.requires_grad and array.is_leaf:
                array.requires_grad_(False)
                array.grad = None


def arrived(parts: list[Upstream]) -> list[torch.Tensor]:
    """The gradients of a batch's arrays, put together from those of its parts."""
    leaves = zip(*(part.leaves for part in parts), strict=True)
    gradients = [
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in each] for each in leaves
    ]
    return [torch.cat(each) for each in gradients if each[0].dim()]


def untracked_leaves(loss: torch.Tensor, known: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the backward pass of this loss adds a gradient to and is not known: centres, heads in a list, a prompt."""
    ours = {id(each) for each in known}
    waiting: list[Any] = [loss.grad_fn]
    seen, found = set[Any](), list[torch.Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ours:
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found
