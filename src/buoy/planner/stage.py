"""Where steps are traced: `python -m buoy.planner.stage FOLDER` loads PyTorch once and forks for each trace.

One start serves all traces of a plan: other batch sizes, other devices, each remedy. A script is run to its first step
once, and every trace starts there. A forked child sees everything this process has, and nothing it does comes back but
its files.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from buoy.estimate.child import EstimateError, Request, confine, last_words, refusing, tracer
from buoy.flight import recorder
from buoy.machine import process

_PAUSE = 0.02
_AT_ONCE = max(1, min(2, os.cpu_count() or 1))  # each may take half of the memory


def forked(
    works: Sequence[Callable[[], None]],
    said: str,
    timeout: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[int | None]:
    """Do each work in a child of its own, two at once, their words going to the file `said`.

    Returns the exit codes (-N for signal N), None for one that took longer than `timeout`. Each child has a session of
    its own, so that whatever it started ends with it.
    """
    codes: list[int | None] = [None] * len(works)
    waiting = list(enumerate(works))
    running: dict[int, tuple[int, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number, work = waiting.pop(0)
                running[_fork(work, said)] = (number, time.monotonic() + timeout)
            for pid, (number, end) in list(running.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[number] = os.waitstatus_to_exitcode(status)
                if found or time.monotonic() > end:
                    del running[pid]
                    _end(pid)
            meanwhile()
            time.sleep(_PAUSE if running else 0)
    finally:
        for pid in running:
            _end(pid)
    return codes


def _fork(work: Callable[[], None], said: str) -> int:
    recorded = recorder.current()
    with warnings.catch_warnings():
        # Python warns of threads that hold locks; the child runs our tracer only, and a timeout bounds it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        if recorded is not None:
            recorded.beacon.detach()  # a traced step is no step of the training
        _in_child(work, said)
    return pid


def _in_child(work: Callable[[], None], said: str) -> None:
    code = 70
    try:
        process.mark_this_process()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, number)
        # A notebook's streams write to its page, not to these numbers.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - nothing may unwind into the parent's frames
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(pid: int) -> None:
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


# Loaded before the first fork: what every trace needs.
_NEEDED = ("torch", "torch.utils.checkpoint", "buoy.estimate.tracing.build",
           "buoy.estimate.tracing.steps", "buoy.estimate.tracing.torch")  # fmt: skip

# Of a build file's imports only these are loaded before the fork: they are slow, and do nothing when imported.
_LIBRARIES = {"transformers", "torchvision", "timm", "peft", "numpy", "accelerate", "lightning", "datasets"}
_UNLIMITED = -1


def main() -> None:
    """Answer one line of JSON on stdin with one on stdout, until stdin ends."""
    folder = sys.argv[1]
    os.environ[process.VARIABLE] = folder
    # Traces are forked off after the script has computed: the threads of a pool would be missing there, and waited for.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    said = os.path.join(folder, "said.txt")
    answers = os.fdopen(os.dup(1), "w")
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    orders = os.fdopen(os.dup(0))
    for line in orders:
        order = json.loads(line)
        answers.write(json.dumps(answer(order, said)) + "\n")
        answers.flush()


def answer(order: dict[str, Any], said: str) -> dict[str, Any]:
    """Carry out an order: `{"requests", "results", "memory", "timeout"}`, or `{"script", "arguments", ...}`.

    Several requests are traced in parallel; the answer has a code for each.
    """
    if order.get("framework") == "keras":
        return _keras(order, said)
    for name in _NEEDED:
        importlib.import_module(name)
    if "script" not in order:
        _load_libraries(Request.from_json(order["requests"][0]).source)
        return {"codes": forked(works(order), said, float(order["timeout"]))}
    return _run_script(order, "torch", said)


def _run_script(order: dict[str, Any], framework: str, said: str) -> dict[str, Any]:
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - a script that asks is answered with the end of file
    _sit_at_a_terminal()
    confine(_UNLIMITED)
    try:
        with refusing(order["result"], Request(framework, {"build": f"{order['script']}:"})):
            first_step: Any = importlib.import_module(f"buoy.{framework}.plan.script")
            try:
                found = first_step.run(order["script"], order["arguments"], order["timeout"])
            except EstimateError as error:
                sys.stdout.flush()
                error.received = f"{error.received}; its last output: {last_words(said)}"
                raise
    except SystemExit as error:
        return {"code": error.code}
    return {"code": 0, "found": found}


def _sit_at_a_terminal() -> None:
    """Scripts ask how wide their terminal is (`stty size`) to draw their bars: one where nobody types.

    What was there before is the pipe of the orders, which no program of the script's may read.
    """
    import fcntl
    import struct
    import termios

    os.environ |= {"COLUMNS": "80", "LINES": "24"}
    try:
        _, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        settings = termios.tcgetattr(theirs)
        settings[3] &= ~termios.ICANON
        settings[6][termios.VMIN] = settings[6][termios.VTIME] = (
            0  # reading it is answered with the end of file
        )
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
    except OSError:
        theirs = os.open(os.devnull, os.O_RDONLY)
    os.dup2(theirs, 0)  # the other side stays open for as long as this process: a terminal ends with it


def _keras(order: dict[str, Any], said: str) -> dict[str, Any]:
    """Run a script, or trace: in this very process, since TensorFlow does not survive a fork."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if "script" in order:
        if order["precision"]:
            keras: Any = importlib.import_module("keras")
            keras.mixed_precision.set_global_policy(order["precision"])
        return _run_script(order, "keras", said)
    return {
        "codes": [
            _keras_trace(*each, order) for each in zip(order["requests"], order["results"], strict=True)
        ]
    }


def _keras_trace(text: str, result: str, order: dict[str, Any]) -> int:
    request = Request.from_json(text)
    try:
        with refusing(result, request):
            if "script" in request.source:
                trace = importlib.import_module("buoy.keras.plan.script").trace(request)
            else:
                _confine_once(int(order["memory"]))
                keras: Any = importlib.import_module("keras")
                keras.utils.clear_session()  # names are numbered from the start again
                trace = tracer("keras").trace_request(request)
            trace.save(result)
    except SystemExit:
        return 3
    return 0


@functools.cache
def _confine_once(memory: int) -> None:
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - code that asks is answered with the end of file
    confine(memory + _held())


def _load_libraries(source: dict[str, Any]) -> None:
    """Load before forking what the model's code will import in every trace; whatever fails, fails in the trace."""
    names: list[str] = []
    try:
        if "hf_config" in source:
            with open(source["hf_config"], encoding="utf-8") as file:
                kind = str(json.load(file).get("model_type"))
            names = [
                "transformers",
                "transformers.models.auto.modeling_auto",
                f"transformers.models.{kind}.modeling_{kind}",
            ]
        elif ".py:" in source.get("build", ""):
            with open(source["build"].rpartition(":")[0], encoding="utf-8") as file:
                tree = ast.parse(file.read())
            found = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level]
            found += [
                alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
            ]
            names = [name for name in found if name and name.split(".")[0] in _LIBRARIES]
        for name in names:
            importlib.import_module(name)
    except Exception:  # noqa: BLE001 - only a head start
        pass


def works(order: dict[str, Any]) -> list[Callable[[], None]]:
    """What the forked children have to do, one for each request."""
    pairs = zip(order["requests"], order["results"], strict=True)
    return [functools.partial(trace_into, order, Request.from_json(text), result) for text, result in pairs]


def trace_into(order: dict[str, Any], request: Request, result: str) -> None:
    """In the forked child: trace what was ordered and leave the result or the reason."""
    import gc

    confine(int(order["memory"]) + _held())
    gc.disable()  # the process is short, and what is freed must not depend on when the collector runs
    with refusing(result, request):
        if order.get("count_flops"):
            counted = tracer("torch").count_operations(request)
            with open(result, "w", encoding="utf-8") as file:
                json.dump(counted, file)
        else:
            tracer("torch").trace_request(request, functools.partial(_announce, order.get("announced"))).save(
                result
            )


def _announce(path: str | None, text: str) -> None:
    """A line for the user who waits, where the process that ordered the trace looks for it."""
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def _held() -> int:
    """Bytes this process inherited: the limit is on what the trace adds."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    except (OSError, StopIteration, ValueError):
        return 0


if __name__ == "__main__":
    main()
