"""BY403: an evaluation loop that builds graphs nobody uses: more memory at its peak, for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.evaluation import eval_loops
from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule, Span
from buoy.lint.rules.kept_outputs import keeping
from buoy.lint.target import Target

RULE = Rule("BY403", "eval-with-gradients", "an evaluation loop runs without torch.no_grad()")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Evaluation loops with gradients on; where outputs are kept as well, BY402 says so instead."""
    for loop in eval_loops(facts):
        if keeping(loop, facts):
            continue
        name = facts.document.text(facts.document.span(loop.call.node.func))
        message = (
            f"`{name}.eval()` does not turn gradients off: each batch here stores the activations "
            "for a backward that never comes"
        )
        line = facts.document.span(loop.call.node)
        yield Finding(
            Span(line.line, line.column, line.end_line, line.end_column),
            "warning",
            message,
            "put `with torch.no_grad():` (or `torch.inference_mode()`) around this loop",
        )
