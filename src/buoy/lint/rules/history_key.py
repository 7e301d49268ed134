"""BY204: `history['acc']` where the metric is called `accuracy`: KeyError when the curves are drawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Facts, Seen
from buoy.lint.frameworks import is_guarded, uses_keras
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.removed import strike
from buoy.lint.target import Target

RULE = Rule("BY204", "history-key", "a key that the training history does not have")

_SHORT = {"acc": "accuracy", "val_acc": "val_accuracy"}
_VALIDATION = frozenset({"validation_data", "validation_split"})
# Where validation data would stand without its name.
_FITS = {"fit": (6,), "fit_generator": (5,)}
_LONG = {"accuracy": "acc", "val_accuracy": "val_acc"}


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Subscripts of a history whose key is the other spelling of the compiled metric."""
    if not uses_keras(facts) or not facts.keys.keys() & (_SHORT.keys() | _LONG.keys()):
        return
    spellings = _compiled_metrics(facts)
    if spellings == {"accuracy"}:
        wrong = _SHORT
    elif spellings == {"acc"}:
        wrong = _LONG
    else:
        return
    for key, right in wrong.items():
        for seen in facts.keys.get(key, ()):
            if (
                _is_history(seen, facts)
                and isinstance(seen.node.ctx, ast.Load)
                and not _reached_never(seen, facts)
                and not is_guarded(seen.block)
            ):
                yield _finding(seen, key, right, facts)


def _compiled_metrics(facts: Facts) -> set[str]:
    """The spellings of accuracy in every `compile`; something unreadable among them makes the answer unknown."""
    found: set[str] = set()
    for call in facts.calls.get("compile", ()):
        metrics = call.keyword("metrics") or (call.node.args[2] if len(call.node.args) > 2 else None)
        if metrics is None:
            continue
        if not isinstance(metrics, ast.List | ast.Tuple) or not all(
            isinstance(item, ast.Constant) for item in metrics.elts
        ):
            return set()
        found |= {
            str(item.value)
            for item in metrics.elts
            if isinstance(item, ast.Constant) and item.value in ("acc", "accuracy")
        }
    return found


def _is_history(seen: Seen, facts: Facts) -> bool:
    value = seen.node.value
    if isinstance(value, ast.Attribute) and value.attr == "history":
        return True
    values = facts.values(value, seen.block)
    return bool(values) and all(isinstance(item, ast.Attribute) and item.attr == "history" for item in values)


def _reached_never(seen: Seen, facts: Facts) -> bool:
    function = seen.block.function()
    return function.kind == "function" and function.scope.name not in facts.calls


def _finding(seen: Seen, key: str, right: str, facts: Facts) -> Finding:
    span = facts.document.span(seen.node.slice)
    quoted = facts.document.text(span)
    validated = _validated(facts) if key.startswith("val_") else "always"
    fix = None
    if quoted[1:-1] == key and len(quoted) == len(key) + 2 and validated != "never":
        edit = Edit(Span(span.line, span.column + 1, span.end_line, span.end_column - 1), right)
        fix = Fix(f"use `{right}`", (edit,), "safe" if validated == "always" else "unsafe")
    hint = f"use `{right}`"
    if validated == "never":
        hint = f"give `fit` its `validation_data`, then use `{right}`: without it the history has neither"
    message = (
        f"the history has no `{key}`: `compile` asks for `{right.removeprefix('val_')}`; "
        f"KeyError{strike(facts, seen.block, seen.node.lineno)}"
    )
    return Finding(span, "error", message, hint, fix)


def _validated(facts: Facts) -> str:
    """Whether the trainings here validate: only then does the history have any `val_` key."""
    fits = [(call, *_FITS[name]) for name in _FITS for call in facts.calls.get(name, ())]
    given = [
        bool({word.arg for word in call.node.keywords} & _VALIDATION)
        or call.has_unknown_keywords
        or len(call.node.args) > position
        for call, position in fits
    ]
    if not given:
        return "perhaps"  # fitted elsewhere
    return "always" if all(given) else "perhaps" if any(given) else "never"
