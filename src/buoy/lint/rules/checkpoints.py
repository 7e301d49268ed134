"""BY202, BY203, BY702, BY703, BY704: checkpoints that are refused, lost, pile up, or cannot be resumed from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from buoy.lint.constants import ending, epochs_of, range_length
from buoy.lint.facts import Block, Call, Facts, literal, once
from buoy.lint.model import Edit, Finding, Fix, Rule, Span
from buoy.lint.rules.removed import strike
from buoy.lint.target import Target, removed
from buoy.lint.training import is_guarded, is_keras_model, timing_of, uses_torch


@dataclass(frozen=True, slots=True)
class Save:
    """One call that writes a checkpoint."""

    call: Call
    what: ast.expr | None
    path: ast.expr


@once
def saves(facts: Facts) -> list[Save]:
    """`torch.save`, Keras `save` and `save_weights`, and ModelCheckpoint paths."""
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
    return found


CHECKPOINT_CALLBACK = Rule("BY203", "checkpoint-callback", "a ModelCheckpoint that Keras 3 refuses to make")

_HOMES = (
    "keras.callbacks.ModelCheckpoint",
    "tensorflow.keras.callbacks.ModelCheckpoint",
    "tensorflow.python.keras.callbacks.ModelCheckpoint",
)


def find_checkpoint_callback(facts: Facts, target: Target) -> Iterator[Finding]:
    """Calls of Keras' own ModelCheckpoint."""
    for call in facts.called(*_HOMES):
        if is_guarded(call.block) or not target.lacks("keras", "3.0.0", facts):
            continue
        gone = removed()["keras"]["keywords"].get("keras.callbacks.ModelCheckpoint", {})
        for keyword in call.node.keywords:
            if keyword.arg in gone:
                yield Finding(
                    facts.span(keyword),
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
    weights = bool(literal(only_weights))
    allowed = (".weights.h5",) if weights else (".keras", ".h5")
    text, whole = found
    if text.endswith(allowed) or (not whole and "." not in text and "/" not in text):
        return
    what = "with `save_weights_only=True` " if weights else ""
    yield Finding(
        facts.span(path),
        "error",
        f"`ModelCheckpoint` {what}refuses {text[-40:]!r}: the path must end in "
        f"`{allowed[0]}`; ValueError before training starts",
        f"end the path in `{allowed[0]}`, here and where it is loaded",
    )


SAVE_SUFFIX = Rule("BY202", "save-suffix", "a model is saved to a path whose ending Keras 3 refuses")

_MODEL = (".keras", ".h5", ".hdf5")
_WEIGHTS = (".weights.h5",)


def find_save_suffix(facts: Facts, target: Target) -> Iterator[Finding]:
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
        f"`{method}` refuses {shown!r}: the name must end in `{suffix}`; ValueError{strike(facts, call)}"
    )
    hint = f"end the name in `{suffix}`"
    if method == "save" and "." not in text:
        hint += ", or use `model.export(path)` for a SavedModel"
    return Finding(facts.span(path), "error", message, hint, _fix(path, text, suffix, facts))


def _fix(path: ast.expr, text: str, suffix: str, facts: Facts) -> Fix | None:
    """Only where the text stands in the call: elsewhere the same path may be read again under its old name."""
    span = facts.span(path)
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


EPHEMERAL_CHECKPOINT = Rule(
    "BY702", "ephemeral-checkpoint", "a checkpoint is saved on Colab's disk, which ends with the session"
)

# Signs that something is carried to a place that lasts.
_CARRIES = frozenset(
    {
        "mount",
        "download",
        "push_to_hub",
        "upload_file",
        "upload_folder",
        "upload_blob",
        "log_artifact",
        "upload",
        "CreateFile",
        "save_pretrained_to_hub",
    }
)
_CARRYING_WORDS = (
    "drive",
    "gsutil",
    "gs://",
    "s3://",
    "hf://",
    "rclone",
    "rsync",
    "scp ",
    "git push",
    "kaggle datasets",
    "aws s3",
)


def find_ephemeral_checkpoint(facts: Facts, target: Target) -> Iterator[Finding]:
    """Saves to a relative or /content path in a Colab notebook that mounts, downloads and uploads nothing."""
    on_colab = facts.document.colab or any(name.startswith("google.colab") for name, _, _ in facts.imported)
    if (
        not on_colab
        or facts.calls.keys() & _CARRIES
        or "wandb" in facts.packages
        or not timing_of(facts).trains
    ):
        return
    if any(word in cell.text.lower() for cell in facts.document.cells for word in _CARRYING_WORDS):
        return
    for save in saves(facts):
        path = literal(save.path)
        if not isinstance(path, str) or (path.startswith("/") and not path.startswith("/content")):
            continue
        message = (
            f"{path!r} is on the session's own disk: when Colab ends the session (idle, 12 h, a "
            "crash) the checkpoint is gone"
        )
        yield Finding(
            facts.span(save.path),
            "warning",
            message,
            "`from google.colab import drive; drive.mount('/content/drive')` and save below /content/drive/MyDrive",
        )
        return  # one is enough: the others are in the same place


UNPRUNED_CHECKPOINTS = Rule("BY703", "unpruned-checkpoints", "a checkpoint file per epoch, never removed")

_REMOVES = frozenset({"remove", "unlink", "rmtree", "rmdir", "CheckpointManager"})
_FEW = 10


def find_unpruned_checkpoints(facts: Facts, target: Target) -> Iterator[Finding]:
    """Saves in a loop whose path holds the loop's variable, and ModelCheckpoint paths with `{epoch}`."""
    if facts.calls.keys() & _REMOVES:
        return
    for save in saves(facts):
        found = _per_epoch(save, facts) if _is_model(save, facts) else None
        if found is not None:
            name, count = found
            yield _every_epoch(save.path, f"with `{name}` in its name", count, facts)
    for call in facts.called("keras.callbacks.ModelCheckpoint", "tensorflow.keras.callbacks.ModelCheckpoint"):
        path = call.argument(0, "filepath")
        rhythm = call.keyword("period") or call.keyword("save_freq")  # then it is not every epoch
        if path is not None and rhythm is None and "{epoch" in ast.unparse(path) and not _best_only(call):
            epochs = _fit_epochs(facts)
            if epochs is None or epochs >= _FEW:
                yield _every_epoch(path, "per epoch", epochs, facts)


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
            number = literal(modulo)
            if not isinstance(number, int) or number < 1:
                return None
            every *= number
        elif around.kind in ("for", "while", "except"):
            return None
    return None


def _best_only(call: Call) -> bool:
    value = call.keyword("save_best_only") or (call.node.args[3] if len(call.node.args) > 3 else None)
    return call.has_unknown_keywords or (value is not None and literal(value) is not False)


def _fit_epochs(facts: Facts) -> int | None:
    counts = [epochs_of(call, facts) for call in facts.calls.get("fit", ())]
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


def _every_epoch(path: ast.expr, rhythm: str, count: int | None, facts: Facts) -> Finding:
    total = f"{count} files of the model's size" if count else "the disk grows by one model each time"
    message = f"a new checkpoint file {rhythm} and none is removed: {total}"
    return Finding(
        facts.span(path),
        "warning",
        message,
        "keep the last two: save to a temporary name, rename it, and remove the one before",
    )


WEIGHTS_ONLY = Rule(
    "BY704", "weights-only-checkpoint", "a checkpoint without the optimizer's state cannot be resumed from"
)


def find_weights_only(facts: Facts, target: Target) -> Iterator[Finding]:
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
            facts.span(save.call.node),
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
    """Behind a test that is no rhythm (`% n`): such a file is the result, not a place to resume from."""
    tests = [
        around.node.test for around in block.up() if isinstance(around.node, ast.If) and around.kind == "if"
    ]
    tests = [test for test in tests if "__name__" not in ast.dump(test)]
    return any(not any(isinstance(node, ast.Mod) for node in ast.walk(test)) for test in tests)
