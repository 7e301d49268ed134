"""Raises what torch raises after a failed assertion in a CUDA kernel; there is no GPU here."""

import stage

stage.ready()
raise RuntimeError(
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some "
    "other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
    "CUDA_LAUNCH_BLOCKING=1"
)
