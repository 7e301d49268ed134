"""The process that traces: whatever happens in it (an abort, a hang, a prompt, 10 GB) stays in it.

What is asked of it and how it answers is plain JSON both ways; `explain` says in the user's terms why it could not.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, util
from typing import Any

from buoy.errors import BuoyError
from buoy.estimate.trace import Trace
from buoy.machine import host
from buoy.units import format_bytes, format_duration

WRITE_BUILD = "give a function that returns model and batch: `buoy plan train.py:build`"
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
    """`fp16` or `bf16` around the loss, besides whatever the code does itself."""
    optimizer: str | None = None
    """Another optimizer than the code's own: AdamW, Adam, SGD (with momentum), Adafactor, ..."""
    checkpointing: bool = False
    """Recompute activations in backward."""
    changes: tuple[str, ...] = ()
    """Remedies applied to the step, by their names in `trace_remedies`."""

    @property
    def is_of_live_objects(self) -> bool:
        """Whether there is no `build` of the user's: the objects are those of a notebook or a running script."""
        return str(self.source.get("build", "")).partition(":")[0] == LIVE

    def to_json(self) -> str:
        """As the child reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """As the child got it."""
        fields = json.loads(text)
        return cls(**{**fields, "changes": tuple(fields["changes"])})


TIMEOUT = 300.0
LEAST_MEMORY = 2 << 30
# Written by the child next to its result: the parts of its error, and the traceback for `-v`.
REFUSED = ".refused"
_CRASHES = {
    "SIGSEGV": "native code accessed memory that is not its own",
    "SIGBUS": "native code accessed memory that does not exist",
    "SIGABRT": "native code aborted",
    "SIGILL": "native code was built for another processor",
    "SIGFPE": "native code divided by zero",
}
_MAIN = "from buoy.estimate.child import main; main()"


def trace(request: Request, *, timeout: float = TIMEOUT, memory: int | None = None) -> Trace:
    """Trace in a child process; raises EstimateError with the reason when that is not possible.

    `memory` is the most the child may allocate; by default half of this machine's.
    """
    limit = memory if memory is not None else most_memory()
    with tempfile.TemporaryDirectory(prefix="buoy-estimate-") as folder:
        result = os.path.join(folder, "trace.json.gz")
        said = os.path.join(folder, "said.txt")
        command = [sys.executable, "-c", _MAIN, result, str(limit)]
        with open(said, "wb") as output:
            # A session of its own: whatever the user's code starts can be ended with it.
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment(),
            )  # fmt: skip
        code: int | None = None
        try:
            # The pipe is closed behind the request: a prompt in the user's code reads the end of file.
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
            "the traced code did not finish",
            received=f"no result after {format_duration(timeout)}; its last output: {last}",
            expected="a build function that returns a model and a batch, and a step that ends",
            hint="let build() return only what one step needs: no training, no download, no server; "
            "or give it longer with --timeout",
        )
    try:
        with open(result + REFUSED, encoding="utf-8") as file:
            *refusal, details = json.load(file)
    except (OSError, ValueError, TypeError):
        pass
    else:
        message, received, expected, hint = refusal
        error = EstimateError(message, received=received, expected=expected, hint=hint)
        error.add_note(details)
        return error
    name = signal.Signals(-code).name if code < 0 else ""
    if name in _CRASHES:
        return EstimateError(
            "the traced code crashed",
            received=f"{name}: {_CRASHES[name]}; its last output: {last}",
            expected="code that runs on a CPU",
            hint="run it yourself with `python -X faulthandler`: it names the line",
        )
    if code < 0:
        return EstimateError(
            "the tracing process was killed",
            received=f"{name}, by its own code or from outside (where memory runs out, by the "
            f"system); its last output: {last}",
            expected=f"a step that can be traced within {format_bytes(limit)} of memory",
            hint="build the model without loading weights or data; or trace a smaller batch",
        )
    return EstimateError(
        "the traced code ended the process",
        received=f"exit code {code}; its last output: {last}",
        expected="a build function that returns",
        hint="remove sys.exit() and os._exit() from what build() calls",
    )


def main() -> None:
    """The child's side: read the request, trace, leave the result or the reason."""
    result, memory = sys.argv[1], int(sys.argv[2])
    request = Request.from_json(sys.stdin.read())
    confine(memory)
    gc.disable()  # the process is short, and what is freed must not depend on when the collector runs
    with refusing(result, request):
        tracer(request.framework).trace_request(request).save(result)


def tracer(framework: str) -> Any:
    """The module that traces a step of this framework: `trace_request(request) -> Trace`."""
    if framework == "keras":
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    return import_module(f"buoy.estimate.tracing.{framework}")


def load(path: str, name: str) -> Callable[[], Any]:
    """The function; its file runs, but not what it keeps under `if __name__ == "__main__"`."""
    if path.endswith(".py"):
        if not os.path.exists(path):
            raise EstimateError("no such file", received=path, expected="a Python file with a build function")
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        # Under this name `if __name__ == "__main__"` stays quiet: nothing is trained.
        spec = util.spec_from_file_location("buoy_traced", path)
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules["buoy_traced"] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = import_module(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise EstimateError(
            f"{path} has no function `{name}`",
            received=", ".join(
                sorted(found for found, value in vars(module).items() if inspect.isfunction(value))
            )
            or "no functions",
            expected="a function that returns a model and a batch",
        )
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def refusing(result: str, request: Request) -> Iterator[None]:
    """The child's side: whatever goes wrong inside, leave the reason where the parent looks for it, and exit."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent learns it from here
        why = explain(error, request)
        details = "".join(traceback.format_exception(error))[-4000:]
        with open(result + REFUSED, "w", encoding="utf-8") as file:
            json.dump([why.message, why.received, why.expected, why.hint, details], file)
        raise SystemExit(3) from None


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
    """Raises inside the script when it takes longer; `step` is what it did not come to, for the user."""

    def late(*_: object) -> None:
        raise EstimateError(
            f"the script did not reach its first {step}",
            received=f"still running after {seconds:.0f} s",
            expected="a script that starts training soon",
            hint="give it longer with --timeout, or a function: `buoy plan train.py:build`",
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The classes by which torch says so, by name: their homes move between versions.
_NO_META = {"UnsupportedOperatorException", "UnsupportedFakeTensorException", "MetadataMismatchError"}


def explain(error: BaseException, request: Request) -> EstimateError:
    """An exception of the user's code or of torch, as the user will read it."""
    if isinstance(error, EstimateError):
        return error
    raised = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[
        :400
    ]
    said = raised + _where(error, request)
    if isinstance(error, (EOFError, KeyboardInterrupt)):
        return EstimateError("the traced code asks for input", received=said,
                             expected="a build function that asks for no input",
                             hint="pass what it asks for as a default")  # fmt: skip
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return EstimateError("the traced code needs more memory than tracing may take", received=said,
                             expected="models without weights and small batches",
                             hint="plan with a smaller batch" if request.is_of_live_objects
                             else "let build() load no data set; trace with a smaller batch")  # fmt: skip
    if type(error).__name__ in _NO_META or "meta kernel" in str(error) or "fake impl" in str(error):
        return EstimateError("an operation cannot be traced: it has no meta kernel", received=said,
                             expected="operations whose output's shape is known without running",
                             hint="register one with torch.library.register_fake, or plan without that operation",
                             )  # fmt: skip
    if isinstance(error, SystemExit):
        return EstimateError("the traced code ends the process", received=said,
                             expected="a build function that returns",
                             hint="remove sys.exit() from what build() calls")  # fmt: skip
    if isinstance(error, ModuleNotFoundError):
        return EstimateError("the traced code needs a library that is not installed here", received=said,
                             expected="an environment in which the code runs",
                             hint=f"pip install {(error.name or '').partition('.')[0]}")  # fmt: skip
    if _wants_network(error):
        return EstimateError("the traced code tries to download something", received=said,
                             expected="a build function that needs no network",
                             hint="build the model from its config, weights are not needed; download data once before "
                             "planning")  # fmt: skip
    if type(error).__name__ == "FakeTensorDeviceMismatchError" or "found two different devices" in str(error):
        return EstimateError("the step mixes CPU tensors with GPU tensors", received=said,
                             expected="tensors on the device of the model",
                             hint="create it there: `torch.zeros(n, device=x.device)`; plan a training on the CPU with "
                             "`--on this`")  # fmt: skip
    if isinstance(error, TypeError) and "argument: 'closure'" in str(error):
        return EstimateError("the optimizer computes the loss again inside its step, which cannot be traced",
                             received=raised, expected="an optimizer that needs only the gradients",
                             hint="plan with another one (`--optimizer SGD`); LBFGS keeps up to 2 x history_size "
                             "copies of the weights on top of that")  # fmt: skip
    said += "".join(f"; {note}" for note in getattr(error, "__notes__", []))  # the batch's shapes
    if request.is_of_live_objects:
        return EstimateError("the traced step failed", received=said, expected="a step that runs",
                             hint="run one step on the CPU yourself")  # fmt: skip
    script = str(request.source.get("build", "")).endswith(":")
    return EstimateError(
        "the traced code failed", received=said,
        expected="a script that reaches its first step" if script else "a build function and a step that run",
        hint="run the script on the CPU yourself" if script else "run build() and one step on the CPU yourself",
    )  # fmt: skip


def _wants_network(error: BaseException) -> bool:
    """By the words of our own refusal, of Keras, and of a name that could not be looked up."""
    chain: BaseException | None = error
    while chain is not None:
        names = {kind.__name__ for kind in type(chain).__mro__}
        if names & {"URLError", "gaierror", "NameResolutionError", "OfflineModeIsEnabled"}:
            return True
        if "downloads nothing" in str(chain) or "URL fetch failure" in str(chain):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _where(error: BaseException, request: Request) -> str:
    """The last line of the user's own files on the way to the error."""
    target = str(request.source.get("build", "")).rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    named = [frame for frame in frames if target and frame.filename.endswith(target)]
    own = [frame for frame in frames if _is_own(frame.filename)] or named
    if not own:
        return ""
    path, last = own[-1].filename, own[-1]
    here = target if named and path == named[-1].filename else os.path.relpath(path)
    return f" at {path if here.startswith('..') else here}:{last.lineno}"


def _is_own(path: str) -> bool:
    """Whether a file is neither Python's, nor a library's, nor ours."""
    installed = {os.path.realpath(folder) for folder in sysconfig.get_paths().values()}
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    real = os.path.realpath(path)
    if {"site-packages", "dist-packages"} & set(real.split(os.sep)):
        return False
    return os.path.isfile(path) and not any(
        real.startswith(folder + os.sep) for folder in (*installed, os.path.realpath(ours))
    )
