"""Where training code saves: shared by the rules about checkpoints."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from buoy.lint.facts import Call, Facts
from buoy.lint.frameworks import is_keras_model, uses_torch


@dataclass(frozen=True, slots=True)
class Save:
    """One call that writes a checkpoint."""

    call: Call
    what: ast.expr | None
    path: ast.expr


def saves(facts: Facts) -> list[Save]:
    """`torch.save`, Keras `save` and `save_weights`, and ModelCheckpoint paths."""
    if "saves" in facts.memo:
        kept: list[Save] = facts.memo["saves"]
        return kept
    found = []
    if uses_torch(facts):
        for call in facts.called("torch.save"):
            path = call.argument(1, "f")
            if path is not None:
                found.append(Save(call, call.argument(0, "obj"), path))
    for method in ("save", "save_weights"):
        for call in facts.calls.get(method, ()):
            path = call.argument(0, "filepath")
            if path is not None and is_keras_model(call.receiver, call.block, facts):
                found.append(Save(call, call.receiver, path))
    facts.memo["saves"] = found
    return found
