"""`buoy top` on a real terminal, and where there only seems to be one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from buoy.cli.top import _frame
from buoy.flight.attempt import find_attempt
from buoy.flight.log import FIELDS, SampleLog
from buoy.view.history import read_life
from buoy.view.top import _row, state
from buoy.view.top import lines as top_lines
from tests.processes import PATIENCE, buoy
from tests.view.folders import add_events, make_attempt

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def watch(run: Path, until: str | None, **environment: str) -> tuple[str, int]:
    """Run `buoy top` on a terminal of 80 x 24: all it wrote, and its status.

    Ctrl-C is pressed once it has shown `until`; None waits for it to end by itself.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        clean = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "JPY_PARENT_PID")
        }
        command = [sys.executable, "-m", "buoy", "top", str(run)]
        os.execve(sys.executable, command, {**clean, "TERM": "xterm-256color", **environment})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    written, asked = b"", False
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            written += os.read(terminal, 65536)
        except OSError:  # it has ended
            break
        if until is not None and until in written.decode("utf-8", "replace") and not asked:
            asked = True
            os.kill(pid, signal.SIGINT)
    os.close(terminal)
    return written.decode("utf-8", "replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_attempt(tmp_path / ("cats " * 12), 120.0)
    add_events(
        folder, *({"kind": "retry", "what": "oom", "samples": n, "smaller": n - 1} for n in range(40, 9, -1))
    )
    return tmp_path / ("cats " * 12)


def test_on_a_terminal_it_redraws_one_screen_and_leaves_it_as_it_was(run: Path) -> None:
    written, status = watch(run, "Ctrl-C ends this view")

    assert status == 0
    assert written.count("\x1b[?1049h") == written.count("\x1b[?1049l") == 1  # the other screen, and back
    assert "\x1b[31m" in written  # the bar of a full memory is red
    assert f"`buoy why '{str(run)[:20]}" in written  # the run that was asked for, as it can be pasted
    assert "goes on" not in written  # it has ended


def test_in_a_notebooks_shell_it_writes_lines_and_ends_with_the_run(run: Path) -> None:
    written, status = watch(run, None, JPY_PARENT_PID="1")

    assert status == 0
    assert written.count("kernel-oom") == 1
    assert not ESCAPES.search(written)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (50, 12), (40, 12), (20, 5)])
def test_every_screen_holds_what_matters_without_wrapping(run: Path, columns: int, rows: int) -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=columns, height=rows, file=open(os.devnull, "w"))  # noqa: SIM115
    frame = _frame(state(find_attempt(str(run))), columns, rows)

    shown = [str(line) for line in frame.wrap(console, columns)]

    assert all(len(line) <= columns for line in shown)
    assert [line[:5] for line in shown[3:7]] == ["  RAM", " VRAM", " disk", " time"]
    if columns >= 40:
        assert all("%" in line for line in shown[3:7])
    if rows >= 24:
        assert len(shown) <= rows
        assert "retried in micro-batches of 9" in "\n".join(shown)  # the newest event


@pytest.mark.parametrize("columns", [40, 30])
def test_on_a_narrow_screen_with_rows_to_spare_lines_are_folded_not_cut(run: Path, columns: int) -> None:
    now = {**state(find_attempt(str(run))), "name": "cats", "run": "cats", "events": [], "status": "running"}
    now.update(step=294, last_step=1000, step_seconds=0.1)
    frame = _frame(now, columns, 30)
    shown = " ".join(frame.plain.split())

    assert max(map(len, frame.plain.split("\n"))) <= columns
    assert "to go" in shown and shown.endswith("Ctrl-C ends this view; training continues")


def test_names_with_control_characters_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    name = "cats\x1b]0;owned\x07\nbuoy: all is well"
    make_attempt(tmp_path / "runs" / name, 60.0)
    told = [buoy("top", "--once", cwd=tmp_path), buoy("report", cwd=tmp_path)]

    shown = "".join(each.stdout + each.stderr for each in told)
    assert "owned" in shown and "\x1b" not in shown and "\nbuoy: all is well" not in shown


def test_of_a_run_that_died_the_peak_is_shown_and_not_what_was_left_after_it(tmp_path: Path) -> None:
    """The child of a shell fills the memory and is killed; the shell lives long enough for one more reading."""
    folder = make_attempt(tmp_path / "cats", 120.0, limit=12 << 30)
    lines = (folder / "samples-0001.jsonl").read_text().splitlines()
    used = FIELDS.index("cgroup_used")
    rows = [json.loads(line) for line in lines[1:]]
    log = SampleLog(str(folder))
    for n in range(30):
        after = [*rows[-1]]
        after[0], after[1], after[used] = (
            after[0] + 0.1 * (n + 1),
            after[1] + 0.1 * (n + 1),
            int(0.45 * (12 << 30)),
        )
        log.add(after)
    log.flush()
    now = state(find_attempt(str(tmp_path / "cats")))

    assert now["resources"][0]["used"] == pytest.approx(12 << 30, rel=0.01)
    assert re.search(r"RAM .* 100 %  at its peak", "\n".join(top_lines(now)))


def test_the_peak_of_one_sample_is_known_from_the_minutes(tmp_path: Path) -> None:
    """A live view reads only some of the samples at full rate; the one between them was the highest."""
    folder = make_attempt(tmp_path / "cats", 60.0, dies_of=None)
    last = json.loads((folder / "samples-0001.jsonl").read_text().splitlines()[-1])
    log = SampleLog(str(folder))
    for n in range(1, 1500):
        used = (11 << 30) + 7 if n == 501 else 1 << 30
        later = [last[0] + 0.1 * n, last[1] + 0.1 * n, *last[2:]]
        later[FIELDS.index("cgroup_used")] = used
        log.add(later)
    log.flush()

    for every in (1, 8, 400):
        assert read_life(find_attempt(str(tmp_path / "cats")), every).peaks["memory"] == (11 << 30) + 7


def test_a_negative_reading_draws_an_empty_bar() -> None:
    assert "[..........]" in _row("RAM", -1e15, 1.0, str, "", 10)
