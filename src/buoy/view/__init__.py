"""How results look: one renderer per format, over values that know nothing of it."""

from __future__ import annotations

import os
from typing import TextIO


def wants_colour(stream: TextIO) -> bool:
    """Whether its reader can and wants to see colours; the words alone always say everything."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "" if os.name == "posix" else "windows") not in (
        "",
        "dumb",
    )
