"""Small helpers for tests that start, watch and kill real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 240.0
"""With everything that is waited for: a machine may be busy. What never comes fails by this, or by pytest's timeout."""


def buoy(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    options.setdefault("timeout", PATIENCE)
    return subprocess.run(
        [sys.executable, "-m", "buoy", *arguments], capture_output=True, text=True, **options
    )


def run_python(folder: Path, code: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`buoy run` a piece of Python, recorded into `folder`."""
    return buoy("run", "--run", str(folder), *options, "--", sys.executable, "-c", code, **more)


def start_python(folder: Path, code: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    """The same, left running."""
    command = [
        sys.executable,
        "-m",
        "buoy",
        "run",
        "--run",
        str(folder),
        *options,
        "--",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


class Server:
    """A process that loads a library once and answers questions: a line of JSON each, and one for the answer.

    `python -m` starts it with the first question. One that fails to answer is ended with all its children, and the next
    question starts another.
    """

    def __init__(self, *program: str, env: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", *program]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else env
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the server

    def ask(self, question: object) -> Any:
        """Its answer."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
                cwd=ROOT, env=self._env, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question, default=str) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, f"no answer to {question}: {self._last_words()}"
            return json.loads(line)
        except BaseException:  # a test's timeout too
            os.killpg(self._process.pid, signal.SIGKILL)
            self.stop()
            raise

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-3000:]

    def stop(self) -> None:
        """Wait for its end, if it was started."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait(PATIENCE)


class Answers(Mapping[str, Any]):
    """The answers of a server by name: each is asked for by the first test that looks at it."""

    def __init__(self, server: Server, questions: Mapping[str, object]) -> None:
        self._server = server
        self._questions = questions
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._server.ask(self._questions[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._questions)

    def __len__(self) -> int:
        return len(self._questions)


@contextmanager
def answers(questions: Mapping[str, object], *program: str, **options: Any) -> Iterator[Answers]:
    """Those of a server that ends afterwards."""
    server = Server(*program, **options)
    try:
        yield Answers(server, questions)
    finally:
        server.stop()


def die_as_usual() -> None:
    """Tests that `nohup` started, or a script with `&`, would hand their ignored signals on to what must die."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition holds; fail in words when it never does."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE:.0f} s in vain for {what}")


def attempt(folder: Path, number: int = 1) -> Path:
    """The folder of an attempt."""
    return folder / "attempts" / f"{number:04d}"


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def events(folder: Path, number: int = 1) -> list[dict[str, Any]]:
    """The events of an attempt."""
    try:
        lines = (attempt(folder, number) / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def event(folder: Path, kind: str, number: int = 1) -> dict[str, Any] | None:
    """The first event of this kind, if there is one yet."""
    return next((found for found in events(folder, number) if found["kind"] == kind), None)


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main_pid(folder: Path, number: int = 1) -> int:
    """The pid of the training process, once it is recorded."""
    path = attempt(folder, number) / "attempt.json"
    wait_until(path.exists, "attempt.json")
    return int(read(path)["pid"])


def open_descriptors(pid: int) -> list[str]:
    """What a process has open."""
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
