"""A training step that happens whole, with the batch that was asked for, or has not happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from buoy._compat import torch as compat
from buoy.errors import BuoyError, UsageError
from buoy.machine.memory import set_cap
from buoy.microbatch.batch import Batch, Split, even
from buoy.microbatch.errors import (
    BadBatch,
    BadLoss,
    CannotSplit,
    OutOfMemory,
    PeerFailed,
    StepError,
    TornStep,
    is_oom,
)
from buoy.microbatch.sizing import SPARE, SizeLog
from buoy.torch.memory.device import HostMemory, left_in, limited, memory_of, release
from buoy.torch.step.gradient import (
    Accumulation,
    LossFunction,
    Step,
    Trained,
    Upstream,
    has_upstream,
    loss_of,
    read_loss,
)
from buoy.torch.step.optimizer import make_atomic, make_scaler_safe
from buoy.torch.step.ranks import GIVE_UP, READY, Vote
from buoy.torch.step.remedies import Switches
from buoy.torch.step.sizes import MeasuredRamp, Sizes, count_of
from buoy.torch.step.snapshot import Rollback, Snapshot

if TYPE_CHECKING:
    from buoy.torch.exactness.policy import SplitPolicy, Ways

_TRIES = 40  # far more than halving ever needs: a bound, not a plan


class Transaction:
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
        ways: Ways | None = None,
        log: SizeLog | None = None,
    ) -> None:
        self._say = say
        self._event = event
        if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
            raise UsageError(
                "micro_batch is not a number of samples", received=repr(micro_batch), expected="1 or more"
            )
        self._micro_batch = micro_batch
        inexact = (inexact,) if isinstance(inexact, str) else tuple(inexact)
        if set(inexact) - {"batchnorm"}:
            raise UsageError("unknown name in inexact", received=repr(inexact), expected='"batchnorm"')
        if memory_cap is not None:
            set_cap(memory_cap, say, gpu=torch.cuda.is_available())
        self._switches = Switches(remedies, say, event)
        self._modules: list[torch.nn.Module] = []
        self._trained = Trained()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._vote = Vote()
        self._rollback = Rollback(self._trained)
        self._expected: tuple[list[Any], list[Any], list[Any]] | None = None
        """What is to be tracked with the first `backward`: a loop that never calls it is left alone."""
        self._inexact, self._ways = inexact, ways
        self._policy: SplitPolicy | None = None
        self._under_way: Step | None = None
        """The step under way, until the policy is asked about it."""
        self._sizes = Sizes(say, event, micro_batch, self._trained, self._optimizers, log)
        self._part = 0
        """Samples of the micro-batch under way."""
        self._voted = self._is_doubt_said = False
        self.last_loss: torch.Tensor | None = None
        """On its device."""
        self.steps = 0
        """Calls of `backward` that went through."""
        self.retries = 0

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Every change of size so far, for `replay`."""
        return self._sizes.history.entries

    def replay(self, sizes: list[dict[str, Any]], done: int = 0) -> None:
        """Use the sizes that an earlier attempt has logged, as far as it came."""
        self._sizes.replay(sizes, self.steps, done)

    @property
    def is_used(self) -> bool:
        """Whether anything is guarded: from the first `backward` on."""
        return bool(self._trained.all)

    def expect(self, modules: list[Any], optimizers: list[Any], scalers: list[Any]) -> None:
        """Guard these from the first `backward` on."""
        known = self._expected or ([], [], [])
        self._expected = known[0] + modules, known[1] + optimizers, known[2] + scalers
        if self.is_used:
            self.take_hold()

    def take_hold(self) -> None:
        """Guard what is expected now."""
        if self._expected is not None:
            expected, self._expected = self._expected, None
            self.track(*expected)

    def track(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any] = (),
    ) -> None:
        """Guard these: their gradients, buffers and steps."""
        modules, optimizers = list(modules), list(optimizers)
        self._vote.watch(modules)
        if self._switches.names:
            self._switches.track(modules)
        self._rollback.snapshot.watch(modules)
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
        if self._expected is not None:
            self.take_hold()
        if not self._trained.all:
            raise UsageError("buoy does not know what to train", received="run.backward before run.track",
                             expected="run.track(model=model, optimizer=optimizer)")  # fmt: skip
        self._trained.look()
        is_first = self._rollback.begin(loss_fn)
        if self._switches.names:
            loss_fn = self._switches.around(loss_fn, self._trained.first, scaler)
        if is_first:
            self._vote.find(self._modules)
        if self._vote.replicas and self._vote.is_group:
            with self._vote.quiet():
                return self._step_in_group(batch, split, loss_fn, reduction, scaler, is_first=is_first)
        self._under_way = step = Step(self._batch(batch, split), loss_fn, reduction, scaler)
        return self._whole_step(step)

    def _step_in_group(
        self,
        batch: object,
        split: Split | None,
        loss_fn: LossFunction,
        reduction: str,
        scaler: Any,
        *,
        is_first: bool,
    ) -> torch.Tensor:
        """One vote decides for all ranks: who refuses the batch says so before the others exchange gradients."""
        __tracebackhide__ = True
        self._voted = self._exchanges
        try:
            self._under_way = step = Step(self._batch(batch, split), loss_fn, reduction, scaler)
            if is_first:
                self._look_first()
        except BuoyError:
            self._tell_peers(GIVE_UP)
            raise
        return self._whole_step(step)

    def _batch(self, batch: object, split: Split | None) -> Batch:
        whole = Batch(batch, split)
        if split is None and has_upstream(whole.arrays):
            whole = Batch(self._rollback.upstream.end_at(batch))
        if whole.reason is not None:
            if whole.once and self._vote.is_group:
                raise BadBatch("this batch cannot be computed again", received=whole.reason,
                               expected="a batch that every rank can compute again when one runs out of memory",
                               hint=whole.hint)  # fmt: skip
            self._say_not_kept(whole.reason)
        return whole

    def _whole_step(self, step: Step) -> torch.Tensor:
        """Try, restore, and retry in smaller micro-batches."""
        __tracebackhide__ = True
        whole = step.batch
        try:
            sizes, ramp = self._sizes.plan(self.steps, whole)
            failure: BaseException | None = None
            may_repeat = True
            for _ in range(_TRIES):
                if len(sizes) > 1 or ramp is not None:
                    sizes, ramp = self._allowed(whole, sizes, ramp, is_retry=failure is not None)
                try:
                    loss = self._try(step, sizes, ramp)
                except _FirstPair:
                    self._check_pairs()
                    continue
                except BaseException as caught:  # noqa: BLE001 - judged outside, where its frames can be released
                    failure = caught
                else:
                    if len(sizes) > 1 or ramp is not None:
                        self._ask().count()
                    self._sizes.learn(self.steps, whole, sizes, ramp)
                    self.steps += 1
                    return loss
                size = self._part or sizes[0]
                smaller = self._after(failure, whole, size, may_repeat)
                may_repeat = may_repeat and smaller < size
                self.retries += 1
                sizes, ramp = even(whole.samples, smaller), None
                self._voted = self._exchanges
            raise self._too_big(MemoryError(f"{_TRIES} tries"))
        finally:
            self._under_way = None  # a batch may be large
            if self._policy is not None:
                self._policy.end()
            if self._rollback.upstream.leaves:
                self._rollback.upstream = Upstream()  # its batch may be large

    def _try(self, step: Step, sizes: list[int], ramp: MeasuredRamp | None) -> torch.Tensor:
        """The loss; where something is raised, everything is restored."""
        __tracebackhide__ = True
        self._part = 0
        # A scaler makes these at its first use.
        scaler = step.scaler
        made = {} if scaler is None else {n: getattr(scaler, n, None) for n in compat.SCALER_FIELDS}
        try:
            found = self._policy.finding if self._policy is not None and self._under_way is None else None
            is_exact = found is not None and found.reason is None
            if ramp is not None or self._sizes.surely_fits(step.batch, max(sizes), is_exact):
                loss = self._computed(step, sizes, ramp)
            else:
                with self._sizes.limited(step.batch, sizes):
                    loss = self._computed(step, sizes, ramp)
            return loss
        except BaseException as error:  # Ctrl-C must find the state of before the step too
            for name, value in made.items():
                setattr(scaler, name, value)
            if not isinstance(error, _FirstPair) and self._rollback.written():
                raise _torn(error) from error
            raise

    def _computed(self, step: Step, sizes: list[int], ramp: MeasuredRamp | None) -> torch.Tensor:
        """The same with a way back, which is taken unless everything went well."""
        __tracebackhide__ = True
        rollback = self._rollback
        tensors = [array for array in step.batch.arrays if isinstance(array, torch.Tensor)]
        versions = list(map(compat.VERSION, tensors))
        with rollback:
            if self._vote.replicas:
                self._rehearse(step, sizes, ramp)
            if ramp is None:
                sums = self._accumulated(step, sizes, None)
            else:
                with ramp.watching():
                    sums = self._accumulated(step, sizes, ramp)
            if rollback.upstream.leaves:
                rollback.upstream.propagate()
            if versions != list(map(compat.VERSION, tensors)):
                raise BadLoss("the loss function changed the batch in place",
                              received="an in-place operation on its input",
                              expected="an input that stays unchanged, so that the step can be retried",
                              hint="`x = x * 2` instead of `x.mul_(2)`, or clone it first")  # fmt: skip
            loss = sums.loss()  # may not fit either
            rollback.gradients.commit()
        self.last_loss = loss
        return loss

    def _accumulated(self, step: Step, sizes: list[int], ramp: MeasuredRamp | None) -> Accumulation:
        """Forward and backward, one micro-batch after the other."""
        __tracebackhide__ = True
        whole, loss_fn, reduction, scaler = step
        rollback = self._rollback
        sums = Accumulation(whole.samples, reduction, rollback.at_start, scaler)
        planned = iter(sizes)
        while sums.left:
            size = self._part = next(planned) if ramp is None else ramp.next(sums.left)
            part = whole.take(sums.done, sums.done + size)
            share = sums.add(loss_of(loss_fn, part), size)
            del part
            if sums.has_weight and not self._ask().is_known:
                raise _FirstPair
            rollback.forward_done(share)
            if not sums.left and (self._vote.replicas or rollback.gradients.before):
                self._before_exchange(share)
            (share if scaler is None else scaler.scale(share)).backward()
            del share  # its graph goes before the next part comes
            rollback.backward_done()
            if ramp is not None:
                ramp.measured(size)
        return sums

    # Whether it may be split.

    def _ask(self) -> SplitPolicy:
        """What decides about the step under way; loaded when it is first needed."""
        if self._policy is None:
            from buoy.torch.exactness.policy import SplitPolicy

            self._policy = SplitPolicy(
                self._modules, self._trained, self._inexact, self._rollback, self._ways
            )
        if self._under_way is not None:
            self._policy.begin(self._under_way)
            self._under_way = None
        return self._policy

    @property
    def _exchanges(self) -> bool:
        """The loss function exchanges numbers with other ranks."""
        return self._policy is not None and self._policy.exchanges

    def _refusal(self, whole: Batch, at_once: int) -> StepError | None:
        """Why this batch must not be split; what was found on the way is taken note of."""
        refusal = self._ask().refusal(at_once)
        self._note(whole)
        return refusal

    def _note(self, whole: Batch) -> list[torch.Tensor]:
        """What the comparison has found; gives the weights that a failed try may have changed for good."""
        policy = self._ask()
        found, policy.news = policy.news, None
        if found is None:
            return []
        self._sizes.note(found.bytes_per_sample, whole)
        self._event("probe", step=self.steps, exact=found.reason is None, reason=found.reason)
        moved = [weight for weight in found.moved if not self._rollback.snapshot.keeps(weight)]
        self._rollback.snapshot.keep(moved)
        return moved

    def _allowed(
        self, whole: Batch, sizes: list[int], ramp: MeasuredRamp | None, *, is_retry: bool
    ) -> tuple[list[int], MeasuredRamp | None]:
        """These sizes, or the whole batch where it must not be split and may still fit; or a refusal."""
        __tracebackhide__ = True
        policy = self._ask()
        refusal = self._refusal(whole, max(sizes) if ramp is None else whole.samples)
        if refusal is None:
            self._say_doubt(whole)
            self._sizes.say_short(self.steps, whole)
            return sizes, ramp
        if not is_retry and not policy.keeps_state and not self._sizes.replays:
            if not self._sizes.is_bound:
                return [whole.samples], None
            # With a doubt there is a split that was meant, and a hint that says how to pass it.
            fails = None if self._vote.is_group or whole.doubt else policy.fails
            if fails is not None and self._sizes.is_only_asked(whole):
                self._say_not_kept(fails)
                return [whole.samples], None
        self._tell_peers(GIVE_UP)
        refusal.hint = self._hint(whole, refusal.hint)
        if policy.no_room is not None:
            raise self._too_big(policy.no_room, "two samples do")
        raise refusal

    def _check_pairs(self) -> None:
        """At the first (sum, weight) of a loss function: it must be one, and the same for the same samples."""
        __tracebackhide__ = True
        policy = self._ask()
        found = policy.compare()
        moves = found is not None and found.reason is not None and found.moved
        if moves or not policy.may_repeat():
            found = policy.finding
            reason, hint = "a loss that cannot be computed a second time", "a smaller batch"
            if found is not None and found.reason is not None:
                reason, hint = found.reason, found.hint or hint
            raise CannotSplit("(sum, weight) is returned, and the batch cannot be split", received=reason,
                              expected="the same sum and weight for the same samples",
                              hint=f"{hint}; or return the loss alone")  # fmt: skip

    # Ranks: one vote per step.

    def _look_first(self) -> None:
        """Before ranks vote it must be known whether the loss function exchanges something itself."""
        policy = self._ask()
        if not policy.is_known:
            policy.compare()
            found = policy.finding
            if found is not None and found.leaves_state:
                raise CannotSplit("this step cannot be recovered in a group of processes", received=found.reason,
                                  expected="the same gradient for the same samples", hint=found.hint)  # fmt: skip
            self._voted = policy.exchanges

    def _before_exchange(self, loss: torch.Tensor) -> None:
        """Every rank must have come this far before gradients are exchanged."""
        if not self._vote.is_group:
            self._rollback.gradients.merge(hooked=True)
            return
        self._voted = True
        vote = self._vote.lowest(READY)
        if vote < READY:
            raise _PeerShrinks(vote)
        self._rollback.gradients.merge()
        self._vote.exchange(loss)

    def _rehearse(self, step: Step, sizes: list[int], ramp: MeasuredRamp | None) -> None:
        """In a group a new size is tried alone first: inside the exchange of gradients nobody can say anything."""
        if not self._vote.is_group or self._exchanges:  # the others may not try it
            return
        if ramp is not None or self._sizes.has_passed(sizes[0], step.batch):
            return
        for _ in range(min(2, len(sizes))):  # the second time with gradients there
            sums = Accumulation(sizes[0], step.reduction, [])
            # Without its weight: a part may have none where the batch has.
            loss, _weight = read_loss(loss_of(step.loss_fn, step.batch.take(0, sizes[0])), step.reduction)
            sums.add(loss, sizes[0]).backward()
            del loss
        self._rollback.start_over()

    def _tell_peers(self, vote: int) -> int:
        """Cast this rank's vote, unless it is already among the others'."""
        if not self._vote.is_group or self._voted:
            return READY
        self._voted = True
        return self._vote.lowest(vote)

    # After a failed try.

    def _after(self, failure: BaseException, whole: Batch, size: int, may_repeat: bool) -> int:
        """The size for the next try, the same on every rank; or the failure, in words."""
        __tracebackhide__ = True
        if isinstance(failure, _PeerShrinks):
            smaller = failure.size
            if smaller != GIVE_UP:
                self._sizes.follow(smaller, size, whole)
                self._say_retry(f"another process ran out of memory; retrying the step in micro-batches of {smaller}",
                                size, smaller)  # fmt: skip
        elif not is_oom(failure):
            self._tell_peers(GIVE_UP)
            raise failure
        else:
            release(failure)
            self._sizes.history.leave()
            smaller = self._smaller(whole, size, failure, may_repeat)
            smaller = min(smaller, self._tell_peers(smaller))
        if smaller == GIVE_UP:
            raise PeerFailed("another process could not run this step", received="its vote",
                             expected="every rank ready", hint="its own error says why") from failure  # fmt: skip
        return smaller

    def _smaller(self, whole: Batch, size: int, error: BaseException, may_repeat: bool) -> int:
        """The size that this rank would use next."""
        if self._vote.is_group and self._voted:
            raise OutOfMemory("out of memory while ranks communicate", received=str(error).split("\n")[0],
                              expected="room for the exchange besides the step", hint="resume from the last "
                              "checkpoint, with micro_batch= or smaller batches") from error  # fmt: skip
        policy = self._ask()
        refusal = policy.refusal(max(1, size // 2)) if size > 1 or whole.reason else None
        if self._note(whole):
            self._tell_peers(GIVE_UP)
            raise _torn(error) from error
        if size > 1 and refusal is None:
            smaller = self._sizes.after_oom(size, whole)
            self._say_retry(f"out of memory with {count_of(size)}; retrying the step in micro-batches of {smaller}",
                            size, smaller)  # fmt: skip
            return smaller
        # What the failed try held is free now: once more as it was.
        if may_repeat and policy.may_repeat():
            what = count_of(size) if whole.reason is None else "the whole batch"
            self._say_retry(f"out of memory with {what}; retrying the step", size, size)
            return size
        self._tell_peers(GIVE_UP)
        found = policy.finding
        if found is not None and found.leaves_state:
            raise CannotSplit("out of memory, and this batch cannot be split", received=found.reason,
                              expected="the same gradient for the same samples",
                              hint=self._hint(whole, found.hint)) from error  # fmt: skip
        if refusal is None or policy.no_room is not None:
            no_room = policy.no_room if refusal is not None else None
            raised: StepError = self._too_big(error if no_room is None else no_room,
                                              "one sample does" if no_room is None else "two samples do")  # fmt: skip
            raised.hint = self._hint(whole, raised.hint)
            raise raised
        if not isinstance(refusal, CannotSplit):
            raise refusal
        raise CannotSplit("out of memory, and this batch cannot be split", received=refusal.received,
                          expected="a batch that fits, or a gradient that is a sum over samples",
                          hint=self._hint(whole, refusal.hint)) from error  # fmt: skip

    def _hint(self, whole: Batch, hint: str | None) -> str | None:
        words = "; or: ".join(words for words in (whole.hint or hint, whole.doubt) if words)
        return self.usable(words) if words else None

    def usable(self, hint: str) -> str:
        """What to do in words of the loop that this is; a trainer's has no `run.backward` to pass something to."""
        return hint

    def _too_big(self, error: BaseException, what: str = "one sample does") -> OutOfMemory:
        from buoy.torch.memory.holders import too_big

        return too_big(self._modules, self._trained.now, self._optimizers, error, what, self._switches.names)

    def _say_not_kept(self, reason: str) -> None:
        if self._micro_batch is not None:
            self._say(f"ignoring micro_batch={self._micro_batch}: this batch cannot be split ({reason})")
            self._micro_batch = None  # said once

    def _say_doubt(self, whole: Batch) -> None:
        """Once: the comparison has shown that such a split is exact, but it may not be the one that was meant."""
        if not self._is_doubt_said:
            self._is_doubt_said = True
            if whole.doubt is not None:
                self._say(whole.doubt)
            if (found := self._ask().finding) is not None and found.loss_differs:
                self._say(
                    "the gradient is that of the whole batch, but its loss differs from that of its "
                    "micro-batches: where a batch is split, the returned loss differs"
                )

    def _say_retry(self, words: str, size: int, smaller: int) -> None:
        self._say(words)
        self._event("retry", what="oom", step=self.steps, samples=size, smaller=smaller)

    # What the optimizers' steps ask.

    @property
    def inside(self) -> bool:
        """A loss is being computed: nobody may step now."""
        return self._rollback.inside

    def has_room(self, parameter: torch.Tensor, need: int) -> bool:
        """Whether so many bytes can surely be had where this is."""
        memory = memory_of(parameter)
        if need < SPARE and isinstance(memory, HostMemory):
            return True
        left = left_in(memory)
        return left is not None and left > need

    def limited(self, parameter: torch.Tensor) -> AbstractContextManager[None]:
        """Around what may ask for more memory than there is where this is."""
        return limited(memory_of(parameter))

    def recovered(self, what: str) -> None:
        """A failed optimizer step was rolled back and is retried."""
        self.retries += 1
        self._say(f"out of memory in the {what}; rolled back and retried")
        self._event("retry", what=what, step=self.steps)

    def way_back(self) -> Callable[[], object]:
        """From what a closure inside an optimizer's step changes besides gradients."""
        snapshot = Snapshot()
        snapshot.watch(self._modules)
        snapshot.take()
        return snapshot.restore

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the same sizes."""
        return {**self._sizes.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._sizes.load_state_dict(state)
        self.steps = state["steps"]


def _torn(error: BaseException) -> TornStep:
    return TornStep("the step failed after it had changed weights", received=str(error).split("\n")[0],
                    expected="weights that are still unchanged",
                    hint="resume from the last checkpoint; step optimizers and update teacher models after "
                         "run.backward(...), so that buoy can retry a failed step")  # fmt: skip


class _FirstPair(Exception):  # noqa: N818 - never leaves this module
    """A loss function has given (sum, weight) for the first time."""


class _PeerShrinks(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
