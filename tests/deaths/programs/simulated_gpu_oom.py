"""Raises what torch raises when the GPU's memory is gone; there is no GPU here."""

import stage  # isort: skip
import torch

stage.ready()
raise torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB of which 1.06 "
    "GiB is free. Including non-PyTorch memory, this process has 13.67 GiB memory in use. Of the allocated "
    "memory 13.24 GiB is allocated by PyTorch, and 312.00 MiB is reserved by PyTorch but unallocated."
)
