"""The bad and mended examples of docs/rules, run for real: `python -m tests.lint.pairs [BY401 ...]`.

A page says what its pair shows in a comment, `<!-- pair: KIND ... -->`:

    fails NAME      the bad one ends with this exception, the mended one with 0
    prints TEXT     the bad one prints this, the mended one does not
    memory N        the bad one's peak is at least N MiB above the mended one's
    endless N       the bad one still runs after N seconds, the mended one has ended
    disk N          the bad one leaves at least N times as many bytes in its folder
    survives        the session's folder is removed: nothing of the bad one is left, something of the mended one is
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

RULES = Path(__file__).resolve().parents[2] / "docs" / "rules"
_COMMENT = re.compile(r"<!-- (\w+): (.*?) -->")
_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LONGEST = 240.0
# Stands in for the module that exists on Colab only: what is mounted outlives the session's own folder.
_COLAB = """
import os
def mount(path):
    os.makedirs(os.environ["PAIR_DRIVE"] + "/MyDrive", exist_ok=True)
    os.symlink(os.environ["PAIR_DRIVE"], path)
"""


@dataclass(frozen=True)
class Pair:
    """A page's examples and what they claim."""

    code: str
    kind: str
    value: str
    bad: str
    mended: str
    setup: str | None
    notes: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What running one example showed."""

    status: int | None
    stdout: str
    stderr: str
    peak: int
    left: int
    carried: int


def pairs() -> list[Pair]:
    """Every page that has a pair, by code."""
    found = []
    for path in sorted(RULES.glob("BY*.md")):
        text = path.read_text("utf-8")
        notes = dict(_COMMENT.findall(text))
        if "pair" not in notes:
            continue
        kind, _, value = notes["pair"].partition(" ")
        setup = _fence(text.partition("## Bad")[0])
        bad, mended = _fence(text.partition("## Bad")[2]), _fence(text.partition("## Fixed")[2])
        assert bad and mended, f"{path.name} has no two examples"
        found.append(Pair(path.stem, kind, value, bad, mended, setup, notes))
    return found


def _fence(text: str) -> str | None:
    match = _FENCE.search(text)
    return match.group(1) if match else None


def run_example(source: str, setup: str | None, limit: float) -> Outcome:
    """Run a program in a folder of its own; status None when it was still running at the limit."""
    with tempfile.TemporaryDirectory() as top:
        folder, drive, colab = (Path(top) / name for name in ("session", "drive", "modules/google/colab"))
        folder.mkdir()
        colab.mkdir(parents=True)
        (colab / "__init__.py").write_text("from google.colab import drive\n")
        (colab / "drive.py").write_text(_COLAB)
        (folder / "main.py").write_text(source)
        environment = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "PAIR_DRIVE": str(drive),
        }
        environment["PYTHONPATH"] = str(colab.parents[1])
        if setup:
            subprocess.run(
                [sys.executable, "-c", setup], cwd=folder, env=environment, check=True, timeout=_LONGEST
            )
        measured = Path(top) / "measured"
        # A parent of its own, so that the peak is this child's alone.
        wrapper = (
            "import resource, subprocess, sys\n"
            "done = subprocess.run([sys.executable, 'main.py'])\n"
            "open(sys.argv[1], 'w').write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))\n"
            "sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)\n"
        )
        before = _bytes(folder)
        process = subprocess.Popen(
            [sys.executable, "-c", wrapper, str(measured)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        status: int | None
        try:
            out, err = process.communicate(timeout=limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
            status = None
        peak = int(measured.read_text()) * 1024 if measured.exists() else 0
        left = _bytes(folder) - before
        shutil.rmtree(folder)
        carried = _bytes(drive) if drive.exists() else 0
        return Outcome(status, out, err, peak, left, carried)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def judge(pair: Pair) -> str | None:
    """None when the pair shows its claim, else what was seen instead."""
    try:
        return _judge(pair)
    except subprocess.CalledProcessError as error:
        return f"what it needs beside it could not be made: {error}"


def _judge(pair: Pair) -> str | None:
    limit = float(pair.value) if pair.kind == "endless" else _LONGEST
    bad = run_example(pair.bad, pair.setup, limit)
    mended = run_example(pair.mended, pair.setup, limit)
    if mended.status != 0:
        return f"the mended example ended with {mended.status}: {mended.stderr[-300:]}"
    seen = {
        "fails": bad.status not in (0, None) and pair.value in _last_line(bad.stderr),
        "prints": bad.status == 0 and pair.value in bad.stdout and pair.value not in mended.stdout,
        "memory": bad.status == 0 and bad.peak - mended.peak >= float(pair.value or 0) * 2**20
        if pair.kind == "memory"
        else False,
        "endless": bad.status is None,
        "disk": bad.status == 0 and bad.left >= float(pair.value or 0) * mended.left > 0
        if pair.kind == "disk"
        else False,
        "survives": bad.status == 0 and bad.carried == 0 and mended.carried > 0,
    }
    if pair.kind not in seen:
        return f"unknown kind {pair.kind!r}"
    if seen[pair.kind]:
        return None
    return (
        f"bad: status {bad.status}, peak {bad.peak >> 20} MiB, left {bad.left}, "
        f"{_last_line(bad.stderr)!r} {bad.stdout[-80:]!r}; "
        f"mended: peak {mended.peak >> 20} MiB, left {mended.left}, {mended.stdout[-80:]!r}"
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if re.match(r"^[\w.]*(Error|Exception)\b", line)),
        lines[-1] if lines else "",
    )


def main(codes: list[str]) -> int:
    """Run the pairs and print a line each."""
    wrong = 0
    for pair in pairs():
        if codes and pair.code not in codes:
            continue
        start = time.monotonic()
        problem = judge(pair)
        wrong += problem is not None
        claim = f"{pair.kind} {pair.value}".strip()
        print(
            f"{pair.code}  {'ok   ' if problem is None else 'WRONG'} {claim:24} "
            f"{time.monotonic() - start:5.1f} s  {problem or ''}",
            flush=True,
        )
    print("every pair shows its claim" if not wrong else f"{wrong} pairs do not show their claim")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
