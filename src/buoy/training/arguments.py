"""What `Run` and the guards are given, checked before anything is written or loaded."""

from __future__ import annotations

import os
import sys

from buoy.errors import UsageError
from buoy.units import parse_bytes


def folder_name(folder: object) -> str:
    """The run folder as text.

    >>> folder_name("runs/cats")
    'runs/cats'
    """
    name = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise UsageError(
            "cannot read which folder the run has",
            received=repr(folder),
            expected="the name of a folder",
            hint='`buoy.Run("runs/cats")`',
        )
    return name


def run_folder(folder: object) -> str:
    """Its whole path."""
    return os.path.abspath(os.path.expanduser(folder_name(folder)))


def check(
    *,
    seed: object = None,
    micro_batch: object = None,
    inexact: object = (),
    remedies: object = (),
    memory_cap: object = None,
    mirror: object = None,
    disk: object = None,
    plan: object = None,
) -> None:
    """Refuse what none of these can be.

    >>> check(seed=3, mirror="/content/drive/MyDrive/runs")
    >>> check(seed="a")
    Traceback (most recent call last):
        ...
    buoy.errors.UsageError: the seed is not a whole number
      received: seed='a'
      expected: a whole number
      hint: `seed=3`; leave it out and torch's own or Keras's own is used
    """
    if seed is not None and type(seed) is not int:
        raise UsageError(
            "the seed is not a whole number",
            received=f"seed={seed!r}",
            expected="a whole number",
            hint="`seed=3`; leave it out and torch's own or Keras's own is used",
        )
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise UsageError(
            "micro_batch is not a number of samples",
            received=f"micro_batch={micro_batch!r}",
            expected="1 or more",
            hint="leave it out and buoy finds what fits",
        )
    words = _words(inexact)
    if words is None or set(words) - {"batchnorm"}:
        raise UsageError(
            "unknown word in inexact",
            received=f"inexact={inexact!r}",
            expected='("batchnorm",)',
            hint='`inexact=("batchnorm",)` accepts batch statistics per micro-batch',
        )
    asked = _words(remedies)
    if asked is None:
        raise UsageError(
            "cannot read the remedies",
            received=f"remedies={remedies!r}",
            expected="names of remedies",
            hint='`remedies=("amp",)`; `buoy plan` shows what each would do',
        )
    if asked:
        from buoy.torch.switches import refuse_unknown  # only trainings in PyTorch have such switches

        refuse_unknown(asked)
    if not _is_plan(plan):
        raise UsageError(
            "this is no plan",
            received=f"plan={plan!r}",
            expected="what `buoy.plan` returned",
            hint="`plan = buoy.plan(model, batch)`; leave it out and buoy finds what fits",
        )
    if memory_cap is not None:
        size = parse_bytes(memory_cap) if isinstance(memory_cap, str) else memory_cap
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                "cannot read the memory_cap",
                received=f"memory_cap={memory_cap!r}",
                expected="a size, more than 0",
                hint='`memory_cap="12GB"`',
            )
    for name, value, example in (("mirror", mirror, "/content/drive/MyDrive/runs"), ("disk", disk, "20GB")):
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise UsageError(
                f"cannot read the {name}",
                received=f"{name}={value!r}",
                expected="text",
                hint=f'`{name}="{example}"`',
            )


def _is_plan(plan: object) -> bool:
    """Without loading the planner: where there is a plan, it is loaded already."""
    planner = sys.modules.get("buoy.planner.model")
    return plan is None or (planner is not None and isinstance(plan, planner.Plan))


def _words(given: object) -> list[str] | None:
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return None
    return list(words)
