"""BY301, BY302, BY303, BY304, BY307, BY601: arrays, images, batches and files that do not fit in memory."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from buoy.lint.constants import Allocation, allocations, number
from buoy.lint.facts import Call, Facts, dotted_name
from buoy.lint.model import Edit, Finding, Fix, Rule, Severity, Span
from buoy.lint.rules.data import images_from_folder
from buoy.lint.rules.removed import strike
from buoy.lint.target import Target
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
            facts.document.span(item.call.node),
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
    return f"{start}; it cannot be allocated or filled{strike(facts, item.call.block, item.call.node.lineno)}"


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
    span = facts.document.span(item.call.node)
    module = facts.document.text(facts.document.span(item.call.node.func)).rpartition(".")[0]
    fix = None
    if module:
        edit = Edit(
            Span(span.end_line, span.end_column - 1, span.end_line, span.end_column - 1),
            f", dtype={module}.float32",
        )
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
        yield Finding(facts.document.span(call.node), "warning", message, hint)


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
        name = facts.document.text(facts.document.span(call.node.args[0]))
        outer = next((other for other in facts.calls.get("len", ()) if other.node.args == [call.node]), None)
        if outer is not None:
            fix = Fix(
                f"write `len({name})`", (Edit(facts.document.span(outer.node), f"len({name})"),), "safe"
            )
            message = f"`len(list({name}))` loads and keeps every batch of the data set only to count them"
            yield Finding(
                facts.document.span(outer.node), "warning", message, f"`len({name})` costs nothing", fix
            )
        else:
            message = f"`list({name})` loads every batch of the data set and keeps them all in memory"
            yield Finding(
                facts.document.span(call.node),
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
            path = call.node.args[0] if call.node.args else None
            if not isinstance(path, ast.Constant) or not isinstance(path.value, str) or _in_pieces(call):
                continue
            if path.value.endswith(".npz"):  # opened only; its arrays are read one by one
                continue
            size = _size(os.path.join(folder, path.value))
            limit = target.ram
            if size is None or limit is None or size < limit:
                continue
            message = (
                f"{path.value} has {format_bytes(size)}; read whole it takes at least "
                f"{format_share(size, limit)} of {target.words}"
            )
            yield Finding(facts.document.span(call.node), "error", message, _reading_hint(name))


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


def _reading_hint(name: str) -> str:
    return (
        "`np.load(path, mmap_mode='r')`"
        if name == "numpy.load"
        else "`chunksize=100_000`, or `usecols=` and `dtype=` for what you need"
    )


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
        yield Finding(facts.document.span(call.node), "warning", message, hint)
