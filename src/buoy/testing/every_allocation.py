"""Fails each allocation of a piece of work in turn, as SQLite tests itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from buoy.testing.budget import PretendedDevice, out_of_memory


@dataclass(frozen=True)
class Failure:
    """One run of the work, in which one allocation failed."""

    number: int
    """Which allocation, counted from 1."""
    operation: str
    """The operation that asked for it: `aten.mm.default`."""
    subject: Any
    """What `setup` made for this run, as the work left it."""
    result: Any
    """What the work returned."""
    error: BaseException | None
    """What the work raised; None when it survived."""


def every_allocation(
    work: Callable[[Any], Any], setup: Callable[[], Any] = lambda: None, *, smallest: int = 16
) -> Iterator[Failure]:
    """Run `work(setup())` once for each allocating operation in it, and let that one raise what CUDA would.

    The work is run once undisturbed to find those operations: every one that makes at least `smallest` bytes of new
    storage. `setup` runs each time, undisturbed. What to check is yours: that the error was survived, and that the
    state is that of an undisturbed run.

    >>> import torch
    >>> def work(weight):
    ...     return (weight * 2).sum()
    >>> [failure.operation for failure in every_allocation(work, lambda: torch.ones(8), smallest=32)]
    ['aten.mul.Tensor']
    """
    subject = setup()
    recording = _Recording(smallest)
    with recording:
        work(subject)
    for number, (position, operation) in enumerate(recording.allocations, start=1):
        subject = setup()
        injection = _Injection(position)
        result, error = None, None
        try:
            with injection:
                result = work(subject)
        except Exception as raised:  # noqa: BLE001 - whatever it was, the caller judges it
            error = raised
        if not injection.failed:
            raise AssertionError(f"{operation} was not reached again: the work differs from run to run")
        yield Failure(number, operation, subject, result, error)


class _Recording(PretendedDevice):  # type: ignore[no-untyped-call]
    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.operations = 0
        self.allocations: list[tuple[int, str]] = []

    def before(self, func: Any) -> None:
        self.operations += 1

    def after(self, func: Any, new: int) -> None:
        if new >= self.smallest:
            self.allocations.append((self.operations, str(func)))


class _Injection(PretendedDevice):  # type: ignore[no-untyped-call]
    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        self.operations = 0
        self.failed = False

    def before(self, func: Any) -> None:
        self.operations += 1
        if self.operations == self.position:
            self.failed = True
            raise out_of_memory(0, f"allocation of {func} was made to fail")
