"""A training step that happens whole, with the batch that was asked for, or has not happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from buoy.errors import BuoyError, UsageError
from buoy.microbatch.errors import BadBatch, BadLoss, CannotSplit, OutOfMemory, PeerFailed, TornStep
from buoy.microbatch.oom import is_oom
from buoy.microbatch.split import Batch, Split, even
from buoy.torch.backward import LossFunction, Progress, accumulate, read_loss
from buoy.torch.before import Before
from buoy.torch.cutting import Cutting
from buoy.torch.memory import left_in, limited, memory_of
from buoy.torch.optimizer_step import make_atomic
from buoy.torch.peak import too_big
from buoy.torch.ramp import MeasuredRamp
from buoy.torch.release import release
from buoy.torch.scaler_step import make_scaler_safe
from buoy.torch.sizes import Sizes, count_of
from buoy.torch.snapshot import Snapshot
from buoy.torch.switches import Switches
from buoy.torch.trained import Trained
from buoy.torch.upstream import has_upstream
from buoy.torch.vote import GIVE_UP, READY, Vote

_TRIES = 40  # far more than halving ever needs: a bound, not a plan


class Transaction(Progress):
    """Computes gradients in micro-batches and survives running out of memory; used by `buoy.Run.backward`."""

    def __init__(
        self,
        *,
        say: Callable[[str], object],
        event: Callable[..., object],
        micro_batch: int | None = None,
        inexact: tuple[str, ...] | str = (),
        memory_cap: str | int | None = None,
        remedies: tuple[str, ...] | str = (),
    ) -> None:
        self._say = say
        self._event = event
        if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
            raise UsageError(
                "micro_batch is not a number of samples", received=repr(micro_batch), expected="1 or more"
            )
        self._micro_batch = micro_batch
        self._inexact = (inexact,) if isinstance(inexact, str) else tuple(inexact)
        if set(self._inexact) - {"batchnorm"}:
            raise UsageError("unknown word in inexact", received=repr(inexact), expected='"batchnorm"')
        if memory_cap is not None:
            from buoy.torch.cap import set_cap

            set_cap(memory_cap, say)
        self._switches = Switches(remedies, say, event)
        self._modules: list[torch.nn.Module] = []
        self._trained = Trained()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._vote = Vote()
        self._before = Before(self._modules, self._trained, self._vote.watch)
        self._cutting = Cutting(
            self._modules, self._trained, self._before.carried, self._inexact, self._before.guarded
        )
        self._sizes = Sizes(say, event, micro_batch, self._trained, self._optimizers, self._cutting)
        self._ramp: MeasuredRamp | None = None
        self._part = 0
        self._voted = self._is_doubt_told = False
        self.steps = 0
        """Calls of `backward` that went through."""
        self.retries = 0

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Every change of size so far, for `replay`."""
        return self._sizes.entries

    def replay(self, sizes: list[dict[str, Any]], done: int = 0) -> None:
        """Use the sizes that an earlier attempt has logged, as far as it came."""
        self._sizes.replay(sizes, self.steps, done)

    def track(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any] = (),
    ) -> None:
        """Guard these: their gradients, buffers and steps."""
        modules, optimizers = list(modules), list(optimizers)
        self._vote.watch(modules)
        self._switches.track(modules)
        self._before.watch(modules)
        self._modules += modules
        self._optimizers += optimizers
        self._trained.add(modules, optimizers)
        for optimizer in optimizers:
            make_atomic(optimizer, self)
        for scaler in scalers:
            make_scaler_safe(scaler, self._optimizers, self)

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
        __tracebackhide__ = True
        if not self._trained.all:
            raise UsageError("nothing to train is known", received="run.backward before run.track",
                             expected="run.track(model=model, optimizer=optimizer)")  # fmt: skip
        self._trained.look()
        self._before.begin(loss_fn)
        loss_fn = self._switches.around(loss_fn, self._trained.first, scaler)
        with self._vote.quiet():
            self._voted = self._cutting.exchanges
            try:
                whole = Batch(batch, split)
                if split is None and has_upstream(whole.arrays):
                    whole = Batch(self._before.upstream.end_at(batch))
                if whole.once and self._vote.is_group:
                    raise BadBatch("this batch cannot be computed again", received=whole.reason,
                                   expected="a batch that every rank can compute again when one runs out of memory",
                                   hint=whole.hint)  # fmt: skip
                found = self._cutting.ask_first(whole, loss_fn, reduction, self._vote)
            except BuoyError:
                self._cutting.abstain(self._vote)
                self._tell_peers(GIVE_UP)
                raise
            if whole.reason is not None:
                self._tell_not_kept(whole.reason)
            if found is not None:
                self._sizes.note(found, whole)
                self._before.snapshot.keep(found.moved)
                self._event("probe", step=self.steps, exact=found.reason is None, reason=found.reason)
            try:
                return self._done(whole, loss_fn, reduction, scaler)
            finally:
                self._cutting.let_go()
                self._before.let_go()

    def _done(self, whole: Batch, loss_fn: LossFunction, reduction: str, scaler: Any) -> torch.Tensor:
        __tracebackhide__ = True
        parts, ramp = self._sizes.plan(self.steps, whole)
        again = True
        for _ in range(_TRIES):
            self._voted = self._cutting.exchanges
            if len(parts) > 1 or ramp is not None:
                refusal = self._cutting.refusal(whole)
                fails = self._cutting.fails if refusal is not None and not self._vote.is_group else None
                # With a doubt there is a cut that was meant, and a hint that says how to pass it.
                if fails is not None and whole.doubt is None and self._sizes.is_only_asked(whole):
                    self._tell_not_kept(fails)
                    parts, ramp = [whole.samples], None
                elif refusal is not None:
                    self._tell_peers(GIVE_UP)
                    refusal.hint = self._hint(whole, refusal.hint)
                    no_room = self._cutting.no_room
                    raise refusal if no_room is None else self._too_big(no_room, "two samples do")
                else:
                    self._tell_doubt(whole)
            outcome = self._try(whole, parts, ramp, loss_fn, reduction, scaler)
            if isinstance(outcome, torch.Tensor):
                self._sizes.learn(self.steps, whole, parts, ramp)
                self.steps += 1
                return outcome
            size = self._part or parts[0]
            smaller = self._after(outcome, whole, size, again)
            again = again and smaller < size
            self.retries += 1
            parts, ramp = even(whole.samples, smaller), None
        raise self._too_big(MemoryError(f"{_TRIES} tries"))

    def _after(self, failure: BaseException, whole: Batch, size: int, again: bool) -> int:
        """The size that every rank goes on with; or the failure, in words."""
        __tracebackhide__ = True
        if isinstance(failure, _PeerShrinks):
            smaller = failure.size
            if smaller != GIVE_UP:
                self._sizes.follow(smaller, size, whole)
                self._tell(f"another process ran out of memory; the step is done again, {smaller} at a time",
                           size, smaller)  # fmt: skip
        elif not is_oom(failure):
            self._tell_peers(GIVE_UP)
            raise failure
        else:
            release(failure)
            self._sizes.leave_log()
            smaller = self._smaller(whole, size, failure, again)
            smaller = min(smaller, self._tell_peers(smaller))
        if smaller == GIVE_UP:
            raise PeerFailed("another process could not do this step", received="its vote",
                             expected="every rank ready", hint="its own error says why") from failure  # fmt: skip
        return smaller

    def _try(
        self,
        whole: Batch,
        parts: list[int],
        ramp: MeasuredRamp | None,
        loss_fn: LossFunction,
        reduction: str,
        scaler: Any,
    ) -> torch.Tensor | BaseException:
        """The loss; or what was raised, with everything put back."""
        __tracebackhide__ = True
        versions = [getattr(array, "_version", 0) for array in whole.arrays]
        left = iter(parts)
        self._ramp, self._part = ramp, 0

        def next_size(remaining: int) -> int:
            self._part = next(left) if ramp is None else ramp.next(remaining)
            return self._part

        def work() -> torch.Tensor:
            __tracebackhide__ = True
            self._rehearse(whole, parts, ramp, loss_fn, reduction)
            with ramp.watching() if ramp is not None else nullcontext():
                loss = accumulate(
                    whole.samples, next_size, whole.take, loss_fn, reduction=reduction, scaler=scaler,
                    parameters=self._before.leaves, progress=self,
                )  # fmt: skip
                self._before.upstream.go_on()
            if versions != [getattr(array, "_version", 0) for array in whole.arrays]:
                raise BadLoss("the loss function changed the batch in place",
                              received="an in-place operation on its input",
                              expected="an input that a second try finds as it was",
                              hint="`x = x * 2` instead of `x.mul_(2)`, or clone it first")  # fmt: skip
            self._before.gradients.commit()
            return loss

        # A scaler makes these at its first use.
        made = (
            {}
            if scaler is None
            else {name: getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")}
        )
        found = self._cutting.finding
        weights = self._trained.all if found is not None and found.steps_inside else []
        counts = [parameter._version for parameter in weights]
        try:
            with nullcontext() if ramp is not None else self._sizes.limited(whole, parts):
                return self._before.guarded(work, keep=True)
        except BaseException as error:  # noqa: BLE001 - Ctrl-C must find the state of before the step too
            for name, value in made.items():
                setattr(scaler, name, value)
            if counts != [parameter._version for parameter in weights]:
                return TornStep("the step failed after an optimizer had stepped inside the backward pass",
                                received=str(error).split("\n")[0], expected="weights that nothing has changed yet",
                                hint="some weights are updated and some are not: go on from the last checkpoint; step "
                                     "after run.backward(...) to have failed steps undone")  # fmt: skip
            return error

    # What accumulate tells on the way (backward.Progress).

    def forward_done(self, loss: torch.Tensor) -> None:
        """Batch statistics count once, even if backward computes them again."""
        self._before.see(loss)
        self._before.snapshot.keep_statistics()

    def last_backward(self, loss: torch.Tensor) -> None:
        """Every rank must have come this far before gradients are exchanged."""
        if not self._vote.is_group:
            self._before.gradients.merge(hooked=True)
            return
        self._voted = True
        vote = self._vote.lowest(READY)
        if vote < READY:
            raise _PeerShrinks(vote)
        self._before.gradients.merge()
        self._vote.exchange(loss)

    def backward_done(self, size: int) -> None:
        """A part is done."""
        self._before.snapshot.put_statistics_back()
        if self._ramp is not None:
            self._ramp.measured(size)

    def _rehearse(
        self, whole: Batch, parts: list[int], ramp: MeasuredRamp | None, loss_fn: LossFunction, reduction: str
    ) -> None:
        """In a group a new size is tried alone first: inside the exchange of gradients nobody can be told."""
        if not self._vote.is_group or self._cutting.exchanges:  # the others may not try it
            return
        if ramp is not None or self._sizes.has_passed(parts[0], whole):
            return
        sizes = [parts[0]] * min(2, len(parts))  # the second time with gradients there
        for size in sizes:  # without its weight: a part may have none where the batch has
            accumulate(size, lambda left: left, whole.take, lambda part: read_loss(loss_fn(part), reduction)[0],
                       reduction=reduction, scaler=None, parameters=[], progress=Progress())  # fmt: skip
        self._before.start_over()

    def _tell_peers(self, vote: int) -> int:
        """Cast this rank's vote, unless it is already among the others'."""
        if not self._vote.is_group or self._voted:
            return READY
        self._voted = True
        return self._vote.lowest(vote)

    def _smaller(self, whole: Batch, size: int, error: BaseException, again: bool) -> int:
        """The size that this rank would go on with."""
        if self._vote.is_group and self._voted:
            raise OutOfMemory("out of memory while ranks exchange numbers", received=str(error).split("\n")[0],
                              expected="room for the exchange beside the step", hint="go on from the last "
                              "checkpoint, with micro_batch= or smaller batches") from error  # fmt: skip
        reason = self._cutting.reason(whole)
        found = self._cutting.finding
        again = again and not whole.once and not (found is not None and found.once)
        # What the failed try held is free now: once more as it was.
        if (size == 1 or reason or self._cutting.fails) and again:
            what = count_of(size) if whole.reason is None else "the whole batch"
            self._tell(f"out of memory with {what}; the step is done again", size, size)
            return size
        if size > 1 and not reason:
            smaller = self._sizes.after_oom(size, whole)
            self._tell(f"out of memory with {count_of(size)}; the step is done again, {smaller} at a time",
                       size, smaller)  # fmt: skip
            return smaller
        self._tell_peers(GIVE_UP)
        if reason is None:
            told = self._too_big(error)
            told.hint = self._hint(whole, told.hint)
            raise told
        hint = self._hint(whole, found.hint if found is not None else None)
        raise CannotSplit("out of memory, and this batch cannot be cut", received=reason,
                          expected="a batch that fits, or a gradient that is a sum over samples",
                          hint=hint) from error  # fmt: skip

    def _hint(self, whole: Batch, hint: str | None) -> str | None:
        words = "; or: ".join(words for words in (whole.hint or hint, whole.doubt) if words)
        return self.usable(words) if words else None

    def usable(self, hint: str) -> str:
        """What to do in words of the loop that this is; a trainer's has no `run.backward` to pass something to."""
        return hint

    def _too_big(self, error: BaseException, what: str = "one sample does") -> OutOfMemory:
        return too_big(self._modules, self._trained.now, self._optimizers, error, what, self._switches.names)

    def _tell_not_kept(self, reason: str) -> None:
        if self._micro_batch is not None:
            self._say(f"micro_batch={self._micro_batch} is not kept, this batch cannot be cut: {reason}")
            self._micro_batch = None  # told once

    def _tell_doubt(self, whole: Batch) -> None:
        """Once: the comparison has shown that such a cut is exact, but it may not be the one that was meant."""
        if not self._is_doubt_told:
            self._is_doubt_told = True
            if whole.doubt is not None:
                self._say(whole.doubt)
            if (found := self._cutting.finding) is not None and found.loss_differs:
                self._say(
                    "the gradient is that of the whole batch, but its loss is not that of its parts together: where a "
                    "batch is cut, the loss that comes back differs"
                )

    def _tell(self, words: str, size: int, smaller: int) -> None:
        self._say(words)
        self._event("retry", what="oom", step=self.steps, samples=size, smaller=smaller)

    # What the optimizers' steps ask (optimizer_step.Guard).

    @property
    def inside(self) -> bool:
        """A loss is being computed: nobody may step now."""
        return self._before.inside

    def has_room(self, parameter: torch.Tensor, need: int) -> bool:
        """Whether so many bytes can surely be had where this is."""
        left = left_in(memory_of(parameter))
        return left is not None and left > need

    def limited(self, parameter: torch.Tensor) -> AbstractContextManager[None]:
        """Around what may ask for more memory than there is where this is."""
        return limited(memory_of(parameter))

    def recovered(self, what: str) -> None:
        """A failed optimizer step was undone and is done again."""
        self.retries += 1
        self._say(f"out of memory in the {what}; undone and done again")
        self._event("retry", what=what, step=self.steps)

    def way_back(self) -> Callable[[], object]:
        """From what a closure inside an optimizer's step changes besides gradients."""
        snapshot = Snapshot()
        snapshot.watch(self._modules)
        snapshot.take()
        return snapshot.restore

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same sizes."""
        return {
            **self._sizes.state_dict(),
            "steps": self.steps,
            "split_steps": self._cutting.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizes.load_state_dict(state)
        self.steps, self._cutting.steps = state["steps"], state["split_steps"]


class _PeerShrinks(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
