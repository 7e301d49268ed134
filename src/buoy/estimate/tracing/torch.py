"""The child that traces PyTorch: `python -m buoy.estimate.tracing.torch RESULT MEMORY`, the request on stdin."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import traceback
from typing import Any

from buoy.estimate.child import EstimateError, Refusal, Request, confine, refuse
from buoy.estimate.devices import by_id
from buoy.estimate.trace import Trace

# The classes torch raises, by name: their homes move between versions.
DEPENDS_ON_DATA = {
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "DataDependentErrorKind",
}  # fmt: skip
# How torch refuses to read a fake or meta tensor: `.numpy()`, `.tolist()` and what libraries do with its address.
READS_BYTES = (
    "Cannot copy out of meta tensor", "item() cannot be called on meta", "Cannot access data pointer of Tensor",
    ".numpy() is not supported for tensor subclass", ".tolist() is not supported for tensor subclass",
)  # fmt: skip
# What torch's fake kernels refuse though the real ones take it: grouped matrix products of experts in float32.
STRICTER = ("Expected inputs of BF16 type",)
NO_META = {"UnsupportedOperatorException", "UnsupportedFakeTensorException", "MetadataMismatchError"}


def main() -> None:
    """Read the request, trace, leave the result or the reason."""
    result, memory = sys.argv[1], int(sys.argv[2])
    request = Request.from_json(sys.stdin.read())
    confine(memory)
    gc.disable()  # the process is short, and what is freed must not depend on when the collector runs
    try:
        trace_request(request).save(result)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent learns it from here
        refuse(result, explain(error, request))
        raise SystemExit(3) from None


def trace_request(request: Request) -> Trace:
    """Trace on fake tensors; where the code reads values, in small real steps on the CPU."""
    import torch

    from buoy.estimate.tracing.build import batch_size, build
    from buoy.estimate.tracing.real import trace_small_steps
    from buoy.estimate.tracing.semantics import ordinary_values
    from buoy.estimate.tracing.steps import trace_steps
    from buoy.estimate.tracing.tape import Device

    torch.set_num_threads(1)
    row = by_id(request.device)
    device = Device(row.capability, row.memory or 0, row.workspace, row.multiprocessors, row.threads)
    job = None
    try:
        job = build(request)
        with ordinary_values():
            trace = trace_steps(
                job,
                device,
                accumulate=request.accumulate,
                autocast=request.autocast,
                scaler=request.autocast == "fp16",
            )
    except Exception as error:
        if not _depends_on_data(error):
            _name_the_shapes(error, job)
            raise
        trace = trace_small_steps(request, device, error)
        trace.facts["engine"] = "real"
        return trace
    if request.autocast == "bf16" and 0 < row.capability < 80:
        trace.notes.append(
            f"{row.name} has no bfloat16 units: no attention kernel there takes it without keeping all scores, and "
            "the copies of the weights come on top; `--autocast fp16` is what this card is made for"
        )
    trace.facts |= {"engine": "fake", "batch": batch_size(job.batch), "torch": torch.__version__}
    return trace


def explain(error: BaseException, request: Request) -> Refusal:
    """An exception of the person's code or of torch, in words."""
    details = "".join(traceback.format_exception(error))[-4000:]
    if isinstance(error, EstimateError):
        return Refusal(error.message, error.received, error.expected, error.hint, details)
    where = _where(error, request)
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    said = said[:400]
    if isinstance(error, (EOFError, KeyboardInterrupt)):
        return Refusal("the code to be traced asks for input", f"{said}{where}", "a build function that asks nothing",
                       "pass what it asks for as a default", details)  # fmt: skip
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return Refusal("the code to be traced needs more memory than tracing may take", f"{said}{where}",
                       "models without weights and small batches",
                       "plan with a smaller batch" if request.is_of_live_objects
                       else "let build() load no data set; trace with a smaller batch", details)  # fmt: skip
    if type(error).__name__ in NO_META or "meta kernel" in str(error) or "fake impl" in str(error):
        return Refusal("an operation cannot be traced: it has no meta kernel", f"{said}{where}",
                       "operations whose output's shape is known without running",
                       "register one with torch.library.register_fake, or plan without that operation",
                       details)  # fmt: skip
    if isinstance(error, SystemExit):
        return Refusal("the code to be traced ends the process", f"{said}{where}", "a build function that returns",
                       "remove sys.exit() from what build() calls", details)  # fmt: skip
    if isinstance(error, ModuleNotFoundError):
        return Refusal("the code to be traced needs a library that is not installed here", f"{said}{where}",
                       "an environment in which the code runs", f"pip install {(error.name or '').partition('.')[0]}",
                       details)  # fmt: skip
    if _wants_network(error):
        return Refusal("the code to be traced wants to download something", f"{said}{where}",
                       "a build function that needs no network",
                       "build the model from its config, weights are not needed; download data once before planning",
                       details)  # fmt: skip
    if type(error).__name__ == "FakeTensorDeviceMismatchError" or "found two different devices" in str(error):
        return Refusal("the step mixes tensors of the CPU with the GPU's", f"{said}{where}",
                       "tensors on the device of the model",
                       "make it there: `torch.zeros(n, device=x.device)`; plan a training on the CPU with `--on this`",
                       details)  # fmt: skip
    if isinstance(error, TypeError) and "argument: 'closure'" in str(error):
        return Refusal("the optimizer computes the loss again inside its step, which cannot be traced", said,
                       "an optimizer that needs only the gradients",
                       "plan with another one (`--optimizer SGD`); LBFGS keeps up to 2 x history_size copies of the "
                       "weights on top of that", details)  # fmt: skip
    shapes = getattr(error, "__notes__", [])
    if request.is_of_live_objects:
        return Refusal("the step to be traced failed", f"{said}{where}" + "".join(f"; {note}" for note in shapes),
                       "a step that runs", "run one step on the CPU yourself", details)  # fmt: skip
    script = str(request.source.get("build", "")).endswith(":")
    return Refusal("the code to be traced failed", f"{said}{where}" + "".join(f"; {note}" for note in shapes),
                   "a script that comes to its first step" if script else "a build function and a step that run",
                   "run the script on the CPU yourself" if script else "run build() and one step on the CPU yourself",
                   details)  # fmt: skip


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


def _depends_on_data(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ in DEPENDS_ON_DATA or "data-dependent" in str(error).lower():
            return True
        if any(words in str(error) for words in (*READS_BYTES, *STRICTER)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _name_the_shapes(error: BaseException, job: Any) -> None:
    from buoy.estimate.tracing.build import shapes

    if job is not None and isinstance(error, (RuntimeError, TypeError, ValueError, IndexError)):
        error.add_note(f"the batch is {shapes(job.batch)}")


def _where(error: BaseException, request: Request) -> str:
    """The last line of the person's own files on the way to the error."""
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
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    real = os.path.realpath(path)
    if {"site-packages", "dist-packages"} & set(real.split(os.sep)):
        return False
    return os.path.isfile(path) and not any(
        real.startswith(folder + os.sep) for folder in (*installed, os.path.realpath(ours))
    )


if __name__ == "__main__":
    main()
