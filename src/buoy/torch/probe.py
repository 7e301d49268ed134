"""Does cutting the batch change the gradient of this model and loss? Asked with a few samples; leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from buoy.microbatch.errors import BadLoss, CannotSplit
from buoy.microbatch.oom import is_oom
from buoy.microbatch.rounding import EXAMPLES, LARGE
from buoy.microbatch.split import Batch
from buoy.torch.allocations import AllocationWatch
from buoy.torch.backward import LossFunction, Progress, accumulate
from buoy.torch.few import FEWEST, SAMPLES, few_of
from buoy.torch.quiet import Still, eager, same_random
from buoy.torch.release import release
from buoy.torch.rounding import Nudged, alike, disturbed

_KEPT = 1 << 14  # elements compared per parameter


@dataclass
class Finding:
    """What the probe found."""

    reason: str | None
    """Why the batch must not be cut; None when it may be."""
    hint: str | None = None
    bytes_per_sample: float | None = None
    """An upper bound, from a few samples."""


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

    def ask(
        self,
        whole: Batch,
        loss_fn: LossFunction,
        reduction: str,
        attempt: Callable[[Callable[[], Any]], Any],
    ) -> Finding | None:
        """None when nothing can be told. `attempt` runs a function and puts everything back after it."""
        self.no_room, self.failed, self._repeats = None, None, True
        if whole.samples < 2 or whole.reason is not None:
            return None
        for most in (SAMPLES, FEWEST):
            try:
                return self._ask(few_of(whole, most), loss_fn, reduction, attempt)
            except Exception as caught:  # noqa: BLE001 - the step itself will meet it again, where it can be told
                if not is_oom(caught):
                    self.failed = caught  # a few samples may not do for this loss
                    return None
                error = caught
            release(error)
        self.no_room = error
        return None

    def _ask(self, few: Batch, loss_fn: LossFunction, reduction: str, attempt: Any) -> Finding:
        watch, still = AllocationWatch(), Still()
        forward = _LiveAfterForward(watch)

        def gradient(
            parts: list[int], source: Batch = few, counted: bool = False, nudged: int = 0
        ) -> list[torch.Tensor]:
            left = list(parts)

            def work() -> list[torch.Tensor]:
                before = self._buffers()
                with ExitStack() as stack:
                    if counted:
                        stack.enter_context(watch)
                    if nudged:
                        stack.enter_context(Nudged(self._parameters, nudged))
                    stack.enter_context(still)
                    stack.enter_context(eager())
                    accumulate(
                        sum(parts), lambda _: left.pop(0), source.take, same_random(loss_fn),
                        reduction=reduction, scaler=None, parameters=self._parameters,
                        progress=forward if counted else Progress(),
                    )  # fmt: skip
                after = self._buffers()
                self._written = [name for name in after if not after[name].equal(before[name])]
                gradients = [_some(parameter.grad) for parameter in self._parameters]
                return [*gradients, *(after[name] for name in after if after[name].is_floating_point())]

            return attempt(work)  # type: ignore[no-any-return]

        training = [
            m
            for module in self._modules
            for m in module.modules()
            if isinstance(m, _BatchNorm) and m.training
        ]
        names = _names(self._modules, training)
        allowed = "batchnorm" in self._inexact
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
            except _PartError as fails:
                return Finding(
                    _batchnorm(names) or f"a part of the batch fails: {fails.error}", _hint(names), size
                )
            if same is None:
                raise CannotSplit("nothing shows that this batch can be cut with the same gradient",
                                  received="a gradient of a few samples that is mostly rounding",
                                  expected="one that can be compared, of whole and parts",
                                  hint="a smaller batch")  # fmt: skip
            if same:
                return Finding(None, None, size)
            if names and not allowed:
                return Finding(_batchnorm(names), _hint(names), size)
            return Finding(*self._explain(few, gradient, reduction, still.tolerance), size)
        finally:
            for module in training:
                module.training = True

    def _compared(self, together: list[torch.Tensor], gradient: Any, few: Batch, still: Still) -> bool | None:
        """Whether parts have the gradient of the whole; None where rounding is too large to tell."""
        n = few.samples
        half = (n + 1) // 2
        parts = [half, *[1] * (n - half)]  # unequal, and most pairs of samples in two of them
        try:
            apart = gradient(parts, few)
        except Exception as error:  # the whole did not raise it
            if is_oom(error):
                raise
            raise _PartError(error) from None
        if alike(together, apart, [], still.tolerance):
            return True
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
        n = few.samples
        together = gradient([n])
        most, last = gradient([n - 1], few.part(0, n - 1)), gradient([1], few.part(n - 1, n))
        share = 1.0 if reduction == "mean" else 1 / n
        other = [
            a * (share if share == 1.0 else 1 - share) + b * share if a.shape == b.shape else a
            for a, b in zip(most, last, strict=True)
        ]
        if alike(together, other, [], tolerance):
            right = "sum" if reduction == "mean" else "mean"
            return f"the loss is a {right} over samples, not a {reduction}", f'reduction="{right}"'
        if not self._repeats:
            return (
                "the same samples give another gradient each time: something beside batch and weights is at work",
                "a counter in the model, a list that grows, a file that is read on: keep it out of the loss function",
            )
        if self._written:
            return (
                f"{self._written[0]} changes with each forward pass: parts see and leave another than the whole",
                "a smaller batch; or do not change it while training",
            )
        return (
            "the gradient of the batch is not that of its parts together: samples depend on each other",
            "a mean over tokens, or over what is not ignored: return (sum of the losses, how many); where the first "
            "dimension is not the samples (time first): `split=`; a loss that compares the samples of a batch "
            "(contrastive) cannot be cut: use a smaller batch",
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The models' buffers, thinned out; but for BatchNorm's, of which other words are said."""
        return {
            f"{path}.{name}".lstrip("."): _some(buffer)
            for model in self._modules
            for path, part in model.named_modules()
            if not isinstance(part, _BatchNorm)
            for name, buffer in part.named_buffers(recurse=False)
        }


class _PartError(Exception):
    """What a part of the samples raised, and all of them together did not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _LiveAfterForward(Progress):
    """Bytes of parameters and activations before the backward pass."""

    def __init__(self, watch: AllocationWatch) -> None:
        self._watch = watch
        self.live = 0

    def forward_done(self) -> None:
        self.live = self._watch.live


def _some(values: torch.Tensor | None) -> torch.Tensor:
    """A copy of a gradient or buffer, thinned out where it is large; empty without one."""
    if values is None:
        return torch.empty(0)
    values = values.detach()
    flat = (values.to_dense() if values.layout != torch.strided else values).reshape(-1)
    stride = max(1, flat.numel() // _KEPT)
    return flat[::stride].clone()


def _names(modules: list[torch.nn.Module], wanted: list[Any]) -> list[str]:
    ids = {id(module) for module in wanted}
    return [
        name or type(part).__name__ for m in modules for name, part in m.named_modules() if id(part) in ids
    ]


def _batchnorm(names: list[str]) -> str | None:
    return f"{names[0]} is BatchNorm, which computes over all samples at once" if names else None


def _hint(names: list[str]) -> str:
    if names:
        return 'GroupNorm or LayerNorm in place of BatchNorm, a smaller batch; or inexact=("batchnorm",) to compute ' \
               "statistics over each micro-batch"  # fmt: skip
    return "a smaller batch, or `split=` if the samples are not along the first dimension"
