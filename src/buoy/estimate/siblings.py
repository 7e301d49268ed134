"""The next smaller model of the same family, where one is known: dated data in siblings.csv."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Sibling:
    """One row of siblings.csv."""

    library: str
    """`keras` (keras.applications), `timm` or `transformers`."""
    name: str
    smaller: str
    """The next smaller one's name; empty for the smallest."""
    kind: str
    """A transformers config's `model_type`."""
    shape: dict[str, int]
    """The fields of a transformers config that make it this size."""


@functools.cache
def all_siblings() -> tuple[Sibling, ...]:
    """Every row, in the order of the file."""
    text = resources.files("buoy.estimate").joinpath("siblings.csv").read_text(encoding="utf-8")
    return tuple(_from_row(row) for row in csv.DictReader(text.splitlines()))


def smaller(library: str, name: str) -> Sibling | None:
    """The next smaller sibling of a model that is known by its name, whatever its case.

    >>> smaller("keras", "resnet152").name
    'ResNet101'
    """
    this = next((s for s in all_siblings() if s.library == library and s.name.lower() == name.lower()), None)
    return _of(this)


def smaller_config(config: Any) -> Sibling | None:
    """The next smaller sibling of a transformers config that has the size of a known one."""
    kind = getattr(config, "model_type", None)
    this = next((s for s in all_siblings() if s.kind and s.kind == kind and _has(config, s.shape)), None)
    return _of(this)


def _of(this: Sibling | None) -> Sibling | None:
    if this is None or not this.smaller:
        return None
    return next(s for s in all_siblings() if (s.library, s.name) == (this.library, this.smaller))


def _has(config: Any, shape: dict[str, int]) -> bool:
    """A config may leave `head_dim` to be computed."""
    return all(getattr(config, name, None) in (value, None) for name, value in shape.items())


def _from_row(row: dict[str, str]) -> Sibling:
    pairs = (pair.split("=") for pair in row["shape"].split())
    return Sibling(
        row["library"], row["name"], row["smaller"], row["kind"], {name: int(v) for name, v in pairs}
    )
