"""What `import buoy` and the command line cost over bare Python, interleaved.

Asked: `import buoy` at most 30 ms over bare Python, `buoy --help` at most 100 ms.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

from bench.measure import interval, table

BUOY = os.path.join(os.path.dirname(sys.executable), "buoy")
CASES = {
    "bare python": [sys.executable, "-c", "pass"],
    "import buoy": [sys.executable, "-c", "import buoy"],
    "buoy --help": [BUOY, "--help"],
    "buoy why --help": [BUOY, "why", "--help"],
    "buoy run --help": [BUOY, "run", "--help"],
}
ROUNDS = 40


def main() -> dict[str, object]:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name in random.sample(list(CASES), len(CASES)):
            start = time.perf_counter()
            subprocess.run(CASES[name], stdout=subprocess.DEVNULL, check=True)
            times[name].append(1000 * (time.perf_counter() - start))
    bare = times["bare python"]
    rows: list[dict[str, object]] = []
    for name, values in times.items():
        median, low, high = interval(values)
        over, over_low, over_high = interval([value - base for value, base in zip(values, bare, strict=True)])
        rows.append({"case": name, "ms": median, "ms_low": low, "ms_high": high,
                     "over_bare_ms": over, "over_bare_low": over_low, "over_bare_high": over_high})  # fmt: skip
    print(table(["case", "ms [95 %]", "over bare python, ms [95 %]"], [
        (row["case"], f"{row['ms']:.1f} [{row['ms_low']:.1f}, {row['ms_high']:.1f}]",
         f"{row['over_bare_ms']:.1f} [{row['over_bare_low']:.1f}, {row['over_bare_high']:.1f}]") for row in rows
    ]))  # fmt: skip
    by_name = {row["case"]: row for row in rows}
    met = by_name["import buoy"]["over_bare_ms"] <= 30 and by_name["buoy --help"]["ms"] <= 100  # type: ignore[operator]
    print(f"asked: import <= 30 ms over bare, help <= 100 ms: {'met' if met else 'NOT met'}")
    return {"rows": rows, "met": met}
