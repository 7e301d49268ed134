"""Every kind of death, in one list. Names end in `-run` or `-watch`: how the program was launched."""

from __future__ import annotations

from tests.deaths.kind import Kind
from tests.deaths.kinds import (
    crashes,
    exceptions,
    exits,
    hangs,
    kernels,
    limits,
    memory,
    recorder,
    signals,
    trees,
)

ALL: tuple[Kind, ...] = (
    *memory.KINDS,
    *signals.KINDS,
    *crashes.KINDS,
    *exceptions.KINDS,
    *limits.KINDS,
    *exits.KINDS,
    *trees.KINDS,
    *hangs.KINDS,
    *recorder.KINDS,
    *kernels.KINDS,
)

BY_NAME = {kind.name: kind for kind in ALL}
assert len(BY_NAME) == len(ALL), "two kinds have the same name"
