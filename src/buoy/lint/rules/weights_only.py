"""BY704: the checkpoint holds the weights alone: training cannot go on from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Facts
from buoy.lint.frameworks import uses_torch
from buoy.lint.model import Finding, Rule
from buoy.lint.saving import saves
from buoy.lint.target import Target
from buoy.lint.timing import timing_of

RULE = Rule(
    "BY704", "weights-only-checkpoint", "a checkpoint without the optimizer's state cannot be resumed from"
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """`torch.save(model.state_dict())` inside the training loop, in a file that never saves an
    optimizer; a note, once.
    """
    if not uses_torch(facts) or _saves_optimizer(facts):
        return
    for save in saves(facts):
        call = save.what
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Attribute)
            or call.func.attr != "state_dict"
        ):
            continue
        if timing_of(facts).moment(save.call.block, save.call.node.lineno).when != "in" or _only_the_best(
            save.call.block
        ):
            continue
        message = (
            "only the weights are saved: after a crash the optimizer's moments, the epoch and "
            "the random state start over"
        )
        yield Finding(
            facts.document.span(save.call.node),
            "note",
            message,
            "save `{'model': ..., 'optimizer': optimizer.state_dict(), 'epoch': epoch}`",
        )
        return


def _saves_optimizer(facts: Facts) -> bool:
    """Any state_dict of something that is not plainly a network, or a save helper of a library."""
    for call in facts.calls.get("state_dict", ()):
        name = call.dotted.rpartition(".")[0].lower()
        if any(word in name for word in ("opt", "sched", "scaler", "state", "trainer", "?")):
            return True
    return bool(facts.calls.keys() & {"save_checkpoint", "save_state", "save_training_state"})


def _only_the_best(block: Block) -> bool:
    """Behind a test that is no rhythm (`% n`): such a file is the result, not a place to go on from."""
    tests = [
        around.node.test for around in block.up() if isinstance(around.node, ast.If) and around.kind == "if"
    ]
    tests = [test for test in tests if "__name__" not in ast.dump(test)]
    return any(not any(isinstance(node, ast.Mod) for node in ast.walk(test)) for test in tests)
