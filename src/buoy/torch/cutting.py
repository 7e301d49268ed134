"""Whether batches may be cut: what the probe found, asked for again now and then."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from buoy.microbatch.asked import Asked
from buoy.microbatch.errors import CannotSplit, StepError
from buoy.microbatch.oom import is_oom
from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.kind import kind_of
from buoy.torch.probe import Finding, Probe
from buoy.torch.release import release
from buoy.torch.trained import Trained
from buoy.torch.vote import GIVE_UP, READY, Vote

_OTHERS = "others"


class Cutting:
    """Remembers the answer for each kind of step, and when to ask again: at its 1st, 2nd, 4th, 8th... that is cut.

    A later batch may show what the first did not: a mean over tokens is one over samples until one is padded.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        trained: Trained,
        inexact: tuple[str, ...],
        attempt: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._modules = modules
        self._trained = trained
        self._probe = Probe(modules, trained.now, inexact)
        self._attempt = attempt
        self._is_asked = False
        self._asked = Asked()
        self._found: dict[Hashable, Finding] = {}
        self._step: tuple[Batch, LossFunction, str] | None = None
        self._kind: Hashable = None
        """Of the step that is under way, once it was needed."""
        self._is_fresh = False
        """Whether that step was compared already."""
        self.finding: Finding | None = None
        """Of the last step that was asked about."""
        self.steps = 0
        """Steps that were cut."""

    def ask_first(self, whole: Batch, loss_fn: LossFunction, reduction: str, vote: Vote) -> Finding | None:
        """With the first batch that can be cut; the finding when there is a new one. To be asked at each step."""
        self._step, self._kind, self._is_fresh = (whole, loss_fn, reduction), None, False
        if self._is_asked:
            return None
        found = self._compare()
        self._is_asked = found is not None or vote.is_group
        if (
            vote.is_group
            and vote.lowest(GIVE_UP if self.reason(whole) else READY) == GIVE_UP
            and found is not None
        ):
            found.reason = found.reason or "another rank found that its batch cannot be cut"
        return found

    def abstain(self, vote: Vote) -> None:
        """This rank has no batch to ask with; the others may be waiting for its first answer."""
        if not self._is_asked:
            vote.lowest(GIVE_UP)

    def reason(self, whole: Batch) -> str | None:
        """Why this batch cannot be cut, as far as is known."""
        if whole.reason is not None or self._step is None:
            return whole.reason
        self.finding = self._found.get(self._kind_now())
        if self.finding is None and self._is_asked:  # another loss than the first
            self._compare()
        return self.finding.reason if self.finding is not None else None

    def let_go(self) -> None:
        """The step is over: its batch may be large."""
        self._step = None

    @property
    def no_room(self) -> BaseException | None:
        """The failure when not even two samples fit, so that nothing could be compared."""
        return self._probe.no_room if self.finding is None else None

    def refusal(self, whole: Batch) -> StepError | None:
        """To be asked before each step that is cut."""
        if whole.reason is not None:
            return CannotSplit(
                "this batch cannot be cut", received=whole.reason, expected="arrays, or `split=`"
            )
        kind = self._kind_now()
        self.finding = self._found.get(kind)
        if self.finding is None or (self._asked.is_due(kind) and not self._is_fresh):
            self._compare()
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
            steps = self._asked.steps(self._kind)
            before = (
                f"; steps like this one that were cut before it ({steps}) had perhaps another gradient: begin anew"
                if steps else ""
            )  # fmt: skip
            return CannotSplit("cutting this batch would change the gradient", received=self.finding.reason,
                               expected="a gradient that is a sum over samples",
                               hint=f"{self.finding.hint}{before}")  # fmt: skip
        self.steps += 1
        self._asked.count(self._kind)
        return None

    def _kind_now(self) -> Hashable:
        if self._kind is None and self._step is not None:
            try:
                self._kind = self._asked.known_as(kind_of(self._modules, *self._step)) or _OTHERS
            except Exception as caught:  # no room for the few numbers that tell kinds apart?
                if not is_oom(caught):
                    raise
                error = caught
            else:
                return self._kind
            release(error)
            self._kind = _OTHERS
        return self._kind

    def _compare(self) -> Finding | None:
        assert self._step is not None
        kind, self._is_fresh = self._kind_now(), True
        found = self._ask(*self._step)
        if self._trained.look():  # the loss function freezes and thaws: only now is it known what it trains
            found = self._ask(*self._step)
        if found is not None:
            self._found[kind] = found
        self.finding = found or self._found.get(kind)
        return found

    def _ask(self, whole: Batch, loss_fn: LossFunction, reduction: str) -> Finding | None:
        return self._probe.ask(whole, loss_fn, reduction, self._attempt)
