"""A training step that happens whole, with the batch that was asked for, or has not happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from buoy.microbatch.errors import BadLoss, CannotSplit, OutOfMemory, StepError
from buoy.microbatch.oom import is_oom
from buoy.microbatch.sizing import Sizer
from buoy.microbatch.split import Batch, Split, even
from buoy.torch.backward import LossFunction, accumulate
from buoy.torch.memory import memory_of
from buoy.torch.optimizer_step import make_atomic
from buoy.torch.release import release
from buoy.torch.snapshot import Gradients, Snapshot

_TRIES = 40  # far more than halving ever needs: a bound, not a plan


class Transaction:
    """Computes gradients in micro-batches and survives running out of memory; used by `buoy.Run.backward`."""

    def __init__(
        self,
        *,
        say: Callable[[str], object],
        event: Callable[..., object],
        micro_batch: int | None = None,
        inexact: tuple[str, ...] = (),
        memory_cap: int | None = None,
    ) -> None:
        self._say = say
        self._event = event
        self._sizer = Sizer(most=micro_batch)
        self._inexact = inexact
        self._modules: list[torch.nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._snapshot = Snapshot()
        self._gradients = Gradients()
        self.inside = False
        """A loss is being computed."""
        self.steps = 0
        """Calls of `backward` that went through."""
        self.retries = 0

    def track(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any] = (),
    ) -> None:
        """Guard these: their gradients, buffers and steps."""
        modules, optimizers = list(modules), list(optimizers)
        self._modules += modules
        self._snapshot.watch(modules)
        known = {id(parameter) for parameter in self._parameters}
        found = [parameter for module in modules for parameter in module.parameters()]
        found += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        for parameter in found:
            if id(parameter) not in known and parameter.requires_grad:
                known.add(id(parameter))
                self._parameters.append(parameter)
        for optimizer in optimizers:
            make_atomic(optimizer, self)

    def backward(
        self,
        batch: object,
        loss_fn: LossFunction,
        *,
        reduction: str = "mean",
        split: Split | None = None,
        scaler: Any = None,
    ) -> torch.Tensor:
        """The gradient of `loss_fn` over the whole batch, added to `.grad`; returns the loss, detached."""
        whole = Batch(batch, split)
        size = self._sizer.samples(whole.samples, whole.each)
        again = True
        for _ in range(_TRIES):
            parts = even(whole.samples, size)
            outcome = self._try(whole, parts, loss_fn, reduction, scaler)
            if isinstance(outcome, torch.Tensor):
                self.steps += 1
                self._sizer.done(parts[0], whole.each, held_back=len(parts) > 1)
                return outcome
            if not is_oom(outcome):
                raise outcome
            release(outcome)
            self.retries += 1
            size, again = self._smaller(whole, parts[0], outcome, again)
        raise OutOfMemory("no size was found that fits", received=f"{_TRIES} tries") from outcome

    def _try(
        self, whole: Batch, parts: list[int], loss_fn: LossFunction, reduction: str, scaler: Any
    ) -> torch.Tensor | BaseException:
        """The loss; or what was raised, with everything put back."""
        versions = [getattr(array, "_version", 0) for array in whole.arrays]
        self.inside = True
        try:
            self._snapshot.take()
            self._gradients.begin(self._parameters)
            loss = accumulate(
                parts, whole.take, loss_fn, reduction=reduction, scaler=scaler, parameters=self._parameters,
                forward_done=self._snapshot.keep_statistics,
                backward_done=self._backward_done,
            )  # fmt: skip
            if versions != [getattr(array, "_version", 0) for array in whole.arrays]:
                raise BadLoss("the loss function changed the batch in place", received="an in-place operation on its input",
                              expected="an input that a second try finds as it was",
                              hint="`x = x * 2` instead of `x.mul_(2)`, or clone it first")  # fmt: skip
            self._gradients.commit()
            return loss
        except BaseException as error:  # noqa: BLE001 - Ctrl-C must find the state of before the step too
            failure = error
        finally:
            self.inside = False
        self._gradients.undo()
        self._snapshot.restore()
        return failure

    def _backward_done(self, size: int) -> None:
        self._snapshot.put_statistics_back()

    def _smaller(self, whole: Batch, size: int, error: BaseException, again: bool) -> tuple[int, bool]:
        if size > 1:
            smaller = self._sizer.oom(size, whole.each)
            self._say(f"out of memory with {size} samples at once; the step is done again with {smaller}")
            self._event("retry", what="oom", step=self.steps, samples=size, smaller=smaller)
            return smaller, again
        if again:  # what the failed try held is free now: once more
            self._say("out of memory; the step is done again")
            return size, False
        raise OutOfMemory("one sample does not fit", received=str(error).split("\n")[0]) from error

    # What the optimizers' steps ask (optimizer_step.Guard).

    def has_room(self, device: torch.device, need: int) -> bool:
        """Whether so many bytes can surely be had."""
        free = memory_of(device).free()
        return free is not None and free > need

    def recovered(self, what: str) -> None:
        """A failed optimizer step was undone and is done again."""
        self.retries += 1
        self._say(f"out of memory in the {what}; undone, and done again parameter by parameter")
        self._event("retry", what=what, step=self.steps)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same sizes."""
        return {"sizer": self._sizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizer.load_state_dict(state["sizer"])
        self.steps = state["steps"]
