"""Which notebook cell runs now."""

from __future__ import annotations

import sys
from typing import Any


def running() -> int | None:
    """The number of the notebook's cell that runs; None in a script."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if shell is None else len(shell.user_ns.get("In") or ())
