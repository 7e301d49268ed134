"""The gradient of a few samples, together or in parts, with everything put back: what a comparison is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from buoy.microbatch.rounding import STRETCHES
from buoy.microbatch.split import Batch
from buoy.torch.allocations import AllocationWatch
from buoy.torch.backward import LossFunction, Progress, accumulate
from buoy.torch.beside import GradientBeside, leaves_beside
from buoy.torch.constant import Generators
from buoy.torch.digest import some
from buoy.torch.pairs import Pair, noting
from buoy.torch.quiet import Still, eager, same_random
from buoy.torch.rounding import Nudged
from buoy.torch.unmoved import Unmoved, places
from buoy.torch.upstream import (
    FedFromBefore,
    Upstream,
    arrived,
    as_it_came,
    has_upstream,
    is_fed_from_before,
    known_from_before,
)


class Made(list[torch.Tensor]):
    """Gradients and buffers, and the weights that were changed on the way."""

    def __init__(
        self,
        numbers: list[torch.Tensor],
        weights: dict[str, torch.Tensor],
        gradients: int,
        pairs: list[Pair],
        loss: float,
        size: float,
    ) -> None:
        """`size`: of the losses of the parts, without their signs."""
        super().__init__(numbers)
        self.loss, self.size = loss, size
        self._weights = weights
        self.pairs = pairs
        self.shows = shows(numbers[:gradients])

    def leaves_as(self, other: Made) -> bool:
        """Whether both left the same weights behind, bit for bit: then a change was one that can be repeated."""
        mine, theirs = self._weights, other._weights
        return mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


class FewGradient:
    """Of one loss function; holds no samples, since what fails for memory would count them as another's."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        parameters: list[torch.Tensor],
        loss_fn: LossFunction,
        reduction: str,
        attempt: Callable[[Callable[[], Any]], Any],
        guarded: list[torch.Tensor] | None = None,
    ) -> None:
        """`attempt` runs a function and puts everything back after it; where `guarded` is given, a
        gradient of anything else is `GradientBeside`.
        """
        self._modules, self._parameters = modules, parameters
        self._loss_fn, self._reduction, self._attempt = loss_fn, reduction, attempt
        self.watch, self.still, self.generators = AllocationWatch(), Still(), Generators()
        self._forward = _BeforeBackward(self.watch, known_from_before(loss_fn), guarded, loss_fn)
        self.written: list[str] = []
        """Buffers that the last computation changed."""
        self.moved: dict[str, bool] = {}
        """Weights that a computation changed, and whether in its backward pass."""

    @property
    def live(self) -> int:
        """Bytes of parameters and activations before the backward pass, where it was counted."""
        return self._forward.live

    def __call__(self, parts: list[int], source: Batch, *, counted: bool = False, nudged: int = 0) -> Made:
        """Over the first samples of `source`, in parts of these sizes. `nudged`: with weights moved a little."""
        left = list(parts)
        ends: list[Upstream] = []
        pairs: list[Pair] = []
        parameters = list(self._parameters)
        # What a hook does to a gradient, it does not do to one that is stretched.
        by = STRETCHES[nudged - 1] if nudged and not _are_hooked(self._parameters) else 1.0
        progress = self._forward if counted else _Sized()

        def take(start: int, stop: int) -> object:
            self.still.begins(start, stop - start)
            part = source.take(start, stop)
            if has_upstream(source.arrays):
                ends.append(Upstream())
                part = ends[-1].end_at(part)
                parameters.extend(ends[-1].leaves)
            return part

        def work() -> Made:
            before = self._buffers()
            unmoved = Unmoved(self._modules)
            self.still.ahead = unmoved.see
            try:
                with ExitStack() as stack:
                    if counted:
                        stack.enter_context(self.watch)
                    if nudged:
                        stack.enter_context(Nudged(self._parameters, nudged))
                    stack.enter_context(self.still)
                    stack.enter_context(unmoved)
                    stack.enter_context(as_it_came(source.arrays))
                    stack.enter_context(eager())
                    loss = accumulate(
                        sum(parts), lambda _: left.pop(0), take,
                        _stretched(noting(same_random(self._loss_fn, self.generators), pairs), by),
                        reduction=self._reduction, scaler=None, parameters=parameters,
                        progress=progress,
                    )  # fmt: skip
                weights = {name: some(value) for name, value in unmoved.written().items()}
                self.moved |= unmoved.moved
            finally:
                unmoved.put_back()
            after = self._buffers()
            self.written = [name for name in after if not after[name].equal(before[name])]
            gradients = [some(parameter.grad) for parameter in self._parameters]
            gradients += [some(each) for each in arrived(ends)]
            gradients = gradients if by == 1.0 else [each / by for each in gradients]
            buffers = [after[name] for name in after if _is_inexact(after[name])]
            return Made(
                [*gradients, *buffers], weights, len(gradients), pairs, float(loss) / by, progress.size / by
            )

        return self._attempt(work)  # type: ignore[no-any-return]

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The models' buffers, thinned out; but for BatchNorm's, of which other words are said."""
        return {
            label: some(buffer)
            for label, (part, name) in places(self._modules, "_buffers").items()
            if not isinstance(part, _BatchNorm) and (buffer := part._buffers[name]) is not None
        }


class _Sized(Progress):
    def __init__(self) -> None:
        self.size = 0.0

    def forward_done(self, loss: torch.Tensor) -> None:
        self.size += abs(float(loss.detach()))


class _BeforeBackward(_Sized):
    def __init__(
        self,
        watch: AllocationWatch,
        before: set[Any],
        guarded: list[torch.Tensor] | None,
        loss_fn: LossFunction,
    ) -> None:
        super().__init__()
        self._watch, self._before, self._guarded, self._loss_fn = watch, before, guarded, loss_fn
        self.live = 0

    def forward_done(self, loss: torch.Tensor) -> None:
        self.live, self.size = self._watch.live, abs(float(loss.detach()))
        beside = None if self._guarded is None else leaves_beside(loss, self._guarded, self._loss_fn)
        if beside:
            raise GradientBeside(beside)

    def last_backward(self, loss: torch.Tensor) -> None:
        if is_fed_from_before(loss, self._before):
            raise FedFromBefore


def shows(made: list[torch.Tensor]) -> bool:
    """Zeros are any number of times themselves."""
    return any(bool(each.any()) for each in made)


def _stretched(loss_fn: LossFunction, by: float) -> LossFunction:
    def stretched(part: Any) -> Any:
        made = loss_fn(part)
        if isinstance(made, tuple) and len(made) == 2:
            return made[0] * by, made[1]
        return made * by if isinstance(made, torch.Tensor) else made

    return loss_fn if by == 1.0 else stretched


def _are_hooked(parameters: list[torch.Tensor]) -> bool:
    return any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters)


def _is_inexact(values: torch.Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()
