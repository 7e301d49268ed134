"""One classifier for every way in which libraries say that memory ran out, and for what only sounds like it."""

from __future__ import annotations

import pytest

from buoy.errors import BuoyError
from buoy.microbatch.errors import is_oom


def library_error(name: str, module: str, base: type[Exception] = RuntimeError) -> type[Exception]:
    """A type as the library defines it; the library itself need not be there."""
    return type(name, (base,), {"__module__": module})


TORCH = library_error("OutOfMemoryError", "torch")
ACCELERATOR = library_error("AcceleratorError", "torch")
EXHAUSTED = library_error("ResourceExhaustedError", "tensorflow.python.framework.errors_impl", Exception)
XLA = library_error("XlaRuntimeError", "jaxlib.xla_extension")
NUMPY = library_error("_ArrayMemoryError", "numpy._core._exceptions", MemoryError)


@pytest.mark.parametrize(
    "error",
    [
        TORCH("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.90 GiB total capacity)"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
        ACCELERATOR("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Allocation on device 0 would exceed allowed memory. (out of memory)"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB, max allowed: 9.07 GB)"),
        RuntimeError("HIP out of memory. Tried to allocate 1.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
        ),
        NUMPY("Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64"),
        MemoryError("std::bad_alloc"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        EXHAUSTED("OOM when allocating tensor with shape[512,512] and type float on /device:GPU:0"),
        XLA("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."),
        ExceptionGroup("workers", [ValueError("x"), MemoryError()]),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:40]}",
)
def test_these_mean_that_memory_ran_out(error: Exception) -> None:
    assert is_oom(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory"),
        library_error("MyError", "train")("CUDA out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x6 and 8x4)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        EXHAUSTED("/tmp/x; No space left on device"),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
        BuoyError("out of memory, and this batch cannot be cut"),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:40]}",
)
def test_these_do_not(error: BaseException) -> None:
    assert not is_oom(error)


def test_what_was_raised_from_an_oom_is_one() -> None:
    def wrapped() -> None:
        try:
            raise TORCH("CUDA out of memory.")
        except RuntimeError as error:
            raise ValueError("the model failed") from error

    with pytest.raises(ValueError, match="the model failed") as caught:
        wrapped()

    assert is_oom(caught.value)


def test_what_was_raised_in_place_of_an_oom_is_not() -> None:
    def replaced() -> None:
        try:
            raise TORCH("CUDA out of memory.")
        except RuntimeError:
            raise KeyError("label") from None

    with pytest.raises(KeyError) as caught:
        replaced()

    assert not is_oom(caught.value)


def test_ctrl_c_while_an_oom_was_handled_is_no_oom() -> None:
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = MemoryError()

    assert not is_oom(interrupt)


def test_a_chain_that_bites_its_tail_ends() -> None:
    error = ValueError("x")
    error.__cause__ = KeyError("y")
    error.__cause__.__cause__ = error

    assert not is_oom(error)
