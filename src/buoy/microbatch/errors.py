# ruff: noqa: N818 - these read as the sentence that they are: `except CannotSplit`
"""What can be wrong with a step; and whether an exception of a library says that memory ran out.

BuoyError
 +-- StepError            base of these: the state is as before the step, unless it is a TornStep
      +-- BadBatch        the batch has no samples, or its parts disagree
      +-- BadLoss         the loss function gave something that is no loss, or did more than compute one
      +-- CannotSplit     this model and loss cannot be computed in pieces with the same result
      +-- OutOfMemory     nothing is left to split
      +-- PeerFailed      another process of the group could not do its part
      +-- TornStep        an optimizer failed half-way without a copy to go back to
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from buoy.errors import BuoyError


class StepError(BuoyError):
    """A training step that was not done; the state is as before it."""


class BadBatch(StepError):
    """The batch is empty, or its parts have different numbers of samples."""


class BadLoss(StepError):
    """The loss is not a number to minimise, or computing it changed what it must not change."""


class CannotSplit(StepError):
    """Micro-batches would not give the full batch's gradient for this model and loss."""


class OutOfMemory(StepError):
    """The smallest possible piece of the step does not fit."""


class PeerFailed(StepError):
    """Another rank failed in this step, so this one did not do it either."""


class TornStep(StepError):
    """The optimizer's step failed after it had changed something: go back to the last checkpoint."""


# How libraries say that memory ran out: the one list, for steps that are to be retried and for verdicts.

TORCH_TYPES = frozenset(
    {"torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "torch._C.OutOfMemoryError"}
)
TENSORFLOW_TYPE = "tensorflow.python.framework.errors_impl.ResourceExhaustedError"

# Words that only the library itself uses.
GPU_OWN = (
    "CUDA out of memory. Tried to allocate", "HIP out of memory. Tried", "XPU out of memory. Tried",
    "MPS backend out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "hipErrorOutOfMemory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED",
    "would exceed allowed memory. (out of memory)",
)  # fmt: skip
HOST_OWN = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

# Words that other programs quote.
GPU_QUOTED = (
    "CUDA out of memory", "HIP out of memory", "XPU out of memory", "failed to allocate memory on device",
)  # fmt: skip
HOST_QUOTED = ("Cannot allocate memory", "std::bad_alloc")

# What cuDNN says when no algorithm's workspace fits, but not only then: worth a second try, and no proof of anything.
GPU_HINTS = ("Unable to find a valid cuDNN algorithm to run convolution",)


# Types that mean it whatever they say; numpy's _ArrayMemoryError and std::bad_alloc are of MemoryError's family.
_TYPES = TORCH_TYPES | {"builtins.MemoryError"}
_WORDS = GPU_OWN + GPU_QUOTED + GPU_HINTS + HOST_OWN + HOST_QUOTED
_LIBRARIES = ("torch", "tensorflow", "jaxlib", "jax", "cupy", "numba")
# TensorFlow says "exhausted" of disks and messages too.
_OTHER_RESOURCES = (
    "No space left on device",
    "quota",
    "Received message larger than max",
    "Too many open files",
)


def is_oom(error: BaseException) -> bool:
    """Whether this exception, or one that it was raised from, says that memory ran out.

    >>> is_oom(MemoryError()), is_oom(ValueError("CUDA out of memory")), is_oom(RuntimeError("CUDA out of memory."))
    (True, False, True)
    """
    if not isinstance(error, Exception) or isinstance(error, BuoyError):
        return (
            False  # Ctrl-C while an OOM was handled is a Ctrl-C; and what buoy raises is its last word on one
        )
    return any(_says_oom(link) for link in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those in its group, and those it was raised from, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting.append(link.__cause__ if link.__cause__ or link.__suppress_context__ else link.__context__)
        if isinstance(link, BaseExceptionGroup):
            waiting.extend(link.exceptions)


def _says_oom(link: BaseException) -> bool:
    family = {f"{base.__module__}.{base.__qualname__}" for base in type(link).__mro__}
    if family & _TYPES:
        return True
    message = str(link)
    if isinstance(link, OSError):
        return link.errno == errno.ENOMEM
    if TENSORFLOW_TYPE in family or "RESOURCE_EXHAUSTED" in message:
        library = TENSORFLOW_TYPE in family or _is_library(link)
        return library and not any(word in message for word in _OTHER_RESOURCES)
    # A user's own exception may say anything; libraries raise RuntimeError or a type of their own.
    if type(link) is RuntimeError or _is_library(link):
        return any(word in message for word in _WORDS)
    return False


def _is_library(link: BaseException) -> bool:
    return type(link).__module__.split(".")[0] in _LIBRARIES
