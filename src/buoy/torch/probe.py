"""Does cutting the batch change the gradient of this model and loss? Asked with a few samples; leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from buoy.microbatch.errors import BadLoss, CannotSplit, StepError
from buoy.microbatch.oom import is_oom
from buoy.microbatch.rounding import EXAMPLES, LARGE, STRETCHES
from buoy.microbatch.split import Batch
from buoy.torch.allocations import AllocationWatch
from buoy.torch.backward import LossFunction, Progress, accumulate
from buoy.torch.constant import SHARES, Generators
from buoy.torch.digest import some
from buoy.torch.few import FEWEST, SAMPLES, trials_of, twice
from buoy.torch.pairs import Pair, check, noting
from buoy.torch.probe_words import PartError, batchnorm, hint_for, names_of, of_few
from buoy.torch.quiet import ExchangedInside, Still, eager, has_peers, same_random
from buoy.torch.release import release
from buoy.torch.rounding import Nudged, alike, disturbed
from buoy.torch.unmoved import NotHere, SteppedInside, Unmoved, places
from buoy.torch.upstream import (
    FedFromBefore,
    Upstream,
    arrived,
    as_it_came,
    has_upstream,
    is_fed_from_before,
    known_from_before,
)

NOT_AGAIN = "the same samples give another gradient each time: something beside batch and weights is at work"
DEPENDS = "the gradient of the batch is not that of its parts together: samples depend on each other"


@dataclass
class Finding:
    """What the probe found."""

    reason: str | None
    """Why the batch must not be cut; None when it may be."""
    hint: str | None = None
    bytes_per_sample: float | None = None
    """An upper bound, from a few samples."""
    moved: tuple[str, ...] = ()
    """Weights that computing a loss changes; the comparison has put them back."""
    steps_inside: bool = False
    """An optimizer steps while gradients are computed."""
    exchanges: bool = False
    """Its loss function exchanges something with other processes."""
    once: bool = False
    """Its backward pass can be done only once."""
    fails: bool = False
    """A part raised something, which is all that is known."""
    is_shown: bool = True
    """Whether there was a gradient to compare: a hinge that every sample fulfils has none."""


class Probe:
    """The probe for one model; asked again now and then, since a later batch may show what the first did not."""

    def __init__(
        self, modules: list[torch.nn.Module], parameters: list[torch.Tensor], inexact: tuple[str, ...]
    ) -> None:
        self._modules = modules
        self._parameters = parameters
        self._inexact = inexact
        self.no_room: BaseException | None = None
        """Why the last answer is none, when not even two samples fit."""
        self.failed: BaseException | None = None
        """What a few samples together raised, when that is why the last answer is none."""
        self._written: list[str] = []
        """Buffers that the last computation changed."""
        self._repeats = True
        """Whether the same samples gave the same gradient again."""
        self._moved: dict[str, bool] = {}
        """Weights that a computation changed, and whether in its backward pass."""
        self._moves_on = False
        """Whether parts leave other weights behind than the whole."""
        self._is_shown = False
        """Whether something that was compared was not zero."""

    def ask(
        self,
        whole: Batch,
        loss_fn: LossFunction,
        reduction: str,
        attempt: Callable[[Callable[[], Any]], Any],
        rows: list[int] | None = None,
    ) -> Finding | None:
        """None when nothing can be told. `attempt` runs a function and puts everything back after it.

        With `rows` these samples are compared, otherwise those that differ most.
        """
        self.no_room, self.failed, self._repeats = None, None, True
        self._moved, self._moves_on, self._is_shown = {}, False, False
        if whole.samples < 2 or whole.reason is not None:
            return None
        for most in (SAMPLES, FEWEST):
            try:
                found = self._ask(  # no name holds the trials: what fails for memory would count them as another's
                    trials_of(whole, most) if rows is None else [whole.picked(rows)],
                    loss_fn,
                    reduction,
                    attempt,
                )
                found.moved = tuple(self._moved)
                return found
            except SteppedInside as stepped:
                where = (
                    "inside the backward pass (in a gradient hook)"
                    if stepped.in_backward
                    else "in the loss function"
                )
                return Finding(
                    f"an optimizer steps {where}: each part would be a step",
                    "one `optimizer.step()` after run.backward(...); such a step can neither be cut nor undone",
                    steps_inside=True,
                )
            except ExchangedInside:
                return Finding(
                    "the loss function exchanges numbers with other processes: each part would be one more exchange",
                    "gather and log after run.backward(...); a loss over the samples of all processes cannot be cut: "
                    "use a smaller batch",
                    exchanges=True,
                )
            except FedFromBefore:
                return Finding(
                    "the loss function reads what was computed with gradients before it",
                    "compute it in the loss function, or pass it as the batch",
                    once=True,
                )
            except Exception as caught:  # noqa: BLE001 - the step itself will meet it again, where it can be told
                if not is_oom(caught):
                    self.failed = of_few(caught)  # a few samples may not do for this loss
                    return None
                error = caught
            release(error)
        names = names_of(self._modules, self._batchnorms())
        if names and "batchnorm" not in self._inexact:
            return Finding(batchnorm(names), hint_for(names))  # needs no comparison
        self.no_room = error
        return None

    def _batchnorms(self) -> list[torch.nn.Module]:
        """Those that compute over the samples of a batch now."""
        parts = (part for module in self._modules for part in module.modules())
        return [part for part in parts if isinstance(part, _BatchNorm) and part.training]

    def _ask(self, trials: list[Batch], loss_fn: LossFunction, reduction: str, attempt: Any) -> Finding:
        few = trials[0]
        watch, still, generators = AllocationWatch(), Still(), Generators()
        if few.gives_ranges_only and has_upstream(few.arrays):
            raise FedFromBefore  # each part would go through it
        forward = _LiveAfterForward(watch, known_from_before(loss_fn))

        def gradient(parts: list[int], source: Batch = few, counted: bool = False, nudged: int = 0) -> _Made:
            left = list(parts)
            ends: list[Upstream] = []
            pairs: list[Pair] = []
            parameters = list(self._parameters)
            # What a hook does to a gradient, it does not do to one that is stretched.
            by = STRETCHES[nudged - 1] if nudged and not _are_hooked(self._parameters) else 1.0

            def take(start: int, stop: int) -> object:
                still.begins(start, stop - start)
                part = source.take(start, stop)
                if has_upstream(source.arrays):
                    ends.append(Upstream())
                    part = ends[-1].end_at(part)
                    parameters.extend(ends[-1].leaves)
                return part

            def work() -> _Made:
                before = self._buffers()
                unmoved = Unmoved(self._modules)
                still.ahead = unmoved.see
                try:
                    with ExitStack() as stack:
                        if counted:
                            stack.enter_context(watch)
                        if nudged:
                            stack.enter_context(Nudged(self._parameters, nudged))
                        stack.enter_context(still)
                        stack.enter_context(unmoved)
                        stack.enter_context(as_it_came(source.arrays))
                        stack.enter_context(eager())
                        accumulate(
                            sum(parts), lambda _: left.pop(0), take,
                            _stretched(noting(same_random(loss_fn, generators), pairs), by),
                            reduction=reduction, scaler=None, parameters=parameters,
                            progress=forward if counted else Progress(),
                        )  # fmt: skip
                    weights = {name: some(value) for name, value in unmoved.written().items()}
                    self._moved |= unmoved.moved
                finally:
                    unmoved.put_back()
                after = self._buffers()
                self._written = [name for name in after if not after[name].equal(before[name])]
                gradients = [some(parameter.grad) for parameter in self._parameters]
                gradients += [some(each) for each in arrived(ends)]
                gradients = gradients if by == 1.0 else [each / by for each in gradients]
                buffers = [after[name] for name in after if _is_inexact(after[name])]
                return _Made([*gradients, *buffers], weights, len(gradients), pairs)

            return attempt(work)  # type: ignore[no-any-return]

        training = self._batchnorms()
        names = names_of(self._modules, training)
        allowed = "batchnorm" in self._inexact
        if allowed and has_peers() and any(isinstance(module, SyncBatchNorm) for module in training):
            raise ExchangedInside  # the comparison leaves its exchange out, parts would not
        try:
            for module in training if allowed else []:
                module.training = False
            n = few.samples
            together = gradient([n], counted=True)
            if not all(bool(part.isfinite().all()) for part in together):
                raise BadLoss("the gradient of a few samples is not finite", received="an infinity or NaN",
                              expected="numbers that can be compared")  # fmt: skip
            weights = sum(p.numel() * p.element_size() for p in self._parameters)
            # What a backward pass needs beside activations is mostly less than these again; checkpointing shows there.
            size = max(1, 3 * (forward.live - weights), 2 * (watch.peak - 2 * weights)) / n
            try:
                same = self._compared(together, gradient, few, still)
                # Near its goal a gradient is mostly rounding: ask about numbers that were not learned. A person's own
                # cut knows its samples only as they are.
                if same is None and not few.gives_ranges_only:
                    other = disturbed(few)
                    same = self._compared(gradient([n], other), gradient, other, still)
                if same and not self._is_shown and not few.gives_ranges_only:
                    same = self._also(gradient, disturbed(few), still)
                if same and reduction == "sum" and not few.gives_ranges_only:
                    same = self._also(gradient, twice(few), still)
                for other in trials[1:] if same else []:
                    same = self._also(gradient, other, still)
                    if same and reduction == "sum" and not other.gives_ranges_only:
                        same = self._also(gradient, twice(other), still)
                    if not same:
                        few = other
                        break
                if same and (still.drew or generators.drew):
                    same = self._other_side(gradient, few, still, generators)
            except PartError as fails:
                return Finding(batchnorm(names) or fails.words, hint_for(names, fails.error), size,
                               fails=not names and not isinstance(fails.error, StepError))  # fmt: skip
            if same is None:
                raise CannotSplit("nothing shows that this batch can be cut with the same gradient",
                                  received="a gradient of a few samples that is mostly rounding",
                                  expected="one that can be compared, of whole and parts",
                                  hint="a smaller batch; a mean over tokens or boxes: return (sum of the losses, how "
                                       "many)")  # fmt: skip
            if same:
                return Finding(None, None, size, is_shown=self._is_shown)
            if names and not allowed:
                for module in training:
                    module.training = False
                if self._passes(gradient, few, still):  # nothing else is in the way
                    return Finding(batchnorm(names), hint_for(names), size)
            return Finding(*self._explain(few, gradient, reduction, still.tolerance), size)
        finally:
            for module in training:
                module.training = True

    def _also(self, gradient: Any, few: Batch, still: Still) -> bool:
        """Whether it holds here too; where nothing can be told, what was found before stands."""
        try:
            together = gradient([few.samples], few)
        except Exception as error:  # not what the person computes
            if is_oom(error) or isinstance(error, NotHere):
                raise
            return True
        if not all(bool(part.isfinite().all()) for part in together):
            return True
        return self._compared(together, gradient, few, still) is not False

    def _passes(self, gradient: Any, few: Batch, still: Still) -> bool:
        """Whether it would hold as things are now."""
        try:
            return self._also(gradient, few, still)
        except PartError:
            return True

    def _other_side(self, gradient: Any, few: Batch, still: Still, generators: Generators) -> bool:
        """Whether it holds where random draws fall otherwise."""
        still.other_side = True
        for share in SHARES[1:]:
            generators.share, generators.ran_out = share, False
            same = self._also(gradient, few, still)
            if same or not generators.ran_out:
                return same
        return True

    def _compared(self, together: _Made, gradient: Any, few: Batch, still: Still) -> bool | None:
        """Whether parts have the gradient of the whole; None where rounding is too large to tell."""
        n = few.samples
        half = (n + 1) // 2
        parts = [half, *[1] * (n - half)]  # unequal, and most pairs of samples in two of them
        try:
            apart = gradient(parts, few)
        except Exception as error:  # the whole did not raise it
            if is_oom(error) or isinstance(error, NotHere):
                raise
            raise PartError(error) from None
        if not together.leaves_as(apart):
            self._moves_on = True
            return False
        if alike(together, apart, [], still.tolerance):
            self._is_shown = self._is_shown or together.shows
            return True
        check(together.pairs, apart.pairs, parts)
        # An accelerator adds in any order, which alone is a difference near the goal of a training.
        is_host = all(part.device.type == "cpu" for part in together)
        if is_host and not alike(together, gradient([n], few), [], still.tolerance):
            self._repeats = False
            return False
        # Another order of the samples shows rounding too, but not only that: a model that depends on the order, such as
        # a recurrent one that takes time first, must not pass.
        rounded = [gradient([n], few, nudged=number) for number in range(1, EXAMPLES + 1)]
        if not alike(together, apart, rounded, still.tolerance):
            return False
        return True if all(alike(together, each, [], LARGE) for each in rounded) else None

    def _explain(self, few: Batch, gradient: Any, reduction: str, tolerance: float) -> tuple[str, str]:
        """Where the other reduction fits, say so; otherwise samples depend on each other."""
        if self._moves_on:
            name, inside = next(iter(self._moved.items()))
            if inside:
                return (
                    f"{name} is changed inside the backward pass (in a gradient hook): each part would change it",
                    "change weights after run.backward(...); what a hook does there can neither be cut nor undone",
                )
            return (
                f"the loss function changes the weight {name}: each part would change it once more",
                "let a teacher follow after `optimizer.step()`, outside the loss function",
            )
        n = few.samples
        together = gradient([n], few)
        most, last = gradient([n - 1], few.part(0, n - 1)), gradient([1], few.part(n - 1, n))
        share = 1.0 if reduction == "mean" else 1 / n
        other = [
            a * (share if share == 1.0 else 1 - share) + b * share if a.shape == b.shape else a
            for a, b in zip(most, last, strict=True)
        ]
        if (
            _shows(last)
            and alike(together, other, [], tolerance)
            and (reduction == "sum" or _adds_up(gradient, few, tolerance))
        ):
            right = "sum" if reduction == "mean" else "mean"
            return f"the loss is a {right} over samples, not a {reduction}", f'reduction="{right}"'
        if not self._repeats:
            return (
                NOT_AGAIN,
                "a counter in the model, a list that grows, a file that is read on: keep it out of the loss function",
            )
        if self._written:
            return (
                f"{self._written[0]} changes with each forward pass: parts see and leave another than the whole",
                "track_running_stats=False, whose gradient is the same; or a smaller batch"
                if self._written[0].endswith(("running_mean", "running_var"))
                else "a smaller batch; or do not change it while training",
            )
        return (
            DEPENDS,
            "a mean over tokens, boxes, positives or what is not ignored: return (sum of the losses, how many); "
            "where the first dimension is not the samples (time first): `split=`; a loss that compares samples of a "
            "batch (contrastive) cannot be cut: use a smaller batch",
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The models' buffers, thinned out; but for BatchNorm's, of which other words are said."""
        return {
            label: some(buffer)
            for label, (part, name) in places(self._modules, "_buffers").items()
            if not isinstance(part, _BatchNorm) and (buffer := part._buffers[name]) is not None
        }


class _Made(list[torch.Tensor]):
    """Gradients and buffers, and the weights that were changed on the way."""

    def __init__(
        self,
        numbers: list[torch.Tensor],
        weights: dict[str, torch.Tensor],
        gradients: int,
        pairs: list[Pair],
    ) -> None:
        super().__init__(numbers)
        self._weights = weights
        self.pairs = pairs
        self.shows = _shows(numbers[:gradients])

    def leaves_as(self, other: _Made) -> bool:
        """Whether both left the same weights behind, bit for bit: then a change was one that can be repeated."""
        mine, theirs = self._weights, other._weights
        return mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


class _LiveAfterForward(Progress):
    """Bytes of parameters and activations before the backward pass."""

    def __init__(self, watch: AllocationWatch, before: set[Any]) -> None:
        self._watch, self._before = watch, before
        self.live = 0

    def forward_done(self) -> None:
        self.live = self._watch.live

    def last_backward(self, loss: torch.Tensor) -> None:
        if is_fed_from_before(loss, self._before):
            raise FedFromBefore


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


def _adds_up(gradient: Any, few: Batch, tolerance: float) -> bool:
    """Whether two times the same samples have twice the gradient: of a sum divided by positives they have not."""
    if few.gives_ranges_only:
        return True
    both = twice(few)
    once = gradient([both.samples // 2], both.part(0, both.samples // 2))
    if not _shows(once):
        return False
    return alike(gradient([both.samples], both), [2 * each for each in once], [], tolerance)


def _shows(made: list[torch.Tensor]) -> bool:
    """Zeros are any number of times themselves."""
    return any(bool(each.any()) for each in made)
