"""BY602, BY603, BY604, BY605: tf.data pipelines that cache, shuffle or copy too much, and epochs that never end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from buoy.lint.constants import allocations, number
from buoy.lint.facts import Block, Call, Facts
from buoy.lint.frameworks import is_keras_model
from buoy.lint.model import Finding, Rule, Severity
from buoy.lint.target import Target
from buoy.units import format_bytes, format_share

_LONGEST = 40
_FROM_FOLDER = frozenset(
    {
        "keras.utils.image_dataset_from_directory",
        "keras.preprocessing.image_dataset_from_directory",
        "tensorflow.keras.utils.image_dataset_from_directory",
        "tensorflow.keras.preprocessing.image_dataset_from_directory",
    }
)


@dataclass(frozen=True, slots=True)
class Images:
    """What `image_dataset_from_directory` will yield: float32 pixels, in batches."""

    per_image: int
    batch: int | None


def chain(call: Call, facts: Facts) -> Iterator[ast.Call]:
    """The calls that made what `call` is called on, nearest first."""
    node: ast.expr | None = call.receiver
    line = call.node.lineno
    for _ in range(_LONGEST):
        if isinstance(node, ast.Call):
            yield node
            node = node.func.value if isinstance(node.func, ast.Attribute) else None
        elif isinstance(node, ast.Name):
            earlier = [
                binding
                for binding in facts.bindings(node, call.block)
                if binding.block is call.block
                and getattr(binding.node, "lineno", 0) <= line
                and binding.value is not None
                and call.node not in ast.walk(binding.value)
            ]
            if not earlier:
                return
            node, line = earlier[-1].value, getattr(earlier[-1].node, "lineno", 0) - 1
        else:
            return


def images_from_folder(call: Call, facts: Facts) -> Images | None:
    """The images at the source of a pipeline, when they come from a folder with a stated size."""
    for earlier in chain(call, facts):
        if facts.qualified(earlier.func) not in _FROM_FOLDER:
            continue
        words = {keyword.arg: keyword.value for keyword in earlier.keywords}
        size = words.get("image_size")
        parts = size.elts if isinstance(size, ast.Tuple | ast.List) else []
        sides = [number(part, facts, call.block) for part in parts] if size is not None else [256, 256]
        if len(sides) != 2 or not all(sides):
            return None
        channels = words.get("color_mode")
        depth = {"grayscale": 1, "rgba": 4}.get(str(getattr(channels, "value", "rgb")), 3)
        batch = number(words["batch_size"], facts, call.block) if "batch_size" in words else 32
        return Images(int(sides[0] or 0) * int(sides[1] or 0) * depth * 4, int(batch) if batch else None)
    return None


CACHE_ORDER = Rule(
    "BY602", "cache-after-shuffle", "a tf.data pipeline caches what should change in every epoch"
)

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


def find_cache_order(facts: Facts, target: Target) -> Iterator[Finding]:
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


SHUFFLE_BUFFER = Rule(
    "BY603",
    "shuffle-buffer",
    "a shuffle buffer of batches of images is larger than the memory",
    default=False,
)


def find_shuffle_buffer(facts: Facts, target: Target) -> Iterator[Finding]:
    """`shuffle(n)` behind `image_dataset_from_directory`, which already yields batches."""
    for call in facts.calls.get("shuffle", ()):
        buffer = (
            number(call.argument(0, "buffer_size"), facts, call.block) if call.receiver is not None else None
        )
        images = images_from_folder(call, facts) if buffer else None
        if not buffer or images is None or images.batch is None or target.ram is None:
            continue
        size = int(buffer) * images.batch * images.per_image
        if size < target.ram:
            continue
        message = (
            f"the buffer holds {int(buffer):,} batches of {images.batch} images, or the whole "
            "data set if that is less: "
            f"up to {format_share(size, target.ram)} of {target.words}"
        )
        hint = "`image_dataset_from_directory` shuffles file names already: leave `shuffle` out, or make it small"
        yield Finding(facts.document.span(call.node), "warning", message, hint)


SLICES_COPY = Rule("BY604", "slices-copy", "from_tensor_slices copies an array that is large already")

_LARGE_SHARE = 0.25


def find_slices_copy(facts: Facts, target: Target) -> Iterator[Finding]:
    """Arrays of known size given to `from_tensor_slices`; the peak is three times the array (measured)."""
    calls = facts.calls.get("from_tensor_slices", ())
    if not calls:
        return
    sizes = {item.call.node: item.bytes(facts) for item in allocations(facts)}
    for call in calls:
        size = sum(sizes.get(value) or 0 for value in _arrays(call, facts))
        limit = target.ram
        if not size or limit is None or size * 3 < _LARGE_SHARE * limit:
            continue
        severity: Severity = "error" if size * 3 >= limit else "warning"
        message = (
            f"the array has {format_bytes(size)}, and TensorFlow copies it: "
            f"{format_share(size * 3, limit)} at the peak on {target.words}"
        )
        yield Finding(
            facts.document.span(call.node),
            severity,
            message,
            "`tf.data.Dataset.from_generator`, or files read by the pipeline, hold one batch",
        )


def _arrays(call: Call, facts: Facts) -> list[ast.Call]:
    argument = call.node.args[0] if call.node.args else None
    items = argument.elts if isinstance(argument, ast.Tuple) else [argument]
    values = [facts.single_value(item, call.block) if isinstance(item, ast.Name) else item for item in items]
    return [value for value in values if isinstance(value, ast.Call)]


ENDLESS_EPOCH = Rule("BY605", "endless-epoch", "an endless generator is fitted without steps_per_epoch")

_PAIRS = ((0, "x", "steps_per_epoch"), (99, "validation_data", "validation_steps"))


def find_endless_epoch(facts: Facts, target: Target) -> Iterator[Finding]:
    """`fit(generator())` where the generator is `while True: yield` in this file."""
    for call in facts.calls.get("fit", ()):
        if not is_keras_model(call.receiver, call.block, facts) or call.has_unknown_keywords:
            continue
        for position, name, steps in _PAIRS:
            source = call.argument(position, name)
            if source is None or call.keyword(steps) is not None:
                continue
            function = _generator(source, call, facts)
            if function is None:
                continue
            what = "the first epoch" if position == 0 else "the validation after the first epoch"
            message = (
                f"`{function.scope.name}` yields for ever and `{steps}` is not given: "
                f"{what} never ends, and nothing is saved"
            )
            yield Finding(
                facts.document.span(source), "error", message, f"give `{steps}=` (items // batch size)"
            )


def _generator(node: ast.expr, call: Call, facts: Facts) -> Block | None:
    if isinstance(node, ast.Name):
        value = facts.single_value(node, call.block)
        node = value if value is not None else node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    found = facts.functions.get(node.func.id, [])
    return found[0] if len(found) == 1 and _endless(found[0].node) else None


def _endless(function: ast.AST | None) -> bool:
    """`while True:` with a yield and no way out."""
    if not isinstance(function, ast.FunctionDef):
        return False
    for statement in function.body:
        if (
            isinstance(statement, ast.While)
            and isinstance(statement.test, ast.Constant)
            and statement.test.value
        ):
            inside = list(ast.walk(statement))
            ways_out = any(isinstance(node, ast.Break | ast.Return | ast.Raise) for node in inside)
            return not ways_out and any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside)
    return False
