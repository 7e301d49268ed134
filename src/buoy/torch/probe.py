"""Does cutting the batch change the gradient of this model and loss? Asked with a few samples; leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from buoy.microbatch.errors import BadLoss, CannotSplit, StepError
from buoy.microbatch.oom import is_oom
from buoy.microbatch.rounding import EXAMPLES, LARGE
from buoy.microbatch.split import Batch
from buoy.torch.backward import LossFunction
from buoy.torch.beside import GradientBeside
from buoy.torch.constant import SHARES
from buoy.torch.few import FEWEST, SAMPLES, trials_of, twice
from buoy.torch.few_gradient import FewGradient, Made, shows
from buoy.torch.pairs import check
from buoy.torch.probe_words import PartError, batchnorm, hint_for, names_of, of_few
from buoy.torch.quiet import ExchangedInside, has_peers
from buoy.torch.release import release
from buoy.torch.rounding import alike, disturbed
from buoy.torch.unmoved import NotHere, SteppedInside
from buoy.torch.upstream import (
    FedFromBefore,
    has_upstream,
)

NOT_AGAIN = "the same samples give another gradient each time: something beside batch and weights is at work"
_LOSS_ALIKE = 1e-3  # far beyond rounding: what differs is told, not refused
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
    loss_differs: bool = False
    """The gradients of parts add up, their losses do not: the square of a mean has such."""


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
        self._repeats = True
        """Whether the same samples gave the same gradient again."""
        self._moves_on = False
        """Whether parts leave other weights behind than the whole."""
        self._is_shown = False
        """Whether something that was compared was not zero."""
        self._alone = False
        """Whether each sample is a part."""
        self._loss_differs = False
        """Whether parts with the gradient of the whole had another loss."""

    def ask(
        self,
        whole: Batch,
        loss_fn: LossFunction,
        reduction: str,
        attempt: Callable[[Callable[[], Any]], Any],
        samples: int = SAMPLES,
        rows: list[int] | None = None,
        alone: bool = False,
        guarded: list[torch.Tensor] | None = None,
    ) -> Finding | None:
        """None when nothing can be told. `attempt` runs a function and puts everything back after it.

        With `rows` these samples are compared, with `alone` one by one, otherwise so many that differ most. A gradient
        of something that is not `guarded`, where that is given, is raised as `GradientBeside`.
        """
        self.no_room, self.failed, self._repeats = None, None, True
        self._moves_on, self._is_shown, self._alone, self._loss_differs = False, False, alone, False
        if whole.samples < 2 or whole.reason is not None:
            return None
        for most in (samples, FEWEST):
            try:
                gradient = FewGradient(self._modules, self._parameters, loss_fn, reduction, attempt, guarded)
                found = self._ask(  # no name holds the trials: what fails for memory would count them as another's
                    trials_of(whole, most) if rows is None else [whole.picked(rows)], gradient, reduction
                )
                found.moved = tuple(gradient.moved)
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
            except GradientBeside:
                raise
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
            error.__traceback__ = None  # a frame that is cleared still has its function, and that the samples
        names = names_of(self._modules, self._batchnorms())
        if names and "batchnorm" not in self._inexact:
            return Finding(batchnorm(names), hint_for(names))  # needs no comparison
        self.no_room = error
        return None

    def _batchnorms(self) -> list[torch.nn.Module]:
        """Those that compute over the samples of a batch now."""
        parts = (part for module in self._modules for part in module.modules())
        return [part for part in parts if isinstance(part, _BatchNorm) and part.training]

    def _ask(self, trials: list[Batch], gradient: FewGradient, reduction: str) -> Finding:
        few = trials[0]
        if few.gives_ranges_only and has_upstream(few.arrays):
            raise FedFromBefore  # each part would go through it
        training = self._batchnorms()
        names = names_of(self._modules, training)
        allowed = "batchnorm" in self._inexact
        if allowed and has_peers() and any(isinstance(module, SyncBatchNorm) for module in training):
            raise ExchangedInside  # the comparison leaves its exchange out, parts would not
        try:
            for module in training if allowed else []:
                module.training = False
            n = few.samples
            together = gradient([n], few, counted=True)
            if not all(bool(part.isfinite().all()) for part in together):
                raise BadLoss("the gradient of a few samples is not finite", received="an infinity or NaN",
                              expected="numbers that can be compared")  # fmt: skip
            weights = sum(p.numel() * p.element_size() for p in self._parameters)
            # What a backward pass needs beside activations is mostly less than these again; checkpointing shows there.
            size = max(1, 3 * (gradient.live - weights), 2 * (gradient.watch.peak - 2 * weights)) / n
            try:
                same = self._compared(together, gradient, few)
                # Near its goal a gradient is mostly rounding: ask about numbers that were not learned. A person's own
                # cut knows its samples only as they are.
                if same is None and not few.gives_ranges_only:
                    other = disturbed(few)
                    same = self._compared(gradient([n], other), gradient, other)
                if same and not self._is_shown and not few.gives_ranges_only:
                    same = self._also(gradient, disturbed(few))
                if same and reduction == "sum" and not few.gives_ranges_only:
                    same = self._also(gradient, twice(few))
                for other in trials[1:] if same else []:
                    same = self._also(gradient, other)
                    if same and reduction == "sum" and not other.gives_ranges_only:
                        same = self._also(gradient, twice(other))
                    if not same:
                        few = other
                        break
                if same and (gradient.still.drew or gradient.generators.drew):
                    same = self._other_side(gradient, few)
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
                return Finding(None, None, size, is_shown=self._is_shown, loss_differs=self._loss_differs)
            if names and not allowed:
                for module in training:
                    module.training = False
                if self._passes(gradient, few):  # nothing else is in the way
                    return Finding(batchnorm(names), hint_for(names), size)
            return Finding(*self._explain(few, gradient, reduction), size)
        finally:
            for module in training:
                module.training = True

    def _also(self, gradient: FewGradient, few: Batch) -> bool:
        """Whether it holds here too; where nothing can be told, what was found before stands."""
        try:
            together = gradient([few.samples], few)
        except Exception as error:  # not what the person computes
            if is_oom(error) or isinstance(error, NotHere):
                raise
            return True
        if not all(bool(part.isfinite().all()) for part in together):
            return True
        return self._compared(together, gradient, few) is not False

    def _passes(self, gradient: FewGradient, few: Batch) -> bool:
        """Whether it would hold as things are now."""
        try:
            return self._also(gradient, few)
        except PartError:
            return True

    def _other_side(self, gradient: FewGradient, few: Batch) -> bool:
        """Whether it holds where random draws fall otherwise."""
        generators, gradient.still.other_side = gradient.generators, True
        for share in SHARES[1:]:
            generators.share, generators.ran_out = share, False
            same = self._also(gradient, few)
            if same or not generators.ran_out:
                return same
        return True

    def _compared(self, together: Made, gradient: FewGradient, few: Batch) -> bool | None:
        """Whether parts have the gradient of the whole; None where rounding is too large to tell."""
        n = few.samples
        half = (n + 1) // 2
        parts = (
            [1] * n if self._alone else [half, *[1] * (n - half)]
        )  # unequal, and most pairs of samples in two of them
        try:
            apart = gradient(parts, few)
        except Exception as error:  # the whole did not raise it
            if is_oom(error) or isinstance(error, NotHere):
                raise
            raise PartError(error) from None
        if not together.leaves_as(apart):
            self._moves_on = True
            return False
        # Losses of both signs may leave next to nothing together: rounding is as large as they are.
        rounding = max(_LOSS_ALIKE, gradient.still.tolerance)
        if not math.isclose(together.loss, apart.loss, rel_tol=rounding, abs_tol=rounding * apart.size):
            self._loss_differs = True
        if alike(together, apart, [], gradient.still.tolerance):
            self._is_shown = self._is_shown or together.shows
            return True
        check(together.pairs, apart.pairs, parts, gradient.still.tolerance)
        # An accelerator adds in any order, which alone is a difference near the goal of a training.
        is_host = all(part.device.type == "cpu" for part in together)
        if is_host and not alike(together, gradient([n], few), [], gradient.still.tolerance):
            self._repeats = False
            return False
        # Another order of the samples shows rounding too, but not only that: a model that depends on the order, such as
        # a recurrent one that takes time first, must not pass.
        rounded = [gradient([n], few, nudged=number) for number in range(1, EXAMPLES + 1)]
        if not alike(together, apart, rounded, gradient.still.tolerance):
            return False
        return True if all(alike(together, each, [], LARGE) for each in rounded) else None

    def _explain(self, few: Batch, gradient: FewGradient, reduction: str) -> tuple[str, str]:
        """Where the other reduction fits, say so; otherwise samples depend on each other."""
        if self._moves_on:
            name, inside = next(iter(gradient.moved.items()))
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
            shows(last)
            and alike(together, other, [], gradient.still.tolerance)
            and (reduction == "sum" or _adds_up(gradient, few))
        ):
            right = "sum" if reduction == "mean" else "mean"
            return f"the loss is a {right} over samples, not a {reduction}", f'reduction="{right}"'
        if not self._repeats:
            return (
                NOT_AGAIN,
                "a counter in the model, a list that grows, a file that is read on: keep it out of the loss function",
            )
        if gradient.written:
            return (
                f"{gradient.written[0]} changes with each forward pass: parts see and leave another than the whole",
                "track_running_stats=False, whose gradient is the same; or a smaller batch"
                if gradient.written[0].endswith(("running_mean", "running_var"))
                else "a smaller batch; or do not change it while training",
            )
        return (
            DEPENDS,
            "a mean over tokens, boxes, positives or what is not ignored: return (sum of the losses, how many); "
            "where the first dimension is not the samples (time first): `split=`; a loss that compares samples of a "
            "batch (contrastive) cannot be cut: use a smaller batch",
        )


def _adds_up(gradient: FewGradient, few: Batch) -> bool:
    """Whether two times the same samples have twice the gradient: of a sum divided by positives they have not."""
    if few.gives_ranges_only:
        return True
    both = twice(few)
    once = gradient([both.samples // 2], both.part(0, both.samples // 2))
    if not shows(once):
        return False
    return alike(gradient([both.samples], both), [2 * each for each in once], [], gradient.still.tolerance)
