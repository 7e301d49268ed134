"""Looking at a run: the page of twelve hours, `buoy top --once`, and the card in a restarted kernel's first cell."""

from __future__ import annotations

import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.view.folders import make_attempt

ROUNDS = 7
SECONDS, MEGABYTES, PAGE_KB, TOP_SECONDS, CARD_SECONDS = 2.0, 150, 300, 0.250, 1.0


def main() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "cats"
        make_attempt(run, 4 * 3600.0)
        make_attempt(run, 8 * 3600.0, first_step=50_000)
        page = Path(folder) / "report.html"
        reports, megabytes = zip(
            *(_run(["report", str(run), "-o", str(page)]) for _ in range(ROUNDS)), strict=True
        )
        tops, _ = zip(*(_run(["top", str(run), "--once"]) for _ in range(ROUNDS)), strict=True)
        size = page.stat().st_size / 1000
        card = _card(Path(folder))
    result = {
        "report_seconds": statistics.median(reports), "report_megabytes": max(megabytes), "page_kilobytes": size,
        "top_seconds": statistics.median(tops), "card_seconds": card,
    }  # fmt: skip
    result["met"] = (
        result["report_seconds"] <= SECONDS and result["report_megabytes"] <= MEGABYTES and size <= PAGE_KB
        and result["top_seconds"] <= TOP_SECONDS and card is not None and card <= CARD_SECONDS
    )  # fmt: skip
    print(f"report of 12 h      {result['report_seconds']:.2f} s (asked {SECONDS:.0f}), "
          f"{result['report_megabytes']:.0f} MB (asked {MEGABYTES})")  # fmt: skip
    print(f"page                {size:.0f} KB (asked {PAGE_KB})")
    print(f"top --once          {1000 * result['top_seconds']:.0f} ms (asked {1000 * TOP_SECONDS:.0f})")
    print(f"card in a new kernel {card:.2f} s after its first cell began (asked {CARD_SECONDS:.0f})"
          if card is not None else "card in a new kernel: NOT measured, jupyter_client is not installed")  # fmt: skip
    print(f"asked: {'met' if result['met'] else 'NOT met'}")
    return result


def _run(arguments: list[str]) -> tuple[float, float]:
    """Seconds, and the most memory the process held in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "buoy", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, arguments
    assert isinstance(usage, resource.struct_rusage)
    return time.perf_counter() - start, usage.ru_maxrss / 1000


def _card(folder: Path) -> float | None:
    """From the moment the cell is sent to its end, its HTML there, in a kernel whose predecessor was killed."""
    try:
        from tests.notebook.kernels import Kernel, html
    except BaseException:  # noqa: BLE001 - pytest's skip is no Exception
        return None
    taken = []
    for number in range(3):
        cwd = folder / f"notebook-{number}"
        cwd.mkdir()
        first = Kernel(cwd, IPYTHONDIR=str(cwd / "ipython"))
        first.run("%load_ext buoy")
        os.kill(first.pid, signal.SIGKILL)
        verdict = cwd / "runs/notebook/attempts/0001/verdict.json"
        while not verdict.exists():
            time.sleep(0.05)
        first.end()
        second = Kernel(cwd, IPYTHONDIR=str(cwd / "ipython"))
        start = time.perf_counter()
        shown = second.run("%load_ext buoy")
        taken.append(time.perf_counter() - start)
        assert "buoy-card" in html(shown)
        second.end()
    return statistics.median(taken)
