"""BY203: a ModelCheckpoint that Keras 3 refuses: `period=`, or a path with the wrong ending."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.fold import ending
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Finding, Rule
from buoy.lint.target import Target, removed

RULE = Rule("BY203", "checkpoint-callback", "a ModelCheckpoint that Keras 3 refuses to make")

_HOMES = (
    "keras.callbacks.ModelCheckpoint",
    "tensorflow.keras.callbacks.ModelCheckpoint",
    "tensorflow.python.keras.callbacks.ModelCheckpoint",
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Calls of Keras' own ModelCheckpoint."""
    for call in facts.called(*_HOMES):
        if is_guarded(call.block) or not target.lacks("keras", "3.0.0", facts):
            continue
        gone = removed()["keras"]["keywords"].get("keras.callbacks.ModelCheckpoint", {})
        for keyword in call.node.keywords:
            if keyword.arg in gone:
                yield Finding(
                    facts.document.span(keyword),
                    "error",
                    f"`ModelCheckpoint` has no `{keyword.arg}` any more: TypeError before training starts",
                    "`save_freq` counts batches, not epochs: `save_freq=N * steps_per_epoch`, or save every epoch",
                )
        yield from _suffix(call, facts)


def _suffix(call: Call, facts: Facts) -> Iterator[Finding]:
    path = call.argument(0, "filepath")
    found = ending(path, facts, call.block)
    only_weights = call.keyword("save_weights_only")
    if only_weights is None and len(call.node.args) > 4:
        only_weights = call.node.args[4]
    if path is None or found is None or not found[0] or call.has_unknown_keywords:
        return
    if only_weights is not None and not isinstance(only_weights, ast.Constant):
        return
    weights = isinstance(only_weights, ast.Constant) and bool(only_weights.value)
    allowed = (".weights.h5",) if weights else (".keras", ".h5")
    text, whole = found
    if text.endswith(allowed) or (not whole and "." not in text and "/" not in text):
        return
    what = "with `save_weights_only=True` " if weights else ""
    yield Finding(
        facts.document.span(path),
        "error",
        f"`ModelCheckpoint` {what}refuses {text[-40:]!r}: the path must end in "
        f"`{allowed[0]}`; ValueError before training starts",
        f"end the path in `{allowed[0]}`, here and where it is loaded",
    )
