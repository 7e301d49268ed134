"""BY202: a path that Keras 3 refuses to save to, found out only when the training is over."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.fold import ending
from buoy.lint.frameworks import is_guarded, is_keras_model
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.removed import strike
from buoy.lint.target import Target

RULE = Rule("BY202", "save-suffix", "a model is saved to a path whose ending Keras 3 refuses")

_MODEL = (".keras", ".h5", ".hdf5")
_WEIGHTS = (".weights.h5",)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`model.save` and `model.save_weights` with a known ending."""
    for method, allowed in (("save", _MODEL), ("save_weights", _WEIGHTS)):
        for call in facts.calls.get(method, ()):
            path = call.argument(0, "filepath")
            if (
                path is None
                or _saves_itself(facts, method)
                or not is_keras_model(call.receiver, call.block, facts)
            ):
                continue
            found = ending(path, facts, call.block)
            if found is None or not found[0] or not _refused(call, found, allowed) or is_guarded(call.block):
                continue
            if target.lacks("keras", "3.0.0", facts):
                yield _finding(call, path, found[0], method, allowed[0], facts)


def _refused(call: Call, found: tuple[str, bool], allowed: tuple[str, ...]) -> bool:
    text, whole = found
    if (
        text.endswith(allowed)
        or call.keyword("zipped") is not None
        or call.keyword("max_shard_size") is not None
    ):
        return False
    # Of a joined path only the end is known: without a dot in it, the rest of the name may still hold the suffix.
    return (
        not text.startswith(("hf://", "gs://"))
        if whole
        else ("." in text or len(text) > len(allowed[0]) or "/" in text)
    )


def _saves_itself(facts: Facts, method: str) -> bool:
    """A class of this file that defines its own `save`."""
    return any(
        block.scope.parent is not None and block.scope.parent.kind == "class"
        for block in facts.functions.get(method, ())
    )


def _finding(call: Call, path: ast.expr, text: str, method: str, suffix: str, facts: Facts) -> Finding:
    shown = text if len(text) < 40 else "..." + text[-36:]
    message = (
        f"`{method}` refuses {shown!r}: the name must end in `{suffix}`; "
        f"ValueError{strike(facts, call.block, call.node.lineno)}"
    )
    hint = f"end the name in `{suffix}`"
    if method == "save" and "." not in text:
        hint += ", or use `model.export(path)` for a SavedModel"
    return Finding(facts.document.span(path), "error", message, hint, _fix(path, text, suffix, facts))


def _fix(path: ast.expr, text: str, suffix: str, facts: Facts) -> Fix | None:
    """Only where the text stands in the call: elsewhere the same path may be read again under its old name."""
    span = facts.document.span(path)
    source = facts.document.text(span)
    if (
        not isinstance(path, ast.Constant)
        or span.line != span.end_line
        or source[:1] not in "'\""
        or source[:3] in ("'''", '"""')
    ):
        return None
    old = next(
        (
            tail
            for tail in (".hdf5", ".h5", ".tf", ".ckpt", ".pb")
            if suffix == ".weights.h5" and text.endswith(tail)
        ),
        "",
    )
    used = sum(line.count(text) for cell in facts.document.cells for line in cell.lines()) if text else 0
    end = span.end_column - 1
    edit = Edit(Span(span.line, end - len(old), span.line, end), suffix)
    return Fix(f"end the name in `{suffix}`", (edit,), "safe" if used == 1 else "unsafe")
