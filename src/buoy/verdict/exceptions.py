"""Which kind of death an uncaught exception is: one classifier for the exceptions of every framework.

The outermost exception decides. One that is only in its chain may have been handled before the outer one was raised, so
it makes the finding no more than likely. A text counts only in exceptions of the type that libraries raise, and words
that anybody may quote in a RuntimeError of their own are no proof there. The same texts say how many bytes an
allocation asked for, and which child process was lost; the line that raised such an exception is not at fault.
"""

from __future__ import annotations

import signal
from typing import Any, Literal, NamedTuple

from buoy.errors import BuoyError
from buoy.fields import count, integer, mapping, mappings, text
from buoy.microbatch.errors import GPU_OWN, GPU_QUOTED, HOST_OWN, HOST_QUOTED, TENSORFLOW_TYPE, TORCH_TYPES
from buoy.text import printable, whole_number
from buoy.units import parse_bytes
from buoy.verdict.model import Grade
from buoy.verdict.status import Status, make_status

_WIDTHS = {
    "bool": 1, "int8": 1, "uint8": 1, "half": 2, "bfloat16": 2, "float16": 2, "int16": 2, "float": 4, "float32": 4,
    "int32": 4, "double": 8, "float64": 8, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_UNITS = ("bytes", "B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_asked_for(message: str) -> int | None:
    """The size of the allocation a message speaks of; None when it names none.

    >>> bytes_asked_for("Unable to allocate 745. GiB for an array with shape (100000, 1000, 1000)")
    799937658880
    >>> bytes_asked_for("OOM when allocating tensor with shape[10,20] and type float on /job:localhost")
    800
    """
    for marker in ("tried to allocate ", "Tried to allocate ", "Unable to allocate "):
        _, found, rest = message.partition(marker)
        if found:
            return _amount(rest)
    _, found, rest = message.partition("tensor with shape[")
    return _tensor(rest) if found else None


def _amount(rest: str) -> int | None:
    words = rest.split(" ", 2)
    unit = words[1].rstrip(".,;:\n") if len(words) > 1 else ""
    if unit not in _UNITS:
        return None
    try:
        return parse_bytes(words[0] + ("" if unit == "bytes" else unit))
    except BuoyError:
        return None


def _tensor(rest: str) -> int | None:
    shape, closed, after = rest.partition("]")
    kind = after.removeprefix(" and type ").split(" ", 1)[0]
    width = _WIDTHS.get(kind)
    sides = [whole_number(side.strip()) for side in shape.split(",")] if shape else []
    if not closed or width is None:
        return None
    for side in sides:
        if side is None:
            return None
        width *= side
    return width if width < 1 << 62 else None


ENOMEM, EAGAIN, ENFILE, EMFILE, EFBIG, ENOSPC, EDQUOT = 12, 11, 23, 24, 27, 28, 122

_ERRNO_KINDS = {
    ENOSPC: "disk-full", EDQUOT: "disk-full", EFBIG: "file-size-limit", EMFILE: "open-files",
    ENFILE: "open-files", ENOMEM: "memory-error",
}  # fmt: skip

# Words that only the library itself uses.
_OWN_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("shm-full", (
        "unable to allocate shared memory(shm)", "unable to open shared memory object",
        "unable to write to file </torch_", "unable to resize file </torch_", "unable to stretch file </torch_",
    )),
    ("memory-error", HOST_OWN),
    ("distributed", (
        "gloo/transport", "ProcessGroupGloo", "ProcessGroupNCCL", "NCCL error", "ncclRemoteError",
        "ncclSystemError", "ncclInternalError", "Watchdog caught collective operation timeout", "[c10d]",
        "TCPStore",
    )),
    ("gpu-fault", (
        "CUDA error: device-side assert", "CUDA error: an illegal memory access",
        "CUDA error: unspecified launch failure", "CUDA error: misaligned address",
        "CUDA error: an illegal instruction", "CUDA error: uncorrectable ECC",
        "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_MAPPING_ERROR",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
    )),
    ("gpu-oom", GPU_OWN),
)  # fmt: skip
# Words that other programs quote: proof only from a library's own type, or as the whole message.
_COMMON_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("disk-full", ("No space left on device", "Disk quota exceeded", "(os error 28)", "(os error 122)")),
    ("open-files", ("Too many open files", "received 0 items of ancdata")),
    ("process-limit", ("can't start new thread",)),
    ("gpu-fault", ("device-side assert", "illegal memory access", "fallen off the bus")),
    ("gpu-oom", GPU_QUOTED),
    ("memory-error", HOST_QUOTED),
)

_DISTRIBUTED = tuple(f"torch.distributed.Dist{part}Error" for part in ("Backend", "Network", "Store", ""))
_SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException"
_LIBRARIES = ("tensorflow.", "torch.", "jaxlib.", "cupy", "safetensors", "tokenizers", "xgboost", "h5py")
_FORKING = ("subprocess.py", "popen_fork.py", "popen_spawn_posix.py", "popen_forkserver.py")

_SHM = "/dev/shm"  # noqa: S108 - a comparison

_Kind = tuple[str, Grade]
_SIGNALS: dict[str, _Kind] = {
    word: (kind, "certain")
    for kind, names in (("terminated", ("15", "Signals.SIGTERM")), ("interrupted", ("2", "Signals.SIGINT")))
    for word in names
}


class ExceptionFinding(NamedTuple):
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

    @property
    def short(self) -> str:
        """`KeyError: 'label'`, on one line."""
        name = self.type.removeprefix("builtins.")
        return f"{name}: {printable(self.message, 160)}" if self.message else name


class _Link(NamedTuple):
    type: str
    message: str
    errno: int | None
    bases: frozenset[str]
    file: str
    """Where it was raised."""
    free: int | None
    starting_process: bool
    on_full_disk: bool = False


def classify(note: dict[str, Any], disk_was_full: bool = False) -> ExceptionFinding:
    """The kind of an exception note; its own words before those of its chain.

    `disk_was_full`: whether another disk of this training, than the one that the note is about, had no room.
    """
    outer = _link(note)._replace(on_full_disk=disk_was_full or _is_full(count(note.get("disk_free"))))
    chosen, found = outer, _kind(outer)
    if found is None:
        for link in map(_link, mappings(note.get("chain"))):
            inner = _kind(link._replace(on_full_disk=outer.on_full_disk))
            if inner is not None:
                chosen, found = link, (inner[0], "possible" if inner[1] == "possible" else "likely")
                break
    kind, grade = found or ("python-exception", "certain")
    inodes = count(note.get("inodes_free"))
    quota = chosen.errno == EDQUOT or "quota" in chosen.message.lower()
    if kind == "disk-full" and grade == "certain" and not quota and not (_is_full(outer.free) or inodes == 0):
        grade = "likely"  # the same error comes of inotify watches and semaphores that run out
    path = text(note.get("filename"))
    if kind == "disk-full" and not quota and _was_shm(note, path, outer.on_full_disk or inodes == 0):
        kind = "shm-full"
    return ExceptionFinding(
        kind, grade, chosen.type, chosen.message, chosen.errno, bytes_asked_for(chosen.message), path, outer.free,
        count(note.get("shm_free")),
    )  # fmt: skip


def _was_shm(note: dict[str, Any], path: str | None, is_disk_full: bool) -> bool:
    """Whether it was the shared memory that had no room: the file lies there, or no other place is known to be full."""
    if (path is not None and path.startswith(_SHM)) or note.get("on_shm") is True:
        return True
    return path is None and not is_disk_full and _is_full(count(note.get("shm_free")))


def _link(value: dict[str, Any]) -> _Link:
    bases = value.get("bases")
    return _Link(
        type=text(value.get("type")) or "an exception",
        message=text(value.get("message")) or "",
        errno=integer(value.get("errno")),
        bases=frozenset(base for base in bases if isinstance(base, str))
        if isinstance(bases, list)
        else frozenset(),
        file=text(mapping(value.get("inner")).get("file")) or "",
        free=count(value.get("disk_free")),
        starting_process=value.get("starting_process") is True,
    )


def _kind(link: _Link) -> _Kind | None:
    family = {link.type, *link.bases}
    if link.type.endswith(".KeyboardInterrupt"):
        return "interrupted", "certain"
    if family & TORCH_TYPES:
        return "gpu-oom", "certain"
    if link.type == _SIGNALLED:  # what torchrun's signal handler raises
        return _SIGNALS.get(link.message.rpartition(" ")[2])
    if family & set(_DISTRIBUTED) or link.type.startswith("torch.distributed.elastic.rendezvous."):
        return "distributed", "likely"
    if "builtins.MemoryError" in family or link.type.endswith("._ArrayMemoryError"):
        return "memory-error", "certain"
    if "builtins.OSError" in family or link.errno is not None:
        return _system_kind(link)
    is_library = link.type.startswith(_LIBRARIES)
    if is_library or "builtins.RuntimeError" in family:
        return _library_kind(link, is_library)
    return None


def _system_kind(link: _Link) -> _Kind | None:
    errno = link.errno
    if errno is None:  # a DataLoader worker's error comes over as text alone
        errno = next(
            (number for number in (*_ERRNO_KINDS, EAGAIN) if f"[Errno {number}]" in link.message), None
        )
    if errno == EAGAIN:  # of a fork; a socket that does not wait says the same
        if link.file.endswith(_FORKING) or any(f"/{file}" in link.message for file in _FORKING):
            return "process-limit", "certain"
        return ("process-limit", "likely") if link.starting_process else None
    if (
        errno is None
        and " requested and " in link.message
        and " written" in link.message
        and link.on_full_disk
    ):
        return "disk-full", "likely"  # numpy's words for a short write
    return (_ERRNO_KINDS[errno], "certain") if errno in _ERRNO_KINDS else None


def _library_kind(link: _Link, is_library: bool) -> _Kind | None:
    message = link.message
    for kind, own in _OWN_WORDS:
        if any(word in message for word in own):
            return kind, "likely" if kind == "distributed" else "certain"
    for kind, common in _COMMON_WORDS:
        if any(word in message for word in common):
            return kind, "certain" if is_library or message in common else "likely"
    if link.type == TENSORFLOW_TYPE or (is_library and "RESOURCE_EXHAUSTED" in message):
        return "memory-error" if "device:CPU" in message else "gpu-oom", "certain"
    if link.on_full_disk and (is_failed_write(message) or "iostream error" in message):
        return "disk-full", "likely"
    return None


def is_in_a_worker(finding: ExceptionFinding) -> bool:
    """Whether a DataLoader worker raised it, and the main process only passes it on."""
    return "DataLoader worker" in finding.message


def is_failed_write(message: str) -> bool:
    """Whether these are torch.save's words for a write that failed: it does not say why, a full disk is the usual one.

    >>> is_failed_write("[enforce fail at inline_container.cc:672] . unexpected pos 896 vs 790")
    True
    """
    if "PytorchStreamWriter failed writing" in message:
        return True
    return "inline_container.cc" in message and "unexpected pos" in message


def _is_full(free: int | None) -> bool:
    return free is not None and free < 16 << 20


_ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_SPAWNED = ("torch.multiprocessing.spawn.ProcessExitedException",)
_POOLS = ("BrokenProcessPool", "TerminatedWorkerError", "WorkerCrashedError")
_SOURCE = "the parent's exception"
_BROKEN = (
    "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError",
    "IncompleteReadError",
)  # fmt: skip
_SILENT = ("EOFError", "Empty", "TimeoutError")
"""What a line to a child says whose other end is gone; a file that is cut short, or a slow server, says the same."""
_LINES_TO_CHILDREN = ("/multiprocessing/", "/concurrent/futures/")


class LostChild(NamedTuple):
    """Who was lost, by which pids, and how it ended as far as the words say."""

    who: str
    pids: tuple[int, ...] = ()
    status: Status = Status()
    exact: bool = False
    """Whether the words come of the parent's own wait status, in a type that only its library raises."""
    is_in_chain: bool = False
    """Whether another exception followed from it, or while it was dealt with."""


BrokenLine = Literal["to a child", "to anyone"]
"""Whose end a line led to: only processes that belong together talk through `multiprocessing`."""


def lost_child(note: dict[str, Any]) -> LostChild | None:
    """What an exception note says of a lost child; None when it reports none, itself or in its chain."""
    found = _reported(note)
    if found is not None:
        return found
    inner = next((lost for lost in map(_reported, mappings(note.get("chain"))) if lost is not None), None)
    return inner._replace(exact=False, is_in_chain=True) if inner is not None else None


def broken_line(note: dict[str, Any]) -> BrokenLine | None:
    """The line to another process, if that it broke is what an exception or its chain says."""
    kinds = {str(link.get("type")).rpartition(".")[2] for link in (note, *mappings(note.get("chain")))}
    file = text(mapping(note.get("inner")).get("file")) or ""
    if any(part in file for part in _LINES_TO_CHILDREN):
        return "to a child" if kinds & {*_BROKEN, *_SILENT} else None
    return "to anyone" if kinds & {*_BROKEN} else None


def _reported(note: dict[str, Any]) -> LostChild | None:
    kind, message = text(note.get("type")) or "", text(note.get("message")) or ""
    if kind == _ELASTIC:
        return _failed_rank(message)
    if kind in _SPAWNED:
        return LostChild(_before(message, " terminated") or "a spawned process", (), _status(message), True)
    if kind == "subprocess.CalledProcessError" and "died with <Signals." in message:
        name = _before(message.partition("died with <Signals.")[2], ":")
        return LostChild("the command that it ran", (), _by_name(name), True)
    if message.startswith("DataLoader worker (pid"):
        links = [message, *(text(link.get("message")) or "" for link in mappings(note.get("chain")))]
        known = (_status(words) for words in links if words.startswith("DataLoader worker (pid"))
        status = next((found for found in known if found.known), Status())
        return LostChild(
            "DataLoader worker", pids_in(message.partition(" exited ")[0].partition(" is killed")[0]), status
        )
    if kind.rpartition(".")[2] in _POOLS:
        return LostChild("a worker of the process pool", (), _status(message))
    return None


def pids_in(message: str) -> tuple[int, ...]:
    """The numbers of a message that may be pids: `DataLoader worker (pid(s) 5097) exited unexpectedly`."""
    digits = "".join(sign if sign.isdecimal() else " " for sign in message.partition("pid")[2]).split()
    return tuple(int(word) for word in digits if len(word) < 9)


def _failed_rank(message: str) -> LostChild:
    """The root cause that torchelastic names: the last of its list, which a shortened message still holds."""
    _, found, root = message.partition("Root Cause")
    if not found:
        root = message.partition(" ... ")[2]
    rank = pid = code = None
    for line in root.splitlines():
        name, _, value = line.strip().partition(":")
        words = value.replace("(", " ").replace(")", " ").split()
        if name.strip() == "rank" and words:
            rank = whole_number(words[0])
        elif name.strip() == "exitcode" and words:
            code = whole_number(words[0].removeprefix("-"))
            code = -code if code is not None and words[0].startswith("-") else code
            pid = next(iter(pids_in(value)), None)
    if code is None or not -65 < code < 256:
        return LostChild("a rank", exact=True)
    raw = -code if code < 0 else code << 8
    return LostChild(
        f"rank {rank}" if rank is not None else "a rank",
        (pid,) if pid else (),
        make_status(raw, _SOURCE),
        True,
    )


def _status(message: str) -> Status:
    """How the words say it ended: `killed by signal: Killed`, `with signal SIGKILL`, `with exit code 3`."""
    for marker in ("killed by signal: ", "terminated with signal ", "{"):
        _, found, rest = message.partition(marker)
        if found:
            return _by_name(rest.partition(".")[0].partition("(")[0])
    _, found, rest = message.partition("with exit code ")
    code = whole_number(rest.split(" ", 1)[0].rstrip(".")) if found else None
    return make_status(code << 8, _SOURCE) if code is not None and code < 256 else Status()


def _by_name(name: str) -> Status:
    for number in signal.Signals:
        if name.strip() in (number.name, signal.strsignal(number)):
            return make_status(int(number), _SOURCE)
    return Status()


def _before(message: str, marker: str) -> str:
    words, found, _ = message.partition(marker)
    return words.strip() if found and len(words) < 40 else ""
