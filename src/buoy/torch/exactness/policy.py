"""Whether steps may be split: what the probe found for each kind of step, asked for when a split is needed.

A kind is the loss function, the model's switches and the make of the batch, as one hashable value. It is found at every
step that is split, so it reads little: flags, types, and a few reductions of what may be labels or masks.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

import torch

from buoy.microbatch.batch import Batch
from buoy.microbatch.errors import CannotSplit, StepError, is_oom
from buoy.microbatch.exactness import Asked, traits
from buoy.torch.exactness.probe import STATE, STATE_HINT, Finding, Probe
from buoy.torch.exactness.samples import SAMPLES
from buoy.torch.memory.device import limited, memory_of, release
from buoy.torch.step.gradient import Step, Trained
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
        self._step: Step | None = None
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

    def begin(self, step: Step) -> None:
        """A step begins."""
        self._step, self._kind, self._is_fresh, self.finding = step, None, False, None

    def end(self) -> None:
        """The step is over: its batch may be large."""
        self._step = None

    @property
    def is_known(self) -> bool:
        """Whether a step of this loss function was compared."""
        return self._step is not None and code_of(self._step.loss_fn) in self._codes

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
        whole = self._step.batch
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
            return CannotSplit("buoy cannot verify that splitting this batch keeps its gradient",
                               received=_alone(failed), expected="a comparison of the whole batch and "
                                                                 "its micro-batches",
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
        if self._step.batch.once or self.exchanges:
            return False
        if self.finding is not None and self.finding.repeats is not None:
            return self.finding.repeats
        try:
            with limited(memory_of(self._trained.first)):
                is_same = self._probe.same_twice(self._step)
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
        self._codes.add(code_of(self._step.loss_fn))
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
            return self._probe.ask(self._step, at_once)
        before, first = self._ways.mode, None
        for mode in sorted(self._ways.modes, key=lambda mode: mode != before):
            self._ways.mode = mode
            found = self._probe.ask(self._step, at_once)
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
                self._kind = self._asked.known_as(kind_of(self._modules, self._step)) or _OTHERS
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
    return f"buoy cannot compute a few of its samples alone{why}"


_LARGE = 1 << 20  # elements: masks are mostly smaller, and images not
_DEPTH = 3  # functions that a loss function calls by a name of its own: mostly one or two


def kind_of(modules: list[torch.nn.Module], step: Step) -> Hashable:
    """Equal for steps that compute the same with other numbers: what is computed, and what the batch is like."""
    whole = step.batch
    flags = tuple([part.training for module in modules for part in module.modules()])
    trained = tuple([parameter.requires_grad for module in modules for parameter in module.parameters()])
    computes = (
        _code(step.loss_fn, _DEPTH),
        step.reduction,
        whole.gives_ranges_only,
        hash(flags),
        hash(trained),
    )
    return computes, _make(whole)


def _code(function: Any, depth: int) -> Hashable:
    """Of a function and those it knows by name; a lambda that is written anew for each batch is the same one."""
    function = getattr(function, "__wrapped__", function)  # first: around it may be mixed precision
    if isinstance(function, functools.partial):
        return _code(function.func, depth)
    if isinstance(function, MethodType):
        return _code(function.__func__, depth)
    if not isinstance(function, FunctionType):
        if isinstance(function, torch.nn.Module):
            return str(type(function)), str(vars(function).get("reduction"))
        return str(type(function))
    code: CodeType = function.__code__
    if not depth:
        return code
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    held += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    known = (_known(value, depth - 1) for value in [*held, *(function.__defaults__ or ())])
    return code, tuple(value for value in known if value is not None)


def _known(value: Any, depth: int) -> Hashable:
    """Of what a loss function refers to: other functions, losses, switches. Numbers may be counters."""
    if isinstance(value, (FunctionType, functools.partial, MethodType)):
        return _code(value, depth)
    if isinstance(value, torch.nn.Module):
        return _code(value, 0)
    return value if isinstance(value, (bool, str)) else None


def _make(whole: Batch) -> Hashable:
    """Types and dimensions of its arrays; of labels and masks also whether something is ignored, padded or constant."""
    made, read = [], []
    for array in whole.arrays:
        made.append((type(array), str(getattr(array, "dtype", "")), len(array.shape)))
        if isinstance(array, torch.Tensor) and array.layout == torch.strided and array.numel():
            if array.is_floating_point() and array.numel() > _LARGE:
                continue
            try:
                read.append(_read(array.detach()))
            except RuntimeError:  # a dtype without a least number, or no room: told by its type alone
                made.append((type(array), "unread", 0))
    found = [_traits(*numbers) for numbers in _to_host(read)]
    measured = [traits for traits, is_measured in found if is_measured]
    # In how many: which ones would make, of the columns of a table alone, more kinds than are counted.
    missing = tuple(sum(each) for each in zip(*measured, strict=True))
    return tuple(made), missing, tuple(traits for traits, is_measured in found if not is_measured)


def _read(array: torch.Tensor) -> torch.Tensor:
    """Least, largest, how many zeros, how many ones, how many in all."""
    if array.is_complex():
        return torch.zeros(5, dtype=torch.float64)
    if array.dtype == torch.bool:
        array = array.byte()
    numbers = [array.min(), array.max(), (array == 0).sum(), (array == 1).sum()]
    whole = torch.float32 if array.device.type == "mps" else torch.float64
    is_counted = torch.tensor(-1.0 if array.is_floating_point() else 0.0, device=array.device, dtype=whole)
    return torch.stack([*(number.to(whole) for number in numbers), is_counted * array.numel()])


def _to_host(read: list[torch.Tensor]) -> list[list[float]]:
    """All at once for each device: a reading stops its queue."""
    if len({numbers.device for numbers in read}) == 1:
        return torch.stack(read).tolist()
    return [numbers.tolist() for numbers in read]


def _traits(
    least: float, largest: float, zeros: float, ones: float, floats: float
) -> tuple[tuple[bool, ...], bool]:
    if floats and zeros + ones != -floats:
        return (least != least, least < 0, zeros > 0), True  # what is missing among measurements
    return traits(least, largest, zeros > 0), False
