"""BY703: a new file every epoch and none ever removed: the disk fills, or the Drive quota does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from buoy.lint.facts import Block, Call, Facts
from buoy.lint.fold import range_length
from buoy.lint.model import Finding, Rule
from buoy.lint.saving import Save, saves
from buoy.lint.target import Target

RULE = Rule("BY703", "unpruned-checkpoints", "a checkpoint file per epoch, never removed")

_REMOVES = frozenset({"remove", "unlink", "rmtree", "rmdir", "CheckpointManager"})
_FEW = 10


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Saves in a loop whose path holds the loop's variable, and ModelCheckpoint paths with `{epoch}`."""
    if facts.calls.keys() & _REMOVES:
        return
    for save in saves(facts):
        found = _per_epoch(save, facts) if _is_model(save, facts) else None
        if found is not None:
            name, count = found
            yield _finding(save.path, f"with `{name}` in its name", count, facts)
    for call in facts.called("keras.callbacks.ModelCheckpoint", "tensorflow.keras.callbacks.ModelCheckpoint"):
        path = call.argument(0, "filepath")
        rhythm = call.keyword("period") or call.keyword("save_freq")  # then it is not every epoch
        if path is not None and rhythm is None and "{epoch" in ast.unparse(path) and not _best_only(call):
            epochs = _fit_epochs(facts)
            if epochs is None or epochs >= _FEW:
                yield _finding(path, "per epoch", epochs, facts)


def _is_model(save: Save, facts: Facts) -> bool:
    """Whether what is saved is a model or a checkpoint: `torch.save` also writes features, samples and spectrograms."""
    if save.call.tail != "save" or facts.resolve(save.call.dotted) != "torch.save" or save.what is None:
        return True
    values = [save.what, *(value for value in facts.values(save.what, save.call.block) if value is not None)]
    text = " ".join(ast.unparse(value) for value in values).lower()
    return any(
        word in text
        for word in ("state_dict", "model", "net", "checkpoint", "ckpt", "generator", "discriminator")
    )


def _per_epoch(save: Save, facts: Facts) -> tuple[str, int | None] | None:
    names = {node.id for node in ast.walk(save.path) if isinstance(node, ast.Name)}
    if isinstance(save.path, ast.Name):
        for binding in facts.bindings(save.path, save.call.block):
            if binding.value is not None and binding.block.loops():
                names |= {node.id for node in ast.walk(binding.value) if isinstance(node, ast.Name)}
    for loop in save.call.block.loops():
        node = loop.node
        if not isinstance(node, ast.For):
            continue
        variables = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
        shared = sorted(names & variables)
        if not shared or not _is_range(node.iter):
            continue
        every = _every(save.call.block, loop, set(variables))
        count = range_length(node.iter, facts, loop)
        # With an unknown number of passes, every n-th of them may be a few files or many: nothing can be said.
        if every is None or (count is None and every > 1) or (count is not None and count // every < _FEW):
            return None
        return shared[0], count // every if count is not None else None
    return None


def _is_range(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id in ("range", "trange") for part in ast.walk(node))


def _every(block: Block, loop: Block, variables: set[str]) -> int | None:
    """1 when the save happens in every pass, n behind `% n`; None when another test decides (the best so far)."""
    every = 1
    for around in block.up():
        if around is loop:
            return every
        if around.kind in ("if", "else") and isinstance(around.node, ast.If):
            modulo = next(
                (
                    node.right
                    for node in ast.walk(around.node.test)
                    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
                ),
                None,
            )
            if modulo is None or around.kind == "else":
                return None
            every *= (
                modulo.value
                if isinstance(modulo, ast.Constant) and isinstance(modulo.value, int) and modulo.value > 0
                else 1
            )
            if not isinstance(modulo, ast.Constant):
                return None
        elif around.kind in ("for", "while", "except"):
            return None
    return None


def _best_only(call: Call) -> bool:
    value = call.keyword("save_best_only") or (call.node.args[3] if len(call.node.args) > 3 else None)
    return call.has_unknown_keywords or (
        value is not None and not (isinstance(value, ast.Constant) and value.value is False)
    )


def _fit_epochs(facts: Facts) -> int | None:
    from buoy.lint.fold import epochs_of

    counts = [epochs_of(call, facts) for call in facts.calls.get("fit", ())]
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


def _finding(path: ast.expr, rhythm: str, count: int | None, facts: Facts) -> Finding:
    total = f"{count} files of the model's size" if count else "the disk grows by one model each time"
    message = f"a new checkpoint file {rhythm} and none is removed: {total}"
    return Finding(
        facts.document.span(path),
        "warning",
        message,
        "keep the last two: save to a fixed name beside, rename it, and remove the one before",
    )
