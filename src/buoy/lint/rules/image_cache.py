"""BY601: `cache()` without a file name on images of a stated size: every image stays in RAM as float32."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.model import Finding, Rule
from buoy.lint.pipelines import images_from_folder
from buoy.lint.target import Target
from buoy.units import format_bytes

RULE = Rule("BY601", "image-cache", "decoded images are cached in RAM", default=False)

_PLAUSIBLE_IMAGES = 100_000


def find(facts: Facts, target: Target) -> Iterator[Finding]:
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
