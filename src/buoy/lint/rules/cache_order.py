"""BY602: `cache()` behind `shuffle` or `repeat`: the cache freezes the order, or never ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Call, Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.pipelines import chain
from buoy.lint.target import Target

RULE = Rule("BY602", "cache-after-shuffle", "a tf.data pipeline caches what should change in every epoch")

# A split made after the shuffle must stay the same in every epoch: there the cache is right.
_SPLITS = frozenset({"take", "skip", "shard", "enumerate"})
_PIPELINE = frozenset(
    {
        "map",
        "batch",
        "prefetch",
        "filter",
        "interleave",
        "unbatch",
        "padded_batch",
        "with_options",
        "shuffle",
        "repeat",
        "cache",
        "ragged_batch",
    }
)
_RANDOM = (
    "tf.image.random",
    "tf.random.",
    "tensorflow.image.random",
    "tensorflow.random.",
    "tf.image.stateless_random",
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Method chains of a data set, read from `cache()` backwards, through one variable at a time."""
    if not facts.packages & {"tensorflow", "tensorflow_datasets", "keras"}:
        return
    for call in facts.calls.get("cache", ()):
        if call.receiver is None or call.node.args or call.node.keywords:
            continue
        culprit = _before(call, facts)
        if culprit is None or _shuffled_again(call, facts):
            continue
        method = culprit.func.attr if isinstance(culprit.func, ast.Attribute) else "map"
        messages = {
            "shuffle": (
                "the cache keeps the order of the first epoch: every later epoch sees the data "
                "in the same order"
            ),
            "repeat": (
                "the cache holds every repetition, not the data set once: with `repeat()` "
                "without a count it grows without end"
            ),
            "map": "the cache keeps the first epoch's random augmentations: every later epoch sees the same images",
        }
        yield Finding(
            facts.document.span(call.node), "warning", messages[method], f"put `cache()` before `{method}`"
        )


def _before(call: Call, facts: Facts) -> ast.Call | None:
    """The call in front of the cache that should have come after it."""
    for earlier in chain(call, facts):
        method = earlier.func.attr if isinstance(earlier.func, ast.Attribute) else ""
        if method in _SPLITS or method not in _PIPELINE:
            return None
        if method == "repeat" or (method == "shuffle" and not _keeps_order(earlier)):
            return earlier
        if method == "map" and _is_random(earlier, facts):
            return earlier
    return None


def _keeps_order(node: ast.Call) -> bool:
    return any(
        keyword.arg == "reshuffle_each_iteration"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in node.keywords
    )


def _is_random(node: ast.Call, facts: Facts) -> bool:
    function = node.args[0] if node.args else None
    body: ast.AST | None = function if isinstance(function, ast.Lambda) else None
    if isinstance(function, ast.Name):
        found = facts.functions.get(function.id, [])
        body = found[0].node if len(found) == 1 else None
    if body is None:
        return False
    return any(
        isinstance(part, ast.Call) and (facts.qualified(part.func) or "").startswith(_RANDOM)
        for part in ast.walk(body)
    )


def _shuffled_again(call: Call, facts: Facts) -> bool:
    """A shuffle later in the same chain or statement makes up for a frozen one."""
    for other in facts.calls.get("shuffle", ()):
        if other.receiver is not None and call.node in ast.walk(other.receiver):
            return True
        if (
            other.block.function() is call.block.function()
            and other.node.lineno > call.node.lineno
            and _same_variable(call, other)
        ):
            return True
    return False


def _same_variable(call: Call, other: Call) -> bool:
    targets = {target.id for target in getattr(call.statement, "targets", []) if isinstance(target, ast.Name)}
    root: ast.expr | None = other.receiver
    while isinstance(root, ast.Call | ast.Attribute):
        root = root.func if isinstance(root, ast.Call) else root.value
    return isinstance(root, ast.Name) and root.id in targets
