"""Randomness made the same for every sample, so that a whole batch and its parts can be compared.

Looked at on two sides: a coin that the loss function throws (mixup for every second batch) must be seen to fall both
ways. Python's and numpy's RNG cannot be held so: a loss function that draws from them is not split.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from buoy._compat import torch as compat
from buoy.microbatch.exactness import Refused
from buoy.torch.data.rng import device_generators, seed_torch
from buoy.torch.step.gradient import LossFunction
from buoy.torch.step.ranks import is_up

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_TOLERANCE |= {kind.to_complex(): _TOLERANCE[kind] for kind in (torch.float64, torch.float32, torch.float16)}
_LOW, _HIGH = 0.02, 0.98
_UNIFORM = {"rand", "rand_like", "uniform"}
_NORMAL = {"randn", "randn_like", "normal", "normal_functional"}
_INTEGERS = {"randint", "randint_like", "random"}
_MANY = 1 << 24  # of integers without a bound: exact in single precision too


class FixedRandomness(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random operations constant: masks of the whole and of the parts can never be the same otherwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ahead: Callable[[Any, Any, dict[str, Any]], None] = lambda func, args, kwargs: None
        """Shown each operation before it runs."""
        self.tolerance = min(_TOLERANCE.values())
        """Of the coarsest numbers that were computed with."""
        self.other_side = False
        """Draws are high, and those with one row per sample differ from sample to sample."""
        self.drew = False
        """Something random was computed."""
        self.restored: list[torch.Generator] = []
        """Generators of the user's own that a failed try restores."""
        self._first = self._size = self._number = 0
        self._by_sample: dict[int, bool] = {}
        """By its number in a call: whether a draw has one row per sample, in the whole and in every part."""

    def begins(self, first: int, size: int) -> None:
        """A part of so many samples is computed next; its first is this one of the whole."""
        self._first, self._size, self._number = first, size, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # entered with `eager()` only: the guard at every operation would load the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.ahead(func, args, kwargs)
        if _exchanges(func) and has_peers():
            raise ExchangedInside
        if not _draws(func):
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor):
                self.tolerance = max(self.tolerance, _TOLERANCE.get(made.dtype, 0.0))
            return made
        own = next((each for each in [*args, *kwargs.values()] if isinstance(each, torch.Generator)), None)
        known = [] if own is None else [*self.restored, *_defaults()]
        if own is not None and not any(compat.is_same_generator(own, each) for each in known):
            raise Refused(
                "the loss function draws from its own torch.Generator, which buoy cannot restore",
                "draw with torch itself, or keep the generator as an attribute of a tracked module",
            )
        name = compat.schema_of(func).name.removeprefix("aten::").rstrip("_")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        args = list(args)
        for number, argument in enumerate(compat.schema_of(func).arguments):
            if argument.name in ("dropout_p", "dropout"):
                if number < len(args):
                    args[number] = 0.0
                elif argument.name in kwargs:
                    kwargs = {**kwargs, argument.name: 0.0}
        made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and name != "randperm" and not made.is_complex():
            given = (
                dict(zip((each.name for each in compat.schema_of(func).arguments), args, strict=False))
                | kwargs
            )
            with compat.without_modes():
                self._fix(made, name, given)
        return made

    def _fix(self, made: torch.Tensor, name: str, given: dict[str, Any]) -> None:
        number, self._number = self._number, self._number + 1
        self.drew = True
        has_rows = made.dim() > 0 and made.shape[0] == self._size
        if not self.other_side:
            self._by_sample[number] = self._by_sample.get(number, True) and has_rows
        varied = self.other_side and has_rows and self._by_sample.get(number, False)
        share: Any = self._spread(made) if varied else _HIGH if self.other_side else _LOW
        if name == "multinomial":
            made.copy_(_chosen(given, made, last=self.other_side))
        elif name == "bernoulli":  # mostly a mask: all of it dropped would leave nothing to compare
            made.fill_(0 if self.other_side and made.numel() == 1 else 1)
        elif name in _INTEGERS:
            least, above = _range(given, made.dtype)
            value = least + (above - least) * share
            made.copy_(value.floor() if varied else torch.tensor(int(value) if self.other_side else least))
        elif not made.is_floating_point():
            made.fill_(1)
        elif name in _UNIFORM:
            least, above = given.get("from", 0.0), given.get("to", 1.0)
            made.copy_(torch.as_tensor(least + (above - least) * share))
        elif name in _NORMAL:
            made.fill_(0.5 if self.other_side else 0.0)
        else:
            made.fill_(0.9 if self.other_side else 0.5)

    def _spread(self, made: torch.Tensor) -> torch.Tensor:
        """Between the two sides, by the number of the sample in the whole and the place in its row."""
        rows = torch.arange(self._first + 1, self._first + 1 + self._size, device=made.device) * 0.6180339887
        each = torch.arange(made.numel() // max(1, self._size), device=made.device) * 0.7548776662
        share = (rows[:, None] + each[None]).remainder(1.0).reshape(made.shape)
        return _LOW + (_HIGH - _LOW) * share


class ExchangedInside(Refused):
    """A number was about to be exchanged with other processes, which compare in another way."""

    def __init__(self) -> None:
        super().__init__(
            "the loss function communicates with other processes: each micro-batch would do so again",
            "gather and log after run.backward(...); a loss over the samples of all processes cannot be split: "
            "use a smaller batch",
        )


def has_peers() -> bool:
    """Whether there are other processes to exchange something with."""
    return is_up() and dist.get_world_size() > 1


@functools.cache
def _exchanges(func: Any) -> bool:
    return func.namespace in ("c10d", compat.COLLECTIVES)


@functools.cache
def _draws(func: Any) -> bool:
    """Asked at every operation, and each time torch makes a new list of its tags."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _defaults() -> list[torch.Generator]:
    """Of the CPU and the devices in use, of whatever make; a failed try restores these."""
    makes = [getattr(torch, name) for name, _, _ in device_generators()]
    return [
        torch.default_generator,
        *(each for make in makes for each in getattr(make, "default_generators", ())),
    ]


def _range(given: dict[str, Any], dtype: torch.dtype) -> tuple[int, int]:
    least, above = given.get("low", given.get("from")), given.get("high", given.get("to"))
    if above is None:
        most = (
            1 / torch.finfo(dtype).eps
            if dtype.is_floating_point
            else 2
            if dtype == torch.bool
            else torch.iinfo(dtype).max
        )
        above = min(_MANY, most)
    return int(least or 0), int(above)


def _chosen(given: dict[str, Any], made: torch.Tensor, *, last: bool) -> torch.Tensor:
    """Categories that can be drawn: the likeliest, or the last; of several without replacement the likeliest ones."""
    weights = given["self"]
    many = made.shape[-1]
    if not given.get("replacement", False) and many > 1:
        return weights.topk(many, dim=-1).indices  # type: ignore[no-any-return]
    place = torch.arange(weights.shape[-1], device=weights.device).expand_as(weights)
    one = (
        torch.where(weights > 0, place, -1).amax(-1, keepdim=True)
        if last
        else weights.argmax(-1, keepdim=True)
    )
    return one.expand(made.shape)


def same_random(loss_fn: LossFunction) -> LossFunction:
    """The loss function with torch's RNGs at the same place before each call; refused if it draws from others."""

    def same(part: Any) -> Any:
        seed_torch(0)
        before = _other_states()
        made = loss_fn(part)
        if _other_states() != before:
            raise Refused(
                "the loss function draws from Python's or numpy's RNG: micro-batches would draw different numbers",
                "draw with torch; or before run.backward(...), into the batch",
            )
        return made

    return same


def _other_states() -> list[Any]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return [random.getstate()]
    state = numpy.random.get_state(legacy=False)
    return [random.getstate(), repr(state["state"])]


def eager() -> Any:
    """A compiled model is asked as it was before compilation: no new shapes are compiled for a probe."""
    compiled = compat.COMPILER in sys.modules  # whose import takes seconds
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
