"""Starting the command as our child: held at a gate until the recorder is ready, in a process group of its own."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import sys

from buoy.errors import ExitCode, LaunchError
from buoy.flight.recorder import ATTEMPT_VARIABLE, JOINED_VARIABLE

_BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Child:
    """A command that was forked and waits; `release` lets it begin."""

    def __init__(self, command: list[str], attempt_folder: str, handled: set[signal.Signals]) -> None:
        self._command = command
        environment = child_environment(attempt_folder)
        gate_read, self._gate = os.pipe()
        self._failure, failure_write = os.pipe()  # both ends close on exec: end of file means it runs
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                os.close(self._gate)
                os.read(gate_read, 1)
                for number in _IGNORED_BY_PYTHON:  # our interpreter ignores these; an exec would hand that on
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                os.write(failure_write, b"%d" % (error.errno or 0))
            finally:
                os._exit(ExitCode.RUN_FAILED)
        os.close(gate_read)
        os.close(failure_write)
        self._take_own_group()

    def _take_own_group(self) -> None:
        try:
            os.setpgid(self.pid, self.pid)  # also here: whichever of us comes first
        except OSError:
            pass

    def release(self) -> None:
        """Let the command begin; an error if it cannot be executed."""
        os.write(self._gate, b"1")
        os.close(self._gate)
        answer = os.read(self._failure, 16)
        os.close(self._failure)
        if answer:
            raise launch_error(self._command[0], int(answer))


def child_environment(attempt_folder: str) -> dict[str, str]:
    """The child's environment: ours, the attempt's folder, and the bootstrap folder first on PYTHONPATH."""
    environment = dict(os.environ)
    environment[ATTEMPT_VARIABLE] = attempt_folder
    environment.pop(JOINED_VARIABLE, None)
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([_BOOTSTRAP, others] if others else [_BOOTSTRAP])
    return environment


def startable(command: list[str]) -> list[str]:
    """The command as it can be executed: a script gets this Python. An error, before anything is written, if it
    cannot be started.
    """
    name = command[0]
    if name == "-m":
        return [sys.executable, *command]
    if name.endswith(".py") and os.path.isfile(name) and not _is_program(name):
        return [sys.executable, *command]
    if shutil.which(name) is None:
        if name in (
            "python",
            "python3",
        ):  # many systems have only one of the two names, and buoy has a Python
            return startable([sys.executable, *command[1:]])
        there = os.path.isdir(name) or shutil.which(name, mode=os.F_OK) is not None
        raise launch_error(name, errno.EACCES if there else errno.ENOENT)
    script = _script_of(command)
    if script is not None and not os.path.exists(script):
        raise _no_script(script)
    return command


def _is_program(path: str) -> bool:
    """Whether a shell, too, would start this script by its own first line (`./train.py`)."""
    if not os.path.dirname(path) or not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def _script_of(command: list[str]) -> str | None:
    """The script that a Python is given.

    >>> _script_of(["python3", "-u", "-X", "dev", "train.py", "--lr", "1"])
    'train.py'
    >>> _script_of(["python", "-m", "pkg.train"])
    """
    if not re.fullmatch(r"python[\d.]*", os.path.basename(command[0])):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word == "-" or re.fullmatch(r"-[A-Za-z]*[cm].*", word) or word.startswith("--help"):
            return None
        if word in _WITH_VALUE:
            next(words, None)
    return None


def _no_script(name: str) -> LaunchError:
    from difflib import get_close_matches

    folder, base = os.path.split(name)
    try:
        near = get_close_matches(
            base, [each for each in os.listdir(folder or ".") if each.endswith(".py")], n=1
        )
    except OSError:
        near = []
    meant = shlex.quote(os.path.join(folder, near[0])) if near else None
    return LaunchError(
        "no such script",
        received=name,
        expected=f"a file, seen from {os.getcwd()}",
        hint=f"did you mean `{meant}`?" if meant else "check the spelling and the folder",
        exit_code=ExitCode.NOT_FOUND,
    )


def launch_error(name: str, number: int) -> LaunchError:
    """Why a program could not be started, in words."""
    typed = shlex.quote(name)
    if number in (errno.ENOENT, errno.ENOTDIR) and not os.path.exists(name):
        if name.endswith(".py"):
            return _no_script(name)
        return LaunchError(
            "command not found",
            received=name,
            expected="a program on PATH, or a path to one",
            hint="check the spelling, or give the full path",
            exit_code=ExitCode.NOT_FOUND,
        )
    reason, hint = os.strerror(number), f"`chmod +x {typed}`"
    if os.path.isdir(name):
        reason, hint = "a folder", "name the program in it"
    elif number == errno.ENOENT:
        reason, hint = "the interpreter in its first line is not there", f"`head -1 {typed}` shows that line"
    elif number == errno.ENOEXEC:
        hint = f"start it with its interpreter: `buoy run -- bash {typed}`"
    if name.endswith(".py"):
        hint = f"`buoy run -- python {typed}`"
    return LaunchError(
        "the command cannot be executed",
        received=f"{name} ({reason})",
        expected="a program this user may execute",
        hint=hint,
        exit_code=ExitCode.NOT_EXECUTABLE,
    )


class Terminal:
    """Lends the terminal to the child's process group, so that Ctrl-C, Ctrl-Z and `input()` are the child's."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.is_lent = False
        try:
            if sys.stdin is not None and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                self._descriptor = 0
        except OSError:
            pass

    def lend(self, group: int) -> None:
        """Make the child's group the foreground one."""
        self._set(group)
        self.is_lent = self._descriptor is not None

    def take_back(self) -> None:
        """Make our own group the foreground one again."""
        if self.is_lent:
            self._set(os.getpgrp())
            self.is_lent = False

    def _set(self, group: int) -> None:
        if self._descriptor is None:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # setting it from the background would stop us
        try:
            os.tcsetpgrp(self._descriptor, group)
        except OSError:
            pass
        finally:
            signal.signal(signal.SIGTTOU, before)
