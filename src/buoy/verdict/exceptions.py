"""Which kind of death an uncaught exception is. One classifier for the notes of every framework.

The outermost exception decides with certainty. One that is only in its chain may have been dealt with before the
outer one was raised, so it makes the finding no more than likely. A text counts only in exceptions of the type that
the library at hand raises: a person's own ValueError may quote anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from buoy.verdict.model import Grade
from buoy.verdict.sizes import bytes_asked_for
from buoy.verdict.values import count, integer, mappings, printable, text

ENOMEM, EAGAIN, ENFILE, EMFILE, EFBIG, ENOSPC, EDQUOT = 12, 11, 23, 24, 27, 28, 122

_ERRNO_KINDS = {
    ENOSPC: "disk-full", EDQUOT: "disk-full", EFBIG: "file-size-limit", EMFILE: "open-files", ENFILE: "open-files",
    ENOMEM: "memory-error",
}  # fmt: skip

# Texts by kind, tried in order, in exceptions that libraries raise (RuntimeError and its heirs, TensorFlow's OpError).
_TEXTS = (
    ("shm-full", ("unable to allocate shared memory(shm)", "unable to open shared memory object", "unable to mmap")),
    ("disk-full", ("No space left on device", "Disk quota exceeded", "(os error 28)", "(os error 122)")),
    ("open-files", ("Too many open files", "received 0 items of ancdata")),
    ("process-limit", ("can't start new thread",)),
    ("distributed", (
        "gloo/transport", "ProcessGroupGloo", "ProcessGroupNCCL", "NCCL error", "ncclRemoteError", "ncclSystemError",
        "Watchdog caught collective operation timeout", "[c10d]", "TCPStore", "Connection closed by peer",
        "ncclInternalError", "ncclUnhandledCudaError",
    )),
    ("gpu-fault", (
        "device-side assert", "illegal memory access", "unspecified launch failure", "misaligned address",
        "illegal instruction was encountered", "uncorrectable ECC", "CUBLAS_STATUS_EXECUTION_FAILED",
        "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_MAPPING_ERROR", "no longer accessible", "fallen off the bus",
    )),
    ("gpu-oom", (
        "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
        "HIP out of memory", "MPS backend out of memory", "XPU out of memory", "CUDA_ERROR_OUT_OF_MEMORY",
        "failed to allocate memory on device",
    )),
    ("memory-error", (
        "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc",
        "Cannot allocate memory",
    )),
)  # fmt: skip

_TORCH_OOM = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "torch._C.OutOfMemoryError")
_TF_EXHAUSTED = "tensorflow.python.framework.errors_impl.ResourceExhaustedError"
_DISTRIBUTED = ("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError",
                "torch.distributed.DistStoreError", "torch.distributed.DistError")  # fmt: skip
_FORKING = ("subprocess.py", "popen_fork.py", "popen_spawn_posix.py", "popen_forkserver.py", "pty.py")


@dataclass(frozen=True, slots=True)
class ExceptionFinding:
    """What an exception note amounts to."""

    id: str
    """`python-exception` when it is nothing more special."""
    grade: Grade
    type: str
    message: str
    errno: int | None = None
    asked: int | None = None
    """Bytes of the allocation that failed."""
    path: str | None = None
    """The file it failed on."""
    free: int | None = None
    """Bytes free on that file's file system just then."""
    shm_free: int | None = None
    through: str | None = None
    """The outer exception's type, when an inner one decided."""

    @property
    def short(self) -> str:
        """`KeyError: 'label'`, on one line."""
        name = self.type.removeprefix("builtins.")
        return f"{name}: {printable(self.message, 160)}" if self.message else name


def classify(note: dict[str, Any]) -> ExceptionFinding:
    """The kind of an exception note; its own words before those of its chain."""
    outer = _link(note)
    bases = [base for base in note.get("bases") or () if isinstance(base, str)]
    inner = text((note.get("inner") or {}).get("file")) if isinstance(note.get("inner"), dict) else None
    kind = _kind(outer, bases, inner or "", count(note.get("disk_free")))
    chosen, through, grade = outer, None, "certain"
    if kind is None:
        for link in map(_link, mappings(note.get("chain"))):
            kind = _kind(link, [], "", None)
            if kind is not None:
                chosen, through, grade = link, outer[0], "likely"
                break
    name, message, errno = chosen
    if kind == "disk-full" and errno is None and "space" not in message and "quota" not in message.lower():
        grade = "likely"
    path = text(note.get("filename"))
    if kind == "disk-full" and path is not None and path.startswith("/dev/shm"):  # noqa: S108 - a comparison
        kind = "shm-full"
    return ExceptionFinding(
        kind or "python-exception", grade, name, message, errno, bytes_asked_for(message), path,  # type: ignore[arg-type]
        count(note.get("disk_free")), count(note.get("shm_free")), through,
    )  # fmt: skip


def _link(value: dict[str, Any]) -> tuple[str, str, int | None]:
    return (
        text(value.get("type")) or "an exception",
        text(value.get("message")) or "",
        integer(value.get("errno")),
    )


def _kind(link: tuple[str, str, int | None], bases: list[str], inner: str, free: int | None) -> str | None:
    name, message, errno = link
    family = {name, *bases}
    if name.endswith(".KeyboardInterrupt"):
        return "interrupted"
    if family & set(_TORCH_OOM):
        return "gpu-oom"
    if family & set(_DISTRIBUTED) or name.startswith("torch.distributed.elastic."):
        return "distributed"
    if _is_memory_error(family):
        return "memory-error"
    if _is_os_error(family, name):
        return _os_error_kind(message, errno, inner, free)
    if _is_library_error(family, name):
        return _library_kind(name, message, free)
    return None


def _is_memory_error(family: set[str]) -> bool:
    return "builtins.MemoryError" in family or any(name.endswith("._ArrayMemoryError") for name in family)


def _is_os_error(family: set[str], name: str) -> bool:
    known = (
        "OSError",
        "IOError",
        "BlockingIOError",
        "ConnectionError",
        "ConnectionResetError",
        "BrokenPipeError",
    )
    return "builtins.OSError" in family or name.removeprefix("builtins.") in known


def _os_error_kind(message: str, errno: int | None, inner: str, free: int | None) -> str | None:
    if errno is None:  # a DataLoader worker's error comes over as text alone
        for number in (*_ERRNO_KINDS, EAGAIN):
            if f"[Errno {number}]" in message:
                errno = number
    if errno == EAGAIN and (inner.endswith(_FORKING) or any(f"/{file}" in message for file in _FORKING)):
        return "process-limit"
    if errno is None and " requested and " in message and " written" in message and _is_full(free):
        return "disk-full"  # numpy's word for a short write
    return _ERRNO_KINDS.get(errno) if errno is not None else None


def _is_library_error(family: set[str], name: str) -> bool:
    if "builtins.RuntimeError" in family or name.endswith("SafetensorError"):
        return True
    return name.startswith(("tensorflow.", "torch.", "jaxlib.", "cupy", "tokenizers", "xgboost", "h5py"))


def _library_kind(name: str, message: str, free: int | None) -> str | None:
    for kind, words in _TEXTS:
        if any(word in message for word in words):
            return kind
    if name == _TF_EXHAUSTED or "RESOURCE_EXHAUSTED" in message:
        return "memory-error" if "device:CPU" in message else "gpu-oom"
    writing = (
        "inline_container.cc" in message and "unexpected pos" in message
    ) or "iostream error" in message
    if writing and _is_full(free):  # torch.save's word for a disk that filled up
        return "disk-full"
    return None


def _is_full(free: int | None) -> bool:
    return free is not None and free < 16 << 20
