"""What `Run` and every Guard are given: one set of options, checked before anything is written or loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from buoy.checkpoint.retention import Keep, as_keep
from buoy.errors import UsageError
from buoy.training.save_policy import Rule, parse_rule
from buoy.units import parse_bytes, parse_time_limit

if TYPE_CHECKING:
    from buoy.planner.result import Plan


@dataclass(frozen=True)
class Options:
    """The options of one run; every mistake in them is named at once.

    >>> Options(seed=3, mirror="/content/drive/MyDrive/runs").seed
    3
    >>> Options(seed="a")
    Traceback (most recent call last):
        ...
    buoy.errors.UsageError: the seed is not a whole number
      received: seed='a'
      expected: a whole number
      hint: `seed=3`; leave it out and torch's own or Keras's own is used
    """

    mirror: str | None = None
    """A second place for checkpoints and log, that outlives this machine: a folder, or a URL such as `s3://bucket/runs`."""
    time_limit: str | float | None = None
    """How long the session may live (`"12h"`, or seconds); where the platform is known it need not be said."""
    disk: str | None = None
    """What all checkpoints together may take (`"20GB"`); else what is free."""
    save: str | int | None = None
    """When to save: `"10min"`, `500` steps, or None for what costs least over all."""
    keep: Keep | int | None = None
    """Which checkpoints stay: `Keep(...)`, or how many of the last."""
    seed: int | None = None
    """Decides the order of the data and what is drawn for it."""
    micro_batch: int | None = None
    """So many samples at once to begin with; else what the plan says, or what turns out to fit."""
    inexact: tuple[str, ...] | str = ()
    """What splitting may change: `"batchnorm"`, its statistics per micro-batch."""
    memory_cap: str | int | None = None
    """So much of the device's memory may be used (`"12GB"`, or bytes)."""
    remedies: tuple[str, ...] | str = ()
    """What to switch on to save memory: names as `buoy plan` shows them. PyTorch only."""
    plan: Plan | None = None
    """What `buoy.plan` foresaw: the first micro-batch is its, and the report compares."""

    def __post_init__(self) -> None:
        checks: tuple[Callable[[], object], ...] = (
            partial(_check_text, "mirror", self.mirror, "/content/drive/MyDrive/runs"),
            lambda: self.seconds,
            partial(_check_text, "disk", self.disk, "20GB"),
            lambda: self.disk_bytes,
            lambda: self.save_rule,
            lambda: self.kept,
            self._check_seed,
            self._check_micro_batch,
            self._check_inexact,
            self._check_memory_cap,
            self._check_remedies,
            self._check_plan,
        )
        wrong: list[UsageError] = []
        for check in checks:
            try:
                check()
            except UsageError as error:
                if not any(error.received == other.received for other in wrong):
                    wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            raise UsageError(
                f"{len(wrong)} options cannot be used",
                received="; ".join(error.received or error.message for error in wrong),
                expected="; ".join(error.expected or error.message for error in wrong),
                hint="; ".join(error.hint for error in wrong if error.hint),
            )

    @property
    def seconds(self) -> float | None:
        """The time limit in seconds."""
        return parse_time_limit(self.time_limit)

    @property
    def disk_bytes(self) -> int | None:
        """The disk budget in bytes."""
        return parse_bytes(self.disk) if isinstance(self.disk, str) and self.disk.strip() else None

    @property
    def save_rule(self) -> Rule:
        """What was asked for as the time of saving."""
        return parse_rule(self.save)

    @property
    def kept(self) -> Keep:
        """What was asked to be kept."""
        return as_keep(self.keep)

    @property
    def first_micro_batch(self) -> int | None:
        """As given, else as planned."""
        if self.micro_batch is None and self.plan is not None:
            return self.plan.micro_batch or None
        return self.micro_batch

    @property
    def steps(self) -> dict[str, Any]:
        """What a transaction around training steps in PyTorch takes of them."""
        return {
            "micro_batch": self.first_micro_batch,
            "inexact": self.inexact,
            "memory_cap": self.memory_cap,
            "remedies": self.remedies,
        }

    def _check_seed(self) -> None:
        if self.seed is not None and type(self.seed) is not int:
            raise UsageError(
                "the seed is not a whole number",
                received=f"seed={self.seed!r}",
                expected="a whole number",
                hint="`seed=3`; leave it out and torch's own or Keras's own is used",
            )

    def _check_micro_batch(self) -> None:
        if self.micro_batch is not None and (type(self.micro_batch) is not int or self.micro_batch < 1):
            raise UsageError(
                "micro_batch is not a number of samples",
                received=f"micro_batch={self.micro_batch!r}",
                expected="1 or more",
                hint="leave it out and buoy finds what fits",
            )

    def _check_inexact(self) -> None:
        words = _words(self.inexact)
        if words is None or set(words) - {"batchnorm"}:
            raise UsageError(
                "unknown name in inexact",
                received=f"inexact={self.inexact!r}",
                expected='("batchnorm",)',
                hint='`inexact=("batchnorm",)` accepts batch statistics per micro-batch',
            )

    def _check_memory_cap(self) -> None:
        if self.memory_cap is None:
            return
        size = parse_bytes(self.memory_cap) if isinstance(self.memory_cap, str) else self.memory_cap
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                "cannot read the memory_cap",
                received=f"memory_cap={self.memory_cap!r}",
                expected="a size, more than 0",
                hint='`memory_cap="12GB"`',
            )

    def _check_remedies(self) -> None:
        asked = _words(self.remedies)
        if asked is None:
            raise UsageError(
                "cannot read the remedies",
                received=f"remedies={self.remedies!r}",
                expected="names of remedies",
                hint='`remedies=("amp",)`; `buoy plan` shows what each would do',
            )
        if asked:
            from buoy.torch.step.remedies import (
                refuse_unknown,  # only trainings in PyTorch have such switches
            )

            refuse_unknown(asked)

    def _check_plan(self) -> None:
        planner = sys.modules.get("buoy.planner.result")  # where there is a plan, it is loaded already
        if self.plan is not None and (planner is None or not isinstance(self.plan, planner.Plan)):
            raise UsageError(
                "this is not a plan",
                received=f"plan={self.plan!r}",
                expected="what `buoy.plan` returned",
                hint="`plan = buoy.plan(model, batch)`; leave it out and buoy finds what fits",
            )


def folder_name(folder: object) -> str:
    """The run folder as text.

    >>> folder_name("runs/cats")
    'runs/cats'
    """
    name = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise UsageError(
            "the run folder must be a path",
            received=repr(folder),
            expected="the name of a folder",
            hint='`buoy.Run("runs/cats")`',
        )
    return name


def run_folder(folder: object) -> str:
    """Its whole path."""
    return os.path.abspath(os.path.expanduser(folder_name(folder)))


def _check_text(name: str, value: object, example: str) -> None:
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise UsageError(
            f"cannot read the {name}",
            received=f"{name}={value!r}",
            expected="text",
            hint=f'`{name}="{example}"`',
        )


def _words(given: object) -> list[str] | None:
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return None
    return list(words)
