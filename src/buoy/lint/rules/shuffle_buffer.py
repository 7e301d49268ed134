"""BY603: a shuffle buffer that counts batches: its bytes are the batch size times what was meant."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.fold import number
from buoy.lint.model import Finding, Rule
from buoy.lint.pipelines import images_from_folder
from buoy.lint.target import Target
from buoy.units import format_share

RULE = Rule(
    "BY603",
    "shuffle-buffer",
    "a shuffle buffer of batches of images is larger than the memory",
    default=False,
)


def find(facts: Facts, target: Target) -> Iterator[Finding]:
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
