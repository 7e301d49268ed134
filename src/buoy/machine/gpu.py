"""NVIDIA GPUs through the driver's own library (NVML) and ctypes: no package needed."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from typing import Any

_SIGNS = ("/dev/nvidiactl", "/dev/dxg")  # the driver, and the same under WSL
# Loader path, Colab, Kaggle, WSL.
_FOLDERS = (
    "",
    "/usr/lib64-nvidia/",
    "/usr/local/nvidia/lib64/",
    "/usr/lib/wsl/lib/",
)
_NAME = "libnvidia-ml.so.1"


class Nvml:
    """An open NVML library. No call raises; what a device does not say is None."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises OSError when the library does not answer; `open_nvml` is the way in."""
        self._library: ctypes.CDLL | None = library
        self._handles: list[Any] = []
        self._names: list[str | None] = []
        if self._call("nvmlInit_v2") is None:
            raise OSError("NVML did not start")
        self._find_devices()

    def devices(self) -> list[dict[str, object]]:
        """`[{"index", "name", "total", "used", "util"}]`: bytes, and percent busy of late."""
        found: list[dict[str, object]] = []
        for index, name in enumerate(self._names):
            total, used = self._memory(index)
            util = self._utilisation(index)
            found.append({"index": index, "name": name, "total": total, "used": used, "util": util})
        return found

    def close(self) -> None:
        """Let the driver go."""
        self._call("nvmlShutdown")
        self._library, self._handles, self._names = None, [], []

    def _find_devices(self) -> None:
        import ctypes

        count = ctypes.c_uint()
        if self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)) is None:
            return
        for index in range(min(count.value, 64)):
            handle = ctypes.c_void_p()
            if (
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
                is None
            ):
                # A device that has fallen off the bus keeps its place in the list.
                handle = ctypes.c_void_p(None)
            self._handles.append(handle)
            buffer = ctypes.create_string_buffer(96)
            answered = self._call("nvmlDeviceGetName", handle, buffer, ctypes.c_uint(96))
            self._names.append(None if answered is None else buffer.value.decode("utf-8", "replace"))

    def _memory(self, index: int) -> tuple[int | None, int | None]:
        import ctypes

        numbers = (ctypes.c_ulonglong * 3)()  # total, free, used
        if self._call("nvmlDeviceGetMemoryInfo", self._handles[index], numbers) is None:
            return None, None
        return numbers[0], numbers[2]

    def _utilisation(self, index: int) -> int | None:
        import ctypes

        numbers = (ctypes.c_uint * 2)()  # gpu, memory
        if self._call("nvmlDeviceGetUtilizationRates", self._handles[index], numbers) is None:
            return None
        return numbers[0]

    def _call(self, name: str, *arguments: object) -> bool | None:
        """True when NVML did it; None for any failure, a driver too old to have the function included."""
        function: Callable[..., int] | None = getattr(self._library, name, None)
        if function is None:
            return None
        return True if function(*arguments) == 0 else None


def open_nvml(library: str | None = None) -> Nvml | None:
    """The driver's library, or None where there is no NVIDIA driver.

    Without a driver's device file ctypes is not even imported, which would cost the sidecar a megabyte.
    """
    if library is None and not any(os.path.exists(sign) for sign in _SIGNS):
        return None
    try:
        import ctypes
    except ImportError:  # a Python built without libffi
        return None
    for path in [library] if library is not None else [folder + _NAME for folder in _FOLDERS]:
        try:
            return Nvml(ctypes.CDLL(path))
        except OSError:
            continue
    return None


def driver_names(root: str = "/") -> list[str]:
    """Model names from /proc/driver/nvidia, in bus order: a second way when NVML is silent."""
    from buoy.machine.procfs import read_bytes

    folder = root.rstrip("/") + "/proc/driver/nvidia/gpus"
    try:
        devices = sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []
    names = []
    for device in devices[:64]:
        for line in read_bytes(f"{folder}/{device}/information", 4096).decode("utf-8", "replace").split("\n"):
            key, _, value = line.partition(":")
            if key.strip() == "Model" and value.strip():
                names.append(value.strip())
    return names
