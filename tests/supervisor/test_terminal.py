"""`buoy run` on a real terminal: Ctrl-C, Ctrl-Z and input belong to the script."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.processes import PATIENCE, main_pid, wait_until


class Screen:
    """A terminal with `buoy run` in its foreground."""

    def __init__(self, folder: Path, code: str) -> None:
        self.seen = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            command = [
                sys.executable,
                "-m",
                "buoy",
                "run",
                "--run",
                str(folder),
                "--",
                sys.executable,
                "-c",
                code,
            ]
            os.execv(sys.executable, command)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._terminal, 4096).decode()
                except OSError:
                    break
        assert text in self.seen

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_input_reaches_the_script(tmp_path: Path) -> None:
    screen = Screen(tmp_path / "run", "print('hello', input('name? '))")
    screen.expect("name? ")
    screen.type("ada\n")

    screen.expect("hello ada")
    assert screen.exit_code() == 0


def test_ctrl_c_is_one_keyboard_interrupt_of_the_script(tmp_path: Path) -> None:
    code = (
        "import time\nfor life in range(2):\n"
        "    try: print('working', life, flush=True); time.sleep(30)\n"
        "    except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    screen = Screen(tmp_path / "run", code)
    screen.expect("working 0")
    screen.type("\x03")
    screen.expect("working 1")
    time.sleep(0.5)
    once = screen.seen.count("interrupted")
    screen.type("\x03")

    assert screen.exit_code() == 0
    assert once == 1


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_ctrl_z_stops_both_and_both_go_on(tmp_path: Path) -> None:
    screen = Screen(
        tmp_path / "run", "import time; print('working', flush=True); time.sleep(3); print('finished')"
    )
    screen.expect("working")
    child = main_pid(tmp_path / "run")
    screen.type("\x1a")
    wait_until(lambda: stopped(child) and stopped(screen.pid), "both to stop")
    os.kill(screen.pid, signal.SIGCONT)

    screen.expect("finished")
    assert screen.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_buoy_ends_the_script_on_a_terminal_too(tmp_path: Path, number: signal.Signals) -> None:
    screen = Screen(tmp_path / "run", "import time; print('working', flush=True); time.sleep(30)")
    screen.expect("working")
    os.kill(screen.pid, number)

    assert screen.exit_code() == 128 + number
