"""Whether batches may be cut: what the probe found, asked for again now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from buoy.microbatch.errors import CannotSplit, StepError
from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.probe import Finding, Probe
from buoy.torch.vote import GIVE_UP, READY, Vote


class Cutting:
    """Remembers the answer, and when to ask again: at split steps 1, 2, 4, 8...

    A later batch may show what the first did not: a mean over tokens is one over samples until one is padded.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        parameters: list[torch.Tensor],
        inexact: tuple[str, ...],
        attempt: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._probe = Probe(modules, parameters, inexact)
        self._attempt = attempt
        self._asked = False
        self._own_cut = False
        """Whether the last answer is of a cut that the person gave."""
        self.finding: Finding | None = None
        self.steps = 0
        """Steps that were cut."""

    def ask_first(self, whole: Batch, loss_fn: LossFunction, reduction: str, vote: Vote) -> Finding | None:
        """With the first batch that can be cut; the finding when there is a new one."""
        if self._asked:
            return None
        found = self._ask(whole, loss_fn, reduction)
        self._asked = found is not None or vote.is_group
        if (
            vote.is_group
            and vote.lowest(GIVE_UP if self.reason(whole) else READY) == GIVE_UP
            and found is not None
        ):
            found.reason = found.reason or "another rank found that its batch cannot be cut"
        return found

    def abstain(self, vote: Vote) -> None:
        """This rank has no batch to ask with; the others may be waiting for its first answer."""
        if not self._asked:
            vote.lowest(GIVE_UP)

    def reason(self, whole: Batch) -> str | None:
        """Why this batch cannot be cut, as far as is known."""
        return whole.reason or (self.finding.reason if self.finding is not None else None)

    @property
    def no_room(self) -> BaseException | None:
        """The failure when not even two samples fit, so that nothing could be compared."""
        return self._probe.no_room if self.finding is None else None

    def refusal(
        self, whole: Batch, loss_fn: LossFunction, reduction: str, *, first: bool
    ) -> StepError | None:
        """To be asked before each step that is cut."""
        if whole.reason is not None:
            return CannotSplit(
                "this batch cannot be cut", received=whole.reason, expected="arrays, or `split=`"
            )
        asked = self.steps + 1
        seldom = asked & (asked - 1) == 0
        if self.finding is None or (seldom and not first) or whole.gives_ranges_only is not self._own_cut:
            self._ask(whole, loss_fn, reduction)
        if self.finding is None:
            failed = self._probe.failed
            if isinstance(failed, StepError):
                return failed  # of this loss or batch, cut or not
            why = f": {type(failed).__name__}: {failed}" if failed is not None else ""
            return CannotSplit("nothing shows that this batch can be cut with the same gradient",
                               received=f"a few of its samples cannot be computed alone{why}",
                               expected="a comparison of whole and parts",
                               hint="a smaller batch; `split=` where samples are not the first dimension")  # fmt: skip
        if self.finding.reason is not None:
            before = (
                f"; steps cut before this one ({self.steps}) had perhaps another gradient: begin anew"
                if self.steps else ""
            )  # fmt: skip
            return CannotSplit("cutting this batch would change the gradient", received=self.finding.reason,
                               expected="a gradient that is a sum over samples",
                               hint=f"{self.finding.hint}{before}")  # fmt: skip
        self.steps += 1
        return None

    def _ask(self, whole: Batch, loss_fn: LossFunction, reduction: str) -> Finding | None:
        self._own_cut = whole.gives_ranges_only
        found = self._probe.ask(whole, loss_fn, reduction, self._attempt)
        self.finding = found or self.finding
        return found
