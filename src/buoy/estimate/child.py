"""The process that traces: whatever happens in it (an abort, a hang, a prompt, 10 GB) stays in it.

What is asked of a tracing child process, and how it answers: plain JSON both ways.

How long a script that is rehearsed for a plan may take to come to its first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from buoy.errors import BuoyError
from buoy.estimate.trace import Trace
from buoy.machine import host
from buoy.units import format_bytes, format_duration

LIVE = "buoy_planned"
"""The module under whose name a forked child finds the objects that a running process gave."""


class EstimateError(BuoyError):
    """A training step could not be traced; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One trace: where the model comes from, and what to change about the step."""

    framework: str
    """`torch` or `keras`."""
    source: dict[str, Any]
    """`{"build": "train.py:build"}`, `{"hf_config": "config.json", "seq": 512}` or `{"keras": "model.keras"}`."""
    device: str = "t4"
    batch: int | None = None
    """Samples per step; None keeps the sample batch as it is."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    autocast: str | None = None
    """`fp16` or `bf16` around the loss, beside whatever the code does itself."""
    optimizer: str | None = None
    """Another optimizer than the code's own: AdamW, Adam, SGD (with momentum), Adafactor, ..."""
    checkpointing: bool = False
    """Recompute activations in backward."""
    changes: tuple[str, ...] = ()
    """Remedies applied to the step, by their names in `trace_remedies`."""

    @property
    def is_of_live_objects(self) -> bool:
        """Whether there is no `build` of the person's: the objects are those of a notebook or a running script."""
        return str(self.source.get("build", "")).partition(":")[0] == LIVE

    def to_json(self) -> str:
        """As the child reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """As the child got it."""
        fields = json.loads(text)
        return cls(**{**fields, "changes": tuple(fields["changes"])})


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the child could not trace, in the words the person will read."""

    message: str
    received: str | None = None
    expected: str | None = None
    hint: str | None = None
    details: str = field(default="")
    """The traceback, for `-v`."""

    def error(self) -> EstimateError:
        """The same, to raise."""
        error = EstimateError(self.message, received=self.received, expected=self.expected, hint=self.hint)
        if self.details:
            error.add_note(self.details)
        return error


TIMEOUT = 300.0
LEAST_MEMORY = 2 << 30
# Written by the child beside its result, in this process's words.
REFUSED = ".refused"
_CRASHES = {
    "SIGSEGV": "native code used memory that is not its own",
    "SIGBUS": "native code used memory that is not there",
    "SIGABRT": "native code gave up",
    "SIGILL": "native code for another processor",
    "SIGFPE": "native code divided by zero",
}
_MODULES = {"torch": "buoy.estimate.tracing.torch", "keras": "buoy.estimate.tracing.keras"}


def trace(request: Request, *, timeout: float = TIMEOUT, memory: int | None = None) -> Trace:
    """Trace in a child process; raises EstimateError with the reason when that is not possible.

    `memory` is the most the child may allocate; by default half of this machine's.
    """
    limit = memory if memory is not None else most_memory()
    with tempfile.TemporaryDirectory(prefix="buoy-estimate-") as folder:
        result = os.path.join(folder, "trace.json.gz")
        said = os.path.join(folder, "said.txt")
        command = [sys.executable, "-m", _MODULES[request.framework], result, str(limit)]
        with open(said, "wb") as output:
            # A session of its own: whatever the person's code starts can be ended with it.
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment(),
            )  # fmt: skip
        code: int | None = None
        try:
            # The pipe is closed behind the request: a prompt in the person's code reads the end of file.
            child.communicate(request.to_json().encode(), timeout=timeout)
            code = child.returncode
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_session(child)
        if code is not None and os.path.exists(result):
            return Trace.load(result)
        raise failure(code, result, said, limit=limit, timeout=timeout)


def failure(code: int | None, result: str, said: str, *, limit: int, timeout: float) -> BuoyError:
    """Why a tracing process left no result: its own refusal, else its exit code (None: it did not end in time)."""
    last = last_words(said)
    if code is None:
        return EstimateError(
            "the code to be traced did not come to its end",
            received=f"no result after {format_duration(timeout)}; it said last: {last}",
            expected="a build function that returns a model and a batch, and a step that ends",
            hint="let build() return only what one step needs: no training, no download, no server; "
            "or give it longer with --timeout",
        )
    try:
        with open(result + REFUSED, encoding="utf-8") as file:
            return Refusal(**json.load(file)).error()
    except (OSError, ValueError, TypeError):
        pass
    name = signal.Signals(-code).name if code < 0 else ""
    if name in _CRASHES:
        return EstimateError(
            "the code to be traced crashed",
            received=f"{name}: {_CRASHES[name]}; it said last: {last}",
            expected="code that runs on a CPU",
            hint="run it yourself with `python -X faulthandler`: it names the line",
        )
    if code < 0:
        return EstimateError(
            "the tracing process was killed",
            received=f"{name}, by its own code or from outside (where memory runs out, by the "
            f"system); it said last: {last}",
            expected=f"a step that can be traced within {format_bytes(limit)} of memory",
            hint="build the model without loading weights or data; or trace a smaller batch",
        )
    return EstimateError(
        "the code to be traced ended the process",
        received=f"exit code {code}; it said last: {last}",
        expected="a build function that returns",
        hint="remove sys.exit() and os._exit() from what build() calls",
    )


def refuse(result: str, refusal: Refusal) -> None:
    """The child's side: leave the reason where the parent looks for it."""
    with open(result + REFUSED, "w", encoding="utf-8") as file:
        json.dump(asdict(refusal), file)


def confine(memory: int) -> None:
    """The child's side: no more memory than this, no core file, no network, and no life after the parent's."""
    import ctypes
    import socket

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except ImportError:
        pass  # Windows
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError, TypeError):
        pass  # not Linux: the parent's own clean-up remains
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # where memory runs out this process is taken, and not the notebook that asked
    except OSError:
        pass

    connect = socket.socket.connect

    def only_local(self: socket.socket, address: object) -> None:
        if self.family == getattr(socket, "AF_UNIX", None):
            return connect(self, address)  # type: ignore[arg-type]
        raise ConnectionRefusedError(f"buoy plan downloads nothing; the code asked for {address}")

    socket.socket.connect = only_local  # type: ignore[method-assign, assignment]


def environment() -> dict[str, str]:
    """What a tracing process sees: no GPU, no hub, little talk."""
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",  # a GPU that is here is not touched
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "BUOY_TRACING": "1",
        "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # a Mac ends a forked child else; ours only traces
    }
    return {**os.environ, **quiet}


def _end_session(child: subprocess.Popen[bytes]) -> None:
    try:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    except (ProcessLookupError, PermissionError):
        pass
    child.wait()


def last_words(path: str) -> str:
    """The last line that the traced code wrote."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 2000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "nothing"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


def most_memory() -> int:
    """Bytes a tracing process may take unless told: half of this machine's."""
    total = host.memory().total
    return max(LEAST_MEMORY, total // 2) if total else 4 * LEAST_MEMORY


@contextlib.contextmanager
def in_time(seconds: float, step: str) -> Iterator[None]:
    """Raises inside the script when it takes longer; `step` is what it did not come to, for people."""

    def late(*_: object) -> None:
        raise EstimateError(
            f"the script did not come to its first {step}",
            received=f"still running after {seconds:.0f} s",
            expected="a script that trains soon",
            hint="give it longer with --timeout, or a function: `buoy plan train.py:build`",
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
