"""Everything that computing a gradient may change, as it was before: put back, unless it went well and is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from buoy.microbatch.errors import BadLoss
from buoy.torch.backward import LossFunction
from buoy.torch.beside import leaves_beside
from buoy.torch.carried import Carried, code_of
from buoy.torch.homes import function_modules, tensors_of
from buoy.torch.snapshot import Gradients, Snapshot
from buoy.torch.trained import Trained
from buoy.torch.upstream import Upstream

_LARGE = 1 << 28  # bytes of buffers of a module that nobody tracks: a copy of more could be what memory lacks
_Result = TypeVar("_Result")


class Before:
    """Gradients, buffers, generators, and what a loss function keeps from call to call."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        trained: Trained,
        meet: Callable[[list[torch.nn.Module]], object],
    ) -> None:
        """The list is the transaction's own: what a loss function computes with is added to it.

        `meet` is told of modules around these that it knows: where `ddp.module` is tracked, only it knows the DDP.
        """
        self._modules, self._trained, self._meet = modules, trained, meet
        self.snapshot = Snapshot()
        self.carried = Carried()
        self.gradients = Gradients()
        self.upstream = Upstream()
        """Of the batch under way."""
        self.inside = False
        """A loss is being computed."""
        self._seen: set[Any] = set()
        """Code of loss functions whose modules are known."""
        self._new: LossFunction | None = None
        """The step's loss function, until it is known which weights it adds a gradient to."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gets a gradient: parameters, and the arrays of a batch that was itself computed with gradients."""
        return self._trained.guarded + self.upstream.leaves

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """These may be changed."""
        modules = list(modules)
        self.snapshot.watch(modules)
        self.carried.watch(modules)

    def begin(self, loss_fn: LossFunction) -> None:
        """A step with this loss function begins."""
        self._reach(loss_fn)
        self.carried.of(loss_fn)
        self._leave_upstream()

    def see(self, loss: torch.Tensor) -> None:
        """Just before a backward pass: what nobody tracked gets a gradient that must be put back too."""
        if self._new is not None:
            loss_fn, self._new = self._new, None
            beside: list[torch.Tensor] = []
            with suppress(Exception):  # somebody's object that cannot be looked into
                beside = leaves_beside(loss, self.leaves, loss_fn)
            self._trained.also(beside)
            self.gradients.also(beside)

    def let_go(self) -> None:
        """The step is over: its batch may be large."""
        self.carried.of(None)
        self._leave_upstream()

    def _leave_upstream(self) -> None:
        if self.upstream.leaves:  # of a batch that was computed with gradients: few are
            self.upstream = Upstream()

    def guarded(self, work: Callable[[], _Result], *, keep: bool = False) -> _Result:
        """Do it and put everything back, unless it went well and is to be kept."""
        __tracebackhide__ = True
        if self.inside:
            raise BadLoss("a loss function computes another step", received="run.backward inside a loss function",
                          expected="only the loss")  # fmt: skip
        self.inside = True
        done = False
        try:
            self.snapshot.take()
            self.carried.take(is_step=keep)
            self.gradients.begin(self.leaves)
            result = work()
            if keep:
                self.carried.done()
            done = keep
            return result
        finally:
            self.inside = False
            if not done:
                self.carried.put_back(is_step=keep, replaced=self.snapshot.replaced())
                self.gradients.undo()
                self.snapshot.restore()

    def start_over(self) -> None:
        """In the middle of guarded work: as at its beginning."""
        self.carried.put_back(is_step=False)
        self.gradients.undo()
        self.snapshot.restore()
        self.gradients.begin(self.leaves)

    def _reach(self, loss_fn: LossFunction) -> None:
        """What it computes with beside the tracked modules (a teacher, a loss with a buffer) is guarded as they are."""
        code = code_of(loss_fn)
        if code in self._seen:
            return
        found: list[torch.nn.Module] = []
        around: list[torch.nn.Module] = []
        known = {id(each) for module in self._modules for each in tensors_of(module)}
        with suppress(Exception):  # somebody's object that cannot be looked into
            found = function_modules(loss_fn)
            around = [module for module in found if any(id(each) in known for each in module.parameters())]
        self._meet(around)  # a teacher is nobody to vote with
        self._seen.add(code)  # not what is refused: it is each time
        self._new = loss_fn
        with suppress(Exception):
            beside = [module for module in found if any(id(each) not in known for each in tensors_of(module))]
            self.snapshot.watch(
                module for module in beside if sum(b.nbytes for b in module.buffers()) <= _LARGE
            )
            self.carried.watch(beside)
            self._modules += beside
