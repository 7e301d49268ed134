"""Whether batches may be cut: what the probe found, asked for again now and then."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from buoy.microbatch.asked import Asked
from buoy.microbatch.errors import CannotSplit, StepError
from buoy.microbatch.oom import is_oom
from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.beside import GradientBeside
from buoy.torch.carried import STATE_HINT, Carried, keeps_state
from buoy.torch.few import SAMPLES
from buoy.torch.kind import kind_of
from buoy.torch.memory import limited, memory_of
from buoy.torch.pairs import NoPair
from buoy.torch.probe import DEPENDS, NOT_AGAIN, Finding, Probe
from buoy.torch.release import release
from buoy.torch.selecting import LOOKED_AT, telling_rows
from buoy.torch.trained import Trained
from buoy.torch.vote import GIVE_UP, READY, Vote

_OTHERS = "others"
_WORDS = 200  # characters of somebody's exception
_NAMES = 8  # of what a loss function changes that are looked at, one by one, for the reason of a refusal


class Cutting:
    """Remembers the answer for each kind of step, and when to ask again: at its 1st, 2nd, 4th, 8th... that is cut.

    A later batch may show what the first did not: a mean over tokens is one over samples until one is padded.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        trained: Trained,
        carried: Carried,
        inexact: tuple[str, ...],
        attempt: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._modules = modules
        self._trained, self._carried = trained, carried
        self._probe = Probe(modules, trained.now, inexact)
        self._attempt = attempt
        self._is_asked = False
        self._asks = 0
        self._asked = Asked()
        self._found: dict[Hashable, Finding] = {}
        self._step: tuple[Batch, LossFunction, str] | None = None
        self._kind: Hashable = None
        """Of the step that is under way, once it was needed."""
        self._is_fresh = False
        """Whether that step was compared already."""
        self.finding: Finding | None = None
        """Of the last step that was asked about."""
        self.exchanges = False
        """A loss function exchanges numbers with other ranks: one that fails inside it cannot vote, nor try alone."""
        self.steps = 0
        """Steps that were cut."""

    def ask_first(self, whole: Batch, loss_fn: LossFunction, reduction: str, vote: Vote) -> Finding | None:
        """With the first batch that can be cut; the finding when there is a new one. To be asked at each step."""
        self._step, self._kind, self._is_fresh = (whole, loss_fn, reduction), None, False
        self._asks += 1
        if self._is_asked or (self._probe.failed is not None and self._asks & (self._asks - 1)):
            return None  # what fails is asked about at the 1st, 2nd, 4th... step, and when a cut is needed
        found = self._compare()
        self._is_asked = found is not None or vote.is_group
        if (
            vote.is_group
            and vote.lowest(GIVE_UP if self.reason(whole) else READY) == GIVE_UP
            and found is not None
        ):
            found.reason = found.reason or "another rank found that its batch cannot be cut"
        if isinstance(self._probe.failed, NoPair):
            raise self._probe.failed
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

    @property
    def fails(self) -> str | None:
        """What a few samples or a part of them raised, if that is all that forbids a cut."""
        if self.finding is not None:
            return self.finding.reason if self.finding.fails else None
        failed = self._probe.failed
        return None if failed is None or isinstance(failed, StepError) else _alone(failed)

    def refusal(self, whole: Batch) -> StepError | None:
        """To be asked before each step that is cut."""
        if whole.reason is not None:
            return CannotSplit(
                "this batch cannot be cut", received=whole.reason, expected="arrays, or `split=`"
            )
        kind = self._kind_now()
        self.finding = self._found.get(kind)
        is_due = self._asked.is_due(kind) or not (self.finding is None or self.finding.is_shown)
        # The first long batch of a training that was compared: all this is work beside it. The next gets it in full.
        is_known = self.finding is not None and not self._is_fresh and not self._asked.was_cut(kind)
        if self.finding is None or (is_due and not self._is_fresh):
            self._compare(SAMPLES // 2 if is_known else SAMPLES)
        if is_due and self.finding is not None and self.finding.reason is None:
            self._look_at_losses(kind, SAMPLES if is_known else LOOKED_AT)
        if self.finding is None:
            failed = self._probe.failed
            if isinstance(failed, StepError):
                return failed  # of this loss or batch, cut or not
            alone, state = _alone(failed), self._carried.state_of(whole.samples)
            return CannotSplit("nothing shows that this batch can be cut with the same gradient",
                               received=alone if state is None else f"{keeps_state(state)}; {alone}",
                               expected="a comparison of whole and parts",
                               hint="a smaller batch; `split=` where samples are not the first dimension"
                               if state is None else STATE_HINT)  # fmt: skip
        if self.finding.reason is not None:
            before = self._asked.doubt(self._kind)
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
            except Exception as caught:  # noqa: BLE001 - no room for the few numbers that tell kinds apart?
                error = caught
            else:
                return self._kind
            if is_oom(error):
                release(error)
            self._kind = _OTHERS
        return self._kind

    def _compare(self, samples: int = SAMPLES) -> Finding | None:
        assert self._step is not None
        kind, self._is_fresh = self._kind_now(), True
        self._carried.moved = {}
        with limited(memory_of(self._trained.first)):  # a few samples may be all that the batch has
            found = self._ask(*self._step, samples)
            if (
                self._trained.look()
            ):  # the loss function freezes and thaws: only now is it known what it trains
                found = self._ask(*self._step, samples)
            if found is not None and (found.fails or found.reason in (DEPENDS, NOT_AGAIN)):
                self._explain(found)
        if found is not None:
            self._found[kind] = found
            self.exchanges = self.exchanges or found.exchanges
        self.finding = found or self._found.get(kind)
        return found

    def _look_at_losses(self, kind: Hashable, most: int) -> None:
        """Which samples count may be known by computing only."""
        assert self._step is not None
        whole, loss_fn, reduction = self._step
        telling = telling_rows(whole, loss_fn, reduction, self._modules, self._attempt, most)
        if telling is None:
            return
        found = self._probe.ask(
            whole, loss_fn, reduction, self._attempt, rows=telling.rows, alone=telling.alone
        )
        if found is not None and found.reason is not None:
            self._found[kind] = self.finding = found

    def _explain(self, found: Finding) -> None:
        """In better words, where it is shown that a state or hooks are the reason: without them parts are the whole."""
        assert self._step is not None
        whole, loss_fn, reduction = self._step
        moved, self._carried.moved = self._carried.moved, {}
        if moved and self._may_cut(whole, self._carried.forgetting(loss_fn, moved), reduction):
            found.fails = False
            found.reason, found.hint = self._what_is_kept(moved)
        elif not found.moved and not found.steps_inside:
            with _without_hooks(self._trained.now) as had_any:
                if had_any and self._may_cut(whole, loss_fn, reduction):
                    found.reason = (
                        "gradient hooks of parameters see the gradient of each part, not that of the batch"
                    )
                    found.hint = (
                        "clamp or clip once the gradient of the batch is there, before `optimizer.step()`"
                    )

    def _what_is_kept(self, moved: dict[str, bool]) -> tuple[str, str]:
        """Which of these it is, if one alone is the reason; the first of them otherwise."""
        assert self._step is not None
        whole, loss_fn, reduction = self._step
        names = sorted(moved, key=lambda name: not moved[name])[:_NAMES]
        alone = (n for n in names if self._may_cut(whole, self._carried.forgetting(loss_fn, [n]), reduction))
        name = names[0] if len(names) == 1 else next(alone, names[0])
        if name in self._carried.generators:
            return (
                f"`{name}` is a random generator of your own, and draws other numbers for parts than for the whole",
                "draw with torch, random or np.random themselves; or before run.backward(...), into the batch",
            )
        if moved[name]:
            return keeps_state(name), STATE_HINT
        return (
            f"{name} changes with each call of the loss function, and the gradient with it",
            "keep what counts or collects out of it: a batch that is cut is several calls",
        )

    def _may_cut(self, whole: Batch, loss_fn: LossFunction, reduction: str) -> bool:
        found = self._ask(whole, loss_fn, reduction)
        return found is not None and found.reason is None

    def _ask(
        self, whole: Batch, loss_fn: LossFunction, reduction: str, samples: int = SAMPLES
    ) -> Finding | None:
        try:
            guarded = self._trained.guarded
            return self._probe.ask(whole, loss_fn, reduction, self._attempt, samples, guarded=guarded)
        except GradientBeside as beside:
            self._trained.also(beside.leaves)
            self._trained.look()
        # Once: what is new again is made by the loss function in each call.
        return self._probe.ask(whole, loss_fn, reduction, self._attempt, samples)


def _alone(failed: BaseException | None) -> str:
    words = str(failed).partition("\n")[0]  # of a kernel that is missing torch lists a hundred others
    words = words if len(words) <= _WORDS else f"{words[:_WORDS]}..."
    why = f": {type(failed).__name__}: {words}" if failed is not None else ""
    return f"a few of its samples cannot be computed alone{why}"


@contextmanager
def _without_hooks(parameters: list[torch.Tensor]) -> Iterator[bool]:
    """Whether there were any."""
    found: list[Any] = [
        hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks
    ]
    held = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield bool(found)
    finally:
        for hooks, kept in zip(found, held, strict=True):
            hooks.update(kept)
