"""How libraries say that memory ran out: the one list, for steps that are to be retried and for verdicts."""

from __future__ import annotations

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
