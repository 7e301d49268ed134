"""Every kind of data and model, killed and resumed: `python -m tests.keras [KIND ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.keras.trial import KILLS, MORE_KILLS, differences, nursery


def main() -> int:
    failed = 0
    with nursery() as live:
        for kind, kills in [*KILLS.items(), *MORE_KILLS.items()]:
            if sys.argv[1:] and kind not in sys.argv[1:]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                words = differences(live, Path(folder), kind, kills)
            failed += bool(words)
            print(f"{kind}, killed after {kills}: {words or 'equal'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
