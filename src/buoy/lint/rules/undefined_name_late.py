"""BY101: a name that nothing defines, reached only after the training: the whole run is lost."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.names import undefined_names
from buoy.lint.rules.undefined_name import describe
from buoy.lint.target import Target
from buoy.lint.timing import timing_of

RULE = Rule("BY101", "undefined-name-after-training", "a name is used after training that nothing defines")


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Undefined names that are reached after training."""
    for entry in undefined_names(facts):
        moment = timing_of(facts).moment(entry.block, entry.node.lineno)
        if moment.when == "after" and not entry.piece:
            yield describe(entry, facts, moment.words)
