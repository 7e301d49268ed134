"""Whether steps may be split: what the probe found for each kind of step, asked for when a split is needed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch

from buoy.microbatch.batch import Batch
from buoy.microbatch.errors import CannotSplit, StepError
from buoy.microbatch.exactness import Asked
from buoy.microbatch.oom import is_oom
from buoy.torch.exactness.probe import STATE, STATE_HINT, Finding, Probe
from buoy.torch.exactness.samples import SAMPLES, kind_of
from buoy.torch.memory.device import limited, memory_of, release
from buoy.torch.step.gradient import LossFunction, Trained
from buoy.torch.step.snapshot import Rollback, code_of

_OTHERS = "others"
_WORDS = 200  # characters of somebody's exception


class Ways(Protocol):
    """A loss whose parts may add up in several ways, as a trainer of somebody else's decides."""

    mode: str

    @property
    def modes(self) -> tuple[str, ...]:
        """Their names."""


class SplitPolicy:
    """Remembers the answer for each kind of step, and when to ask again: at its 1st, 2nd, 4th, 8th... that is split.

    A later batch may show what the first did not: a mean over tokens is one over samples until one is padded.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        trained: Trained,
        inexact: tuple[str, ...],
        rollback: Rollback,
        ways: Ways | None = None,
    ) -> None:
        self._modules, self._trained, self._ways = modules, trained, ways
        self._probe = Probe(modules, trained.now, inexact, rollback)
        self._asked = Asked()
        self._found: dict[Hashable, Finding] = {}
        self._modes: dict[Hashable, str] = {}
        self._codes: set[Any] = set()
        """Of loss functions that were compared."""
        self._step: tuple[Batch, LossFunction, str] | None = None
        self._kind: Hashable = None
        """Of the step that is under way, once it was needed."""
        self._is_fresh = False
        """Whether that step was compared already."""
        self.finding: Finding | None = None
        """Of the last step that was asked about."""
        self.news: Finding | None = None
        """The last finding, until somebody has taken note of it."""
        self.exchanges = False
        """A loss function exchanges numbers with other ranks: one that fails inside it cannot vote, nor try alone."""

    def begin(self, whole: Batch, loss_fn: LossFunction, reduction: str) -> None:
        """A step begins."""
        self._step, self._kind, self._is_fresh, self.finding = (whole, loss_fn, reduction), None, False, None

    def end(self) -> None:
        """The step is over: its batch may be large."""
        self._step = None

    @property
    def is_known(self) -> bool:
        """Whether a step of this loss function was compared."""
        return self._step is not None and code_of(self._step[1]) in self._codes

    @property
    def no_room(self) -> BaseException | None:
        """The failure when not even two samples fit, so that nothing could be compared."""
        return self._probe.no_room if self.finding is None else None

    @property
    def fails(self) -> str | None:
        """What a few samples or a part of them raised, if that is all that forbids a split."""
        if self.finding is not None:
            return self.finding.reason if self.finding.fails else None
        failed = self._probe.failed
        return None if failed is None or isinstance(failed, StepError) else _alone(failed)

    @property
    def keeps_state(self) -> bool:
        """Whether the comparison has shown that a call of the loss function leaves something behind."""
        return self.finding is not None and self.finding.leaves_state

    def refusal(self, at_once: int) -> StepError | None:
        """Why this step must not be split into parts of at most so many samples; asks where that is due."""
        assert self._step is not None
        whole = self._step[0]
        if whole.reason is not None:
            return CannotSplit(
                "this batch cannot be split", received=whole.reason, expected="arrays, or `split=`"
            )
        kind = self._kind_now()
        self.finding = self._found.get(kind)
        if not self._is_fresh and (self.finding is None or self._asked.is_due(kind)):
            self.compare(at_once)
        if self._ways is not None:
            self._ways.mode = self._modes.get(kind, self._ways.mode)
        if self.finding is None:
            failed = self._probe.failed
            if isinstance(failed, StepError):
                return failed  # of this loss or batch, split or not
            return CannotSplit("nothing shows that this batch can be split with the same gradient",
                               received=_alone(failed), expected="a comparison of whole and parts",
                               hint="a smaller batch; `split=` where samples are not the first dimension; a state of "
                                    "the last batch, such as a hidden state: put it into the batch")  # fmt: skip
        if self.finding.reason is None:
            return None
        expected = "a gradient that is a sum over samples"
        return CannotSplit("splitting this batch would change the gradient", received=self.finding.reason,
                           expected=expected, hint=f"{self.finding.hint}{self._asked.doubt(kind)}")  # fmt: skip

    def count(self) -> None:
        """The step was split and went through."""
        self._asked.count(self._kind_now())

    def may_repeat(self) -> bool:
        """Whether the step may be computed again as it is, after a try that failed."""
        assert self._step is not None
        whole, loss_fn, reduction = self._step
        if whole.once or self.exchanges:
            return False
        if self.finding is not None and self.finding.repeats is not None:
            return self.finding.repeats
        try:
            with limited(memory_of(self._trained.first)):
                is_same = self._probe.same_twice(whole, loss_fn, reduction)
            if not is_same:
                self.finding = Finding(STATE, STATE_HINT, repeats=False, leaves_state=True)
            return is_same
        except Exception as caught:  # noqa: BLE001 - the step itself has failed, and that is raised
            error = caught
        if is_oom(error):
            release(error)
        return False

    def compare(self, at_once: int = SAMPLES) -> Finding | None:
        """Whole and parts of a few samples of this step, now."""
        assert self._step is not None
        kind, self._is_fresh = self._kind_now(), True
        self._codes.add(code_of(self._step[1]))
        with limited(memory_of(self._trained.first)):  # a few samples may be all that the batch has
            found = self._ask(at_once)
            if (
                self._trained.look()
            ):  # the loss function freezes and thaws: only now is it known what it trains
                found = self._ask(at_once)
        if found is not None:
            self._found[kind] = self.news = found
            self.exchanges = self.exchanges or found.exchanges
        self.finding = found or self._found.get(kind)
        return found

    def _ask(self, at_once: int) -> Finding | None:
        """Where there are several ways to add up: one after the other, until one gives the gradient of the whole."""
        assert self._step is not None
        if self._ways is None:
            return self._probe.ask(*self._step, at_once)
        before, first = self._ways.mode, None
        for mode in sorted(self._ways.modes, key=lambda mode: mode != before):
            self._ways.mode = mode
            found = self._probe.ask(*self._step, at_once)
            if found is not None and found.reason is None:
                self._modes[self._kind] = mode
                return found
            first = first or found
            if found is None:
                break  # nothing can be said with this batch
        self._ways.mode = before
        return first

    def _kind_now(self) -> Hashable:
        if self._kind is None and self._step is not None:
            try:
                self._kind = self._asked.known_as(kind_of(self._modules, *self._step)) or _OTHERS
            except Exception as caught:  # noqa: BLE001 - no room for the few numbers that make kinds differ?
                error = caught
            else:
                return self._kind
            if is_oom(error):
                release(error)
            self._kind = _OTHERS
        return self._kind


def _alone(failed: BaseException | None) -> str:
    words = str(failed).partition("\n")[0]  # of a kernel that is missing torch lists a hundred others
    words = words if len(words) <= _WORDS else f"{words[:_WORDS]}..."
    why = f": {type(failed).__name__}: {words}" if failed is not None else ""
    return f"a few of its samples cannot be computed alone{why}"
