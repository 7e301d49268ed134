"""BY301 to BY307: arrays, images, batches and files that do not fit in memory. BY601 to BY605: `tf.data` pipelines that
cache, shuffle or copy too much, and epochs that never end."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass

from buoy.lint.constants import Allocation, allocations, number
from buoy.lint.facts import Block, Call, Facts, dotted_name, literal
from buoy.lint.model import Edit, Finding, Fix, Rule, Severity
from buoy.lint.rules.removed import strike
from buoy.lint.target import Target
from buoy.lint.training import is_keras_model
from buoy.units import format_bytes, format_share

ALLOCATION_OVER_MEMORY = Rule(
    "BY301", "allocation-over-memory", "an array of a stated shape takes too much of the memory"
)

_LARGE_SHARE = 0.25
_NEVER_ALARMING = 256 << 20


def find_allocation_over_memory(facts: Facts, target: Target) -> Iterator[Finding]:
    """Arrays of known size against the target's RAM (or, for torch with a device, its device memory)."""
    for item in allocations(facts):
        size = item.bytes(facts)
        if size is None or size < _NEVER_ALARMING:
            continue
        on_device = item.call.keyword("device") is not None
        limit = target.vram if on_device else target.ram
        if limit is None or size < _LARGE_SHARE * limit:
            continue
        severity: Severity = "error" if size >= limit else "warning"
        yield Finding(
            facts.span(item.call.node),
            severity,
            _message(item, size, limit, on_device, target, facts),
            _hint(item, size, limit),
        )


def _message(item: Allocation, size: int, limit: int, on_device: bool, target: Target, facts: Facts) -> str:
    shape = " x ".join(str(value) for value in item.known(facts))
    kind = "device memory" if on_device else "RAM"
    start = (
        f"{shape} elements of {item.itemsize} bytes: {format_share(size, limit)} {kind} of "
        f"{target.words.partition(' (')[0]}"
    )
    if size < limit:
        return start
    return f"{start}; it cannot be allocated or filled{strike(facts, item.call)}"


def _hint(item: Allocation, size: int, limit: int) -> str:
    if item.itemsize == 8 and size // 2 < _LARGE_SHARE * limit:
        return f"`dtype=np.float32` halves it to {format_bytes(size // 2)}"
    return "read the data in pieces (`np.memmap`, a DataLoader, `tf.data`) instead of holding all of it"


FLOAT64_IMAGES = Rule("BY302", "float64-image-buffer", "images are gathered in an array of 64-bit numbers")

_MAKERS = frozenset({"numpy.zeros", "numpy.ones", "numpy.empty"})
_CHANNELS = (1, 3, 4)
# More images than this are no longer a session's data set: the buffer is then no plausible cause of death.
_PLAUSIBLE_IMAGES = 100_000


def find_float64_images(facts: Facts, target: Target) -> Iterator[Finding]:
    """`np.zeros((len(paths), H, W, C))` without a dtype, where fewer than 100,000 images fill the RAM."""
    for item in allocations(facts):
        if (
            item.name not in _MAKERS
            or item.stated_dtype
            or len(item.dims) not in (3, 4)
            or not _counts_files(item, facts)
        ):
            continue
        per_image = item.itemsize
        known = item.known(facts)[1:]
        for value in known:
            per_image *= value or 0
        channels = known[2] if len(known) == 3 else 1
        if (
            not per_image
            or channels not in _CHANNELS
            or target.ram is None
            or target.ram // per_image > _PLAUSIBLE_IMAGES
        ):
            continue
        yield _finding(item, per_image, target.ram, target, facts)


def _counts_files(item: Allocation, facts: Facts) -> bool:
    """Whether the first dimension is a number of items that only the data knows."""
    first: ast.expr | None = item.dims[0]
    if isinstance(first, ast.Name):
        first = facts.single_value(first, item.call.block)
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Name) and first.func.id == "len":
        return "batch" not in ast.unparse(first).lower()
    if (
        isinstance(first, ast.Subscript)
        and isinstance(first.value, ast.Attribute)
        and first.value.attr == "shape"
    ):
        return "batch" not in ast.unparse(first).lower()
    return False


def _finding(item: Allocation, per_image: int, ram: int, target: Target, facts: Facts) -> Finding:
    message = (
        f"{format_bytes(per_image)} per item as float64: {ram // per_image:,} items fill the "
        f"RAM of {target.words}"
    )
    span = facts.span(item.call.node)
    module = facts.text(item.call.node.func).rpartition(".")[0]
    fix = None
    if module:
        edit = Edit(span.end(before=1), f", dtype={module}.float32")
        fix = Fix("add `dtype=np.float32`", (edit,), "unsafe")
    return Finding(
        span,
        "warning",
        message,
        "`dtype=np.float32` halves it"
        + ("; `np.uint8` with scaling in the model is an eighth" if len(item.dims) == 4 else ""),
        fix,
    )


IMAGES_IN_LIST = Rule(
    "BY303", "images-in-list", "images are read into a list and copied into an array", default=False
)

_READERS = frozenset({"imread", "load_img", "open"})


def find_images_in_list(facts: Facts, target: Target) -> Iterator[Finding]:
    """`append` of a resized image in a loop over files, where the list later becomes an array."""
    for call in facts.calls.get("append", ()):
        name = dotted_name(call.receiver) if call.receiver is not None else None
        if (
            name is None
            or len(call.node.args) != 1
            or not call.block.loops()
            or not _becomes_array(name, facts)
        ):
            continue
        size = _image_bytes(call, facts)
        if size is None or target.ram is None or target.ram // (2 * size) > _PLAUSIBLE_IMAGES:
            continue
        message = (
            f"{format_bytes(size)} per image, and twice that while the list is copied into an array: "
            f"{target.ram // (2 * size):,} images fill {target.words}"
        )
        hint = "fill an array made beforehand (`np.empty((n, h, w, 3), np.uint8)`), or read batches with a DataLoader"
        yield Finding(facts.span(call.node), "warning", message, hint)


def _becomes_array(name: str, facts: Facts) -> bool:
    calls = facts.called("numpy.array", "numpy.asarray", "numpy.stack")
    return any(call.node.args and dotted_name(call.node.args[0]) == name for call in calls)


def _image_bytes(call: Call, facts: Facts) -> int | None:
    """Height x width x 3 x bytes per number, from the resize that the appended value went through."""
    work: list[tuple[ast.expr, int]] = [(call.node.args[0], 4)]
    pixels, reads, itemsize = None, False, 1
    while work:
        node, depth = work.pop()
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                tail = (dotted_name(part.func) or "?").rpartition(".")[2]
                reads = reads or tail in _READERS
                pixels = pixels or _stated_size(part, tail, call, facts)
                itemsize = 4 if tail == "img_to_array" else itemsize
            elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) and itemsize == 1:
                itemsize = 8  # NumPy divides bytes into 64-bit numbers
            elif isinstance(part, ast.Name) and depth:
                values = [binding for binding in facts.bindings(part, call.block) if binding.block.loops()]
                work += [(binding.value, depth - 1) for binding in values if binding.value is not None]
    return pixels * 3 * itemsize if pixels and reads else None


def _stated_size(node: ast.Call, tail: str, call: Call, facts: Facts) -> int | None:
    shapes = [keyword.value for keyword in node.keywords if keyword.arg in ("target_size", "dsize", "size")]
    if tail == "resize":
        shapes += node.args
    for shape in shapes:
        if isinstance(shape, ast.Tuple) and len(shape.elts) == 2:
            sides = [number(side, facts, call.block) for side in shape.elts]
            if all(sides):
                return int(sides[0] or 0) * int(sides[1] or 0)
    return None


LOADER_TO_LIST = Rule(
    "BY304", "loader-to-list", "a loader is turned into a list: all batches in memory at once"
)

_LOADERS = frozenset(
    {
        "torch.utils.data.DataLoader",
        "torch.utils.data.dataloader.DataLoader",
        "torch_geometric.loader.DataLoader",
    }
)


def find_loader_to_list(facts: Facts, target: Target) -> Iterator[Finding]:
    """`list(x)` where x was made by DataLoader."""
    for call in facts.calls.get("list", ()):
        if (
            call.dotted != "list"
            or len(call.node.args) != 1
            or not _is_loader(call.node.args[0], call, facts)
        ):
            continue
        name = facts.text(call.node.args[0])
        outer = next((other for other in facts.calls.get("len", ()) if other.node.args == [call.node]), None)
        if outer is not None:
            fix = Fix(f"write `len({name})`", (Edit(facts.span(outer.node), f"len({name})"),), "safe")
            message = f"`len(list({name}))` loads and keeps every batch of the data set only to count them"
            yield Finding(facts.span(outer.node), "warning", message, f"`len({name})` costs nothing", fix)
        else:
            message = f"`list({name})` loads every batch of the data set and keeps them all in memory"
            yield Finding(
                facts.span(call.node),
                "warning",
                message,
                "loop over the loader, or take what you need with `itertools.islice`",
            )


def _is_loader(node: ast.expr, call: Call, facts: Facts) -> bool:
    values = facts.values(node, call.block)
    if values and all(
        isinstance(value, ast.Call) and facts.qualified(value.func) in _LOADERS for value in values
    ):
        return True
    # A function's argument: its name is all there is to go by.
    bindings = facts.bindings(node, call.block)
    argument = len(bindings) == 1 and bindings[0].how == "argument"
    return (
        argument
        and "torch" in facts.packages
        and isinstance(node, ast.Name)
        and node.id.lower().endswith(("dataloader", "_loader", "_dl"))
    )


FILE_OVER_MEMORY = Rule("BY307", "file-over-memory", "a data file is read whole and does not fit into memory")

# Each takes at least the size of its file. Measured peaks of read_csv (pandas 3.1): 1.9 for long floats,
# 4.7 for text, 9 for
# one-digit integers, .npy is read one to one. `np.loadtxt` was not measured and is left out.
_FILE_READERS = ("pandas.read_csv", "pandas.read_table", "numpy.load")


def find_file_over_memory(facts: Facts, target: Target) -> Iterator[Finding]:
    """Reading calls whose file exists beside the code, with its size; no file, no finding."""
    if facts.document.path == "-":
        return
    folder = os.path.dirname(os.path.abspath(facts.document.path))
    for name in _FILE_READERS:
        for call in facts.called(name):
            path = literal(call.node.args[0]) if call.node.args else None
            # An .npz is opened only; its arrays are read one by one.
            if not isinstance(path, str) or path.endswith(".npz") or _in_pieces(call):
                continue
            size = _size(os.path.join(folder, path))
            limit = target.ram
            if size is None or limit is None or size < limit:
                continue
            message = (
                f"{path} has {format_bytes(size)}; read whole it takes at least "
                f"{format_share(size, limit)} of {target.words}"
            )
            hint = "`chunksize=100_000`, or `usecols=` and `dtype=` for what you need"
            if name == "numpy.load":
                hint = "`np.load(path, mmap_mode='r')`"
            yield Finding(facts.span(call.node), "error", message, hint)


def _in_pieces(call: Call) -> bool:
    return any(
        call.keyword(word) is not None
        for word in ("chunksize", "nrows", "iterator", "mmap_mode", "usecols", "max_rows")
    )


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size if os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


IMAGE_CACHE = Rule("BY601", "image-cache", "decoded images are cached in RAM", default=False)


def find_image_cache(facts: Facts, target: Target) -> Iterator[Finding]:
    """Caches at the end of a pipeline that starts with `image_dataset_from_directory`."""
    for call in facts.calls.get("cache", ()):
        if call.receiver is None or call.node.args or call.node.keywords:
            continue
        images = images_from_folder(call, facts)
        if images is None or target.ram is None or target.ram // images.per_image > _PLAUSIBLE_IMAGES:
            continue
        count = target.ram // images.per_image
        message = (
            f"the cache keeps every image as float32, {format_bytes(images.per_image)} each: "
            f"{count:,} fill {target.words}"
        )
        hint = "leave `cache()` out for larger data sets: reading the files again costs time, not the session"
        yield Finding(facts.span(call.node), "warning", message, hint)


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
_RANDOM = ("tensorflow.image.random", "tensorflow.random.")


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
        yield Finding(facts.span(call.node), "warning", messages[method], f"put `cache()` before `{method}`")


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
        keyword.arg == "reshuffle_each_iteration" and literal(keyword.value) is False
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
        yield Finding(facts.span(call.node), "warning", message, hint)


SLICES_COPY = Rule("BY604", "slices-copy", "from_tensor_slices copies an array that is large already")


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
            facts.span(call.node),
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
            yield Finding(facts.span(source), "error", message, f"give `{steps}=` (items // batch size)")


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
        if isinstance(statement, ast.While) and literal(statement.test):
            inside = list(ast.walk(statement))
            ways_out = any(isinstance(node, ast.Break | ast.Return | ast.Raise) for node in inside)
            return not ways_out and any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside)
    return False
