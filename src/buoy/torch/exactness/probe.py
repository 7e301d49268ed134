"""Does splitting the batch change the gradient of this model and loss? PyTorch's part of the ladder in `microbatch`.

Asked with a few samples. What is tracked is left as it was found; a loss function that keeps a state elsewhere gives
another gradient the second time, and is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from buoy._compat import torch as compat
from buoy.microbatch.batch import Batch, even
from buoy.microbatch.errors import BadLoss, CannotSplit, StepError, is_oom
from buoy.microbatch.exactness import (
    STRETCHES,
    Answer,
    Gradient,
    NoPair,
    Pair,
    PartError,
    Refused,
    Trial,
    are_equal,
    check_pair,
    compare,
    judge,
    parts_of,
)
from buoy.torch.exactness.randomness import ExchangedInside, FixedRandomness, eager, has_peers, same_random
from buoy.torch.exactness.rounding import Nudged, disturbed
from buoy.torch.exactness.samples import FEWEST, MANY, SAMPLES, some, spread, trials_of, twice
from buoy.torch.exactness.weights import CopyOnWrite, SteppedInside, places
from buoy.torch.memory.device import AllocationWatch, release
from buoy.torch.step.gradient import (
    Accumulation,
    LossFunction,
    Step,
    Upstream,
    arrived,
    as_it_came,
    has_upstream,
    loss_of,
)
from buoy.torch.step.snapshot import Rollback

STATE = (
    "the same samples give a different gradient the second time: the loss function keeps state between calls"
)
STATE_HINT = (
    "put the state into the batch (`(x, y, hidden)`, with one row per sample) or into a buffer of a tracked module; "
    "draw with torch, not with a generator of your own; read files and count before run.backward(...)"
)
DEPENDS = "the gradient of the batch differs from that of its micro-batches: samples depend on each other"
_DEPENDS_HINT = (
    "a mean over tokens, boxes, positives or what is not ignored: return (sum of the losses, how many); "
    "where the first dimension is not the samples (time first): `split=`; a loss that compares samples of a "
    "batch (contrastive) cannot be split: use a smaller batch"
)
_FROM_BEFORE = Refused(
    "the loss function uses tensors that were computed with gradients before it ran",
    "compute it in the loss function, or pass it as the batch",
)
_LOSS_ALIKE = 1e-3  # far beyond rounding: what differs is said, not refused


@dataclass
class Finding:
    """What the probe found."""

    reason: str | None
    """Why the batch must not be split; None when it may be."""
    hint: str | None = None
    bytes_per_sample: float | None = None
    """An upper bound, from a few samples."""
    moved: tuple[torch.Tensor, ...] = ()
    """Weights that computing a loss changes; the comparison has restored them."""
    exchanges: bool = False
    """Its loss function exchanges something with other processes."""
    repeats: bool | None = None
    """Whether the same samples gave the same gradient again; None where that was not asked."""
    fails: bool = False
    """A part raised something, which is all that is known."""
    leaves_state: bool = False
    """The comparison has left something behind that nobody can restore."""
    loss_differs: bool = False
    """The gradients of parts add up, their losses do not: the square of a mean has such."""


class FewSamples:
    """A `Backend`: the gradient of a few samples of one loss function; holds none of them."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        parameters: list[torch.Tensor],
        loss_fn: LossFunction,
        reduction: str,
        rollback: Rollback,
    ) -> None:
        self.modules, self.parameters = modules, parameters
        self.loss_fn, self.reduction, self._rollback = loss_fn, reduction, rollback
        self._watch, self._random = AllocationWatch(), FixedRandomness()
        self._random.restored = rollback.snapshot.generators
        self._live: int | None = None
        """Bytes of parameters and activations before the first backward pass."""
        self._strangers: list[tuple[str, Any, str, torch.Tensor, int]] = []
        """Buffers and weights of modules that were called and are not tracked, as they were found."""
        self.pairs: dict[bool, tuple[list[Pair], Sequence[int]]] = {}
        """What the loss function gave as (sum, weight), of the whole (False) and of parts (True)."""
        self._left: dict[bool, list[torch.Tensor]] = {}
        self.losses: dict[bool, tuple[float, float]] = {}
        """The loss, and its size without signs."""
        self.written: list[str] = []
        """Buffers that the last computation changed."""
        self.moved: dict[str, bool] = {}
        """Weights that a computation changed, and whether in its backward pass."""

    @property
    def tolerance(self) -> float:
        """Of the coarsest numbers that were computed with."""
        return self._random.tolerance

    @property
    def is_deterministic(self) -> bool:
        """An accelerator adds in any order, which alone is a difference near the goal of a training."""
        return all(parameter.is_cpu for parameter in self.parameters)

    @property
    def drew(self) -> bool:
        """Something random was computed."""
        return self._random.drew

    def other_draws(self) -> Iterator[Any]:
        """The high side."""
        yield self._other_side()

    @contextmanager
    def _other_side(self) -> Iterator[None]:
        self._random.other_side = True
        try:
            yield
        finally:
            self._random.other_side = False

    @contextmanager
    def disturbed(self, samples: Batch) -> Iterator[Batch | None]:
        """Other numbers and labels; a user's own split knows its samples only as they are."""
        yield None if samples.gives_ranges_only else disturbed(samples)

    def size(self, array: torch.Tensor) -> float:
        """Its norm."""
        return float(_real(array).double().norm())

    def apart(self, one: torch.Tensor, other: torch.Tensor) -> float:
        """The norm of the difference."""
        if one.shape != other.shape:
            return math.inf
        return float((_real(one).double() - _real(other).double()).norm())

    def gradient(self, samples: Batch, sizes: Sequence[int], nudge: int = 0) -> Gradient:
        """Over the first of these samples, in parts of these sizes."""
        # What a hook does to a gradient, it does not do to one that is stretched.
        by = STRETCHES[nudge - 1] if nudge and not any(map(compat.gradient_hooks, self.parameters)) else 1.0

        with self._rollback:
            before, weights = self._buffers(), CopyOnWrite(self.modules)
            ends: list[Upstream] = []
            self._random.ahead = weights.see
            try:
                with ExitStack() as stack:
                    if self._live is None:
                        stack.enter_context(self._looking())
                    if nudge:
                        stack.enter_context(Nudged(self.parameters, nudge))
                    for each in (self._random, weights, as_it_came(samples.arrays), eager()):
                        stack.enter_context(each)
                    self._accumulate(samples, sizes, by, ends)
                written = weights.written()
                left = self._left[len(sizes) > 1] = [some(written[name]) for name in sorted(written)]
                self.moved |= weights.moved
            finally:
                weights.restore()
            after = self._buffers()
            self.written = [name for name in after if not after[name].equal(before[name])]
            arrays = [some(parameter.grad) for parameter in self.parameters]
            arrays += [some(each) for each in arrived(ends)]
            buffers = [each for each in after.values() if each.is_floating_point() or each.is_complex()]
            return Gradient(arrays if by == 1.0 else [each / by for each in arrays], buffers, left)

    def _accumulate(self, samples: Batch, sizes: Sequence[int], by: float, ends: list[Upstream]) -> None:
        loss_fn, pairs, size = same_random(self.loss_fn), list[Pair](), 0.0
        leaves = [*self._rollback.leaves]
        sums = Accumulation(sum(sizes), self.reduction, leaves)
        for number in sizes:
            self._random.begins(sums.done, number)
            part = samples.take(sums.done, sums.done + number)
            if has_upstream(samples.arrays):
                if samples.gives_ranges_only:
                    raise _FROM_BEFORE  # each part would go through it
                ends.append(Upstream())
                part = ends[-1].end_at(part)
                leaves += ends[-1].leaves
            made = loss_of(loss_fn, part)
            if isinstance(made, tuple) and len(made) == 2 and all(map(_is_number, made)):
                pairs.append((_read(made[0]), _read(made[1])))
            share = sums.add(made if by == 1.0 else _stretched(made, by), number)
            size += abs(float(share.detach()))
            if self._live is None:
                self._live = self._watch.live
            self._rollback.forward_done(share)
            try:
                share.backward()
            except RuntimeError as error:
                if "backward through the graph a second time" in str(error):
                    raise _FROM_BEFORE from None
                raise
            del made, share
            self._rollback.backward_done()
        if by == 1.0:
            self.pairs[len(sizes) > 1] = (pairs, sizes)
            self.losses[len(sizes) > 1] = (float(sums.loss()), size)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """At the first computation: what it takes, and which modules it calls."""
        tracked = {id(part) for module in self.modules for part in module.modules()}

        def look(module: torch.nn.Module, _: Any) -> None:
            if id(module) not in tracked:
                tracked.add(id(module))
                for own in (compat.buffers_of(module), compat.parameters_of(module)):
                    for name, value in own.items():
                        if value is not None:
                            version = compat.version_of(value)
                            self._strangers.append((type(module).__name__, own, name, value, version))

        hook = register_module_forward_pre_hook(look)
        try:
            with self._watch, warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*global hooks on modules.*")  # of a compiled model
                yield
        finally:
            hook.remove()

    def changed_stranger(self) -> str | None:
        """What was called, changed, and is not tracked: it can neither be restored nor be the same in parts."""
        for kind, own, name, value, version in self._strangers:
            if own.get(name) is not value or compat.version_of(value) != version:
                return f"{kind}.{name}"
        return None

    def check_pair(self) -> None:
        """Raise where what the loss function gives as (sum, weight) is none."""
        (whole, _), (parts, sizes) = self.pairs[False], self.pairs[True]
        check_pair(whole, parts, sizes, self.tolerance)

    def bytes_per_sample(self, samples: int) -> float:
        """What a backward pass needs beside activations is mostly less than these again; checkpointing shows there."""
        weights = sum(p.numel() * p.element_size() for p in self.parameters)
        return max(1, 3 * ((self._live or 0) - weights), 2 * (self._watch.peak - 2 * weights)) / samples

    @property
    def moves_on(self) -> bool:
        """Whether parts left other weights behind than the whole."""
        return not are_equal(self, self._left.get(False, []), self._left.get(True, []))

    def moved_weights(self) -> tuple[torch.Tensor, ...]:
        """The tensors of these."""
        homes = places(self.modules, compat.parameters_of)
        found = (compat.parameters_of(part)[name] for part, name in (homes[label] for label in self.moved))
        return tuple(weight for weight in found if weight is not None)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The models' buffers, subsampled; but for BatchNorm's, which has a reason of its own."""
        return {
            label: some(buffer)
            for label, (part, name) in places(self.modules, compat.buffers_of).items()
            if not isinstance(part, compat.BatchNorm)
            and (buffer := compat.buffers_of(part)[name]) is not None
        }


class Probe:
    """The ladder for one model, asked again now and then, since a later batch may show what the first did not."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        parameters: list[torch.Tensor],
        inexact: tuple[str, ...],
        rollback: Rollback,
    ) -> None:
        self._modules, self._parameters, self._rollback = modules, parameters, rollback
        self._allows_batchnorm = "batchnorm" in inexact
        self.no_room: BaseException | None = None
        """Why the last answer is none, when not even two samples fit."""
        self.failed: BaseException | None = None
        """What a few samples together raised, when that is why the last answer is none."""

    def ask(self, step: Step, at_once: int) -> Finding | None:
        """None when nothing can be said. `at_once`: samples of a micro-batch that is to be computed."""
        whole = step.batch
        self.no_room = self.failed = None
        if whole.samples < 2 or whole.reason is not None:
            return None
        for most in (SAMPLES, FEWEST):
            backend = self._backend(step.loss_fn, step.reduction)
            try:
                found = self._judged(backend, whole, most, at_once)
                found.moved = backend.moved_weights()
                return found
            except Refused as refused:
                is_once = isinstance(refused, SteppedInside) or refused is _FROM_BEFORE
                repeats = False if is_once else None
                return Finding(
                    refused.reason,
                    refused.hint,
                    exchanges=isinstance(refused, ExchangedInside),
                    repeats=repeats,
                )
            except NoPair:
                raise
            except Exception as caught:  # noqa: BLE001 - the step itself will meet it again, where it can be said
                if not is_oom(caught):
                    self.failed = _of_few(caught)  # a few samples may not do for this loss
                    return None
                error = caught
            release(error)
            error.__traceback__ = None  # a frame that is cleared still has its function, and that the samples
        names = _names_of(self._modules, self._batchnorms())
        if names and not self._allows_batchnorm:
            return Finding(*_of_batchnorm(names))  # needs no comparison
        self.no_room = error
        return None

    def same_twice(self, step: Step) -> bool:
        """Whether the whole batch has the same loss twice: asked where nothing else can be compared."""
        found = []
        for _ in range(2):
            with self._rollback:
                whole = step.batch
                sums = Accumulation(whole.samples, step.reduction, [])
                share = sums.add(loss_of(step.loss_fn, whole.take(0, whole.samples)), whole.samples)
                found.append(float(share.detach()))
                del share
        is_host = all(parameter.is_cpu for parameter in self._parameters)
        return math.isclose(*found, rel_tol=0.0 if is_host else 1e-4)

    def _backend(self, loss_fn: LossFunction, reduction: str) -> FewSamples:
        return FewSamples(self._modules, self._parameters, loss_fn, reduction, self._rollback)

    def _batchnorms(self) -> list[torch.nn.Module]:
        """Those that compute over the samples of a batch now."""
        parts = (part for module in self._modules for part in module.modules())
        return [part for part in parts if isinstance(part, compat.BatchNorm) and part.training]

    def _judged(self, backend: FewSamples, whole: Batch, most: int, at_once: int) -> Finding:
        norms, trials = self._batchnorms(), trials_of(whole, most)
        names, few = _names_of(self._modules, norms), trials[0]
        if names and not self._allows_batchnorm:
            found = Finding(*_of_batchnorm(names), repeats=_repeats(backend, few))
            if backend.pairs[False][0]:
                with _resting(norms):
                    compare(backend, Trial(few, parts_of(few.samples)))
                backend.check_pair()
            return self._named(backend, few, found)
        if has_peers() and any(isinstance(module, SyncBatchNorm) for module in norms):
            raise ExchangedInside  # the comparison leaves its exchange out, parts would not
        with _resting(norms):
            try:
                answer = judge(backend, _trials(trials, backend.reduction))
                if answer is Answer.SAME:
                    answer = self._at_once(backend, whole, at_once)
                return self._named(backend, few, self._found(answer, backend, few))
            except PartError as fails:
                hint = getattr(fails.error, "hint", None) if isinstance(fails.error, StepError) else None
                hint = hint or "a smaller batch, or `split=` if the samples are not along the first dimension"
                found = Finding(fails.words, hint, fails=not isinstance(fails.error, StepError))
                if not _repeats(backend, few):
                    found = Finding(STATE, STATE_HINT, repeats=False, leaves_state=True)
                return self._named(backend, few, found)

    def _at_once(self, backend: FewSamples, whole: Batch, at_once: int) -> Answer:
        """As many samples as are computed at once, in two halves: the hardest eight of a batch do not show in six."""
        most = min(whole.samples * 3 // 4, MANY)
        for number in (min(most, max(at_once, 2 * SAMPLES)), min(most, at_once)):
            if number <= SAMPLES:
                break
            try:
                answer = compare(backend, Trial(spread(whole, number), even(number, -(-number // 2))))
                return Answer.SAME if answer is Answer.NOT_SHOWN else answer
            except (PartError, Refused):
                raise
            except Exception as caught:  # noqa: BLE001 - these samples may not do for this loss
                error = caught
            if not is_oom(error):
                break
            release(error)
        return Answer.SAME

    def _named(self, backend: FewSamples, few: Batch, found: Finding) -> Finding:
        """What was changed and is not tracked counts more than any answer."""
        found.bytes_per_sample = backend.bytes_per_sample(few.samples)
        stranger = backend.changed_stranger()
        if stranger is not None:
            found.reason = f"{stranger} changes with each call of the loss function, and is not tracked"
            found.hint = (
                "give its module to run.track(...) too: what is tracked is restored before a step is retried"
            )
            found.repeats, found.fails, found.leaves_state = False, False, True
        return found

    def _found(self, answer: Answer, backend: FewSamples, few: Batch) -> Finding:
        if answer is Answer.SAME:
            (whole, _), (parts, size) = backend.losses[False], backend.losses[True]
            # Losses of both signs may leave next to nothing together: rounding is as large as they are.
            near = max(_LOSS_ALIKE, backend.tolerance)
            differs = not math.isclose(whole, parts, rel_tol=near, abs_tol=near * size)
            return Finding(None, repeats=True, loss_differs=differs)
        if answer is Answer.NOT_AGAIN:
            return Finding(STATE, STATE_HINT, repeats=False, leaves_state=True)
        if answer is Answer.DIFFERENT:
            return Finding(*self._explained(backend, few), repeats=True)
        raise CannotSplit("buoy cannot verify that splitting this batch keeps its gradient",
                          received="a gradient of a few samples that is zero, not finite or mostly rounding",
                          expected="one that can be compared between the whole batch and its micro-batches",
                          hint="a smaller batch; a mean over tokens or boxes: return (sum of the losses, how "
                               "many)")  # fmt: skip

    def _explained(self, backend: FewSamples, few: Batch) -> tuple[str, str]:
        """Why whole and parts differ, as far as that can be shown."""
        if backend.moves_on:
            name, inside = next(iter(backend.moved.items()))
            if inside:
                return (
                    f"{name} is changed inside the backward pass (in a gradient hook): each micro-batch "
                    "would change it",
                    "change weights after run.backward(...): what a hook does there cannot be split or rolled back",
                )
            return (
                f"the loss function changes the weight {name}: each micro-batch would change it again",
                "update the teacher model after `optimizer.step()`, outside the loss function",
            )
        backend.check_pair()
        right = "sum" if backend.reduction == "mean" else "mean"
        if self._is_same(self._backend(backend.loss_fn, right), few):
            return f"the loss is a {right} over samples, not a {backend.reduction}", f'reduction="{right}"'
        if backend.written:
            name = backend.written[0]
            return (
                f"{name} changes with each forward pass: micro-batches would see and leave a different "
                "one than the whole batch",
                "track_running_stats=False, whose gradient is the same; or a smaller batch"
                if name.endswith(("running_mean", "running_var"))
                else "a smaller batch; or do not change it while training",
            )
        with compat.without_gradient_hooks(self._parameters) as had_any:
            if had_any and self._is_same(self._backend(backend.loss_fn, backend.reduction), few):
                return (
                    "gradient hooks of parameters see the gradient of each micro-batch, not that of the batch",
                    "clamp or clip once the gradient of the batch is there, before `optimizer.step()`",
                )
        return DEPENDS, _DEPENDS_HINT

    def _is_same(self, backend: FewSamples, few: Batch) -> bool:
        with suppress(PartError):
            return judge(backend, _trials([few], backend.reduction)) is Answer.SAME
        return False


def _repeats(backend: FewSamples, few: Batch) -> bool:
    """Whether the same samples give the same gradient again."""
    try:
        return compare(backend, Trial(few, [few.samples])) in (Answer.SAME, Answer.NOT_SHOWN)
    except PartError:
        return False


def _trials(chosen: list[Batch], reduction: str) -> Iterator[Trial]:
    """A sum must hold for samples that come twice, too: what is divided by a count of some of them is none."""
    for few in chosen:
        yield Trial(few, parts_of(few.samples))
        if reduction == "sum" and not few.gives_ranges_only:
            both = twice(few)
            yield Trial(both, parts_of(both.samples))


@contextmanager
def _resting(norms: list[torch.nn.Module]) -> Iterator[None]:
    """BatchNorm that may be inexact computes with its running statistics, so that the rest can be compared."""
    try:
        for module in norms:
            module.training = False
        yield
    finally:
        for module in norms:
            module.training = True


def _of_few(error: Exception) -> Exception:
    """Where a loss is not a number, this need not be so for the whole batch."""
    if isinstance(error, BadLoss) and "NaN" in error.message:
        error.received = (
            f"{error.received} for a few samples of the batch, computed to see whether it can be split"
        )
        error.hint = (
            "if all of a few samples are ignored, their mean is 0 / 0: return (sum of the losses, how many); "
            f"otherwise: {error.hint}"
        )
    return error


def _names_of(modules: list[torch.nn.Module], wanted: list[Any]) -> list[str]:
    """The wanted ones' names in their models."""
    ids = {id(module) for module in wanted}
    return [
        name or type(part).__name__ for m in modules for name, part in m.named_modules() if id(part) in ids
    ]


def _of_batchnorm(names: list[str]) -> tuple[str, str]:
    return (
        f"{names[0]} is BatchNorm, which computes over all samples at once",
        'GroupNorm or LayerNorm in place of BatchNorm, a smaller batch; or inexact=("batchnorm",) to compute '
        "statistics over each micro-batch",
    )


def _real(values: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(values) if values.is_complex() else values


def _stretched(made: Any, by: float) -> Any:
    if isinstance(made, tuple) and len(made) == 2:
        return made[0] * by, made[1]
    return made * by if isinstance(made, torch.Tensor) else made


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "numel", lambda: 0)() == 1


def _read(value: Any) -> float:
    return float(value if isinstance(value, (int, float)) else value.detach())
