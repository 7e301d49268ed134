"""BY205: an argument that Keras 3 no longer takes: `Adam(lr=...)`, `fit(workers=...)`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.frameworks import is_guarded, is_keras_model, uses_keras
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.removed import drop_argument, strike
from buoy.lint.target import Target, removed

RULE = Rule("BY205", "removed-keras-argument", "an argument that Keras 3 no longer takes")

_RENAMED = {"lr": "learning_rate"}


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Calls of Keras classes and model methods with a removed keyword."""
    if not uses_keras(facts):
        return
    for owner, keywords in removed()["keras"]["keywords"].items():
        if owner == "keras.callbacks.ModelCheckpoint":  # BY203 has more to say of it
            continue
        for call in _calls(owner, facts):
            for keyword in call.node.keywords:
                if (
                    keyword.arg in keywords
                    and not is_guarded(call.block)
                    and target.lacks("keras", keywords[keyword.arg], facts)
                ):
                    yield _finding(call, keyword, owner, facts)


def _calls(owner: str, facts: Facts) -> list[Call]:
    if owner.startswith("keras.Model."):
        method = owner.rpartition(".")[2]
        return [
            call for call in facts.calls.get(method, ()) if is_keras_model(call.receiver, call.block, facts)
        ]
    # `tf.keras.optimizers.legacy.Adam` resolves to another name and is left alone.
    return list(facts.called(owner, "tensorflow." + owner))


def _finding(call: Call, keyword: ast.keyword, owner: str, facts: Facts) -> Finding:
    name = keyword.arg or ""
    span = facts.document.span(keyword)
    shown = owner.removeprefix("keras.")
    right = _RENAMED.get(name)
    message = (
        f"`{shown}` has no argument `{name}` in Keras 3: the call "
        f"fails{strike(facts, call.block, call.node.lineno)}"
    )
    if right:
        edit = Edit(Span(span.line, span.column, span.line, span.column + len(name)), right)
        return Finding(
            span, "error", message, f"write `{right}=`", Fix(f"rename to `{right}`", (edit,), "safe")
        )
    hint = (
        "set `workers` and `use_multiprocessing` on the `PyDataset` instead"
        if name in ("workers", "use_multiprocessing", "max_queue_size")
        else f"leave `{name}` out"
    )
    return Finding(span, "error", message, hint, drop_argument(keyword, facts, "unsafe"))
