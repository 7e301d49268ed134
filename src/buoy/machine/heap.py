"""Where the objects of a Python process are: whose code they belong to, who holds them, which memory they have."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import re
import sys
import sysconfig
import time
import types
from typing import Any

FRAMES = ("DataFrame", "Series")
_PYTHON = tuple(sysconfig.get_path(which) + os.sep for which in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def frame_items(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The names and values of a frame's local variables; the frame keeps no copy of them."""
    found = frame.f_locals
    items = list(found.items())
    if sys.version_info < (3, 13) and is_function(frame) and sys.getrefcount(found) == 3:
        # The frame would keep this copy, and with it what the variables are now, until it ends.
        found.clear()
    return items


def is_function(frame: types.FrameType) -> bool:
    """Whether its variables are its own: those of a script or a cell are the module's."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def is_module_of_person(module: types.ModuleType) -> bool:
    """A script, a notebook, or a module beside them."""
    if module.__name__ == "__main__":
        return True
    file = module.__dict__.get("__file__")
    return isinstance(file, str) and not is_library(file)


def is_library(file: str) -> bool:
    """Whether code of this file is an installed package's, Python's or ours."""
    return file.startswith(("<frozen", OURS, *_PYTHON)) or any(folder in file for folder in _PACKAGES)


OF_IPYTHON = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[iod]h|_exit_code|In|Out|get_ipython|exit|quit|open|__\w+__")
TRACEBACK = "sys.last_traceback"
_ALONE, _SERVED = 0.5, 0.02


def tracked(*kinds: type) -> list[Any]:
    """What the garbage collector knows, of just these types.

    While everything is held no other thread should run: a tuple that one is just building must not have a second
    owner, or Python raises SystemError there. So threads ask for their turn after half a second only, as of the time
    when all who wait by the usual interval have been served.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_ALONE)
    try:
        time.sleep(_SERVED)
        return [thing for thing in gc.get_objects() if type(thing) in kinds]
    finally:
        sys.setswitchinterval(usual)


def _array(thing: Any) -> tuple[int, int] | None:
    """The memory that a NumPy array is in; a view's is that of the array it was made of."""
    if not any(base.__name__ == "ndarray" for base in type(thing).__mro__):
        return None
    while isinstance(thing.base, type(thing)) or type(thing.base).__name__ == "ndarray":
        thing = thing.base
    if type(thing.base).__name__ == "mmap":
        return None  # a file's pages
    return thing.ctypes.data, int(thing.nbytes)


def is_object_array(thing: Any) -> bool:
    """Whether an array holds Python objects, whose memory is not its own: strings of a data frame."""
    return type(thing).__name__ == "ndarray" and bool(thing.dtype.hasobject) and thing.dtype.kind == "O"


def _data_frame(thing: Any) -> tuple[int, int] | None:
    """What a data frame holds that is no NumPy array, without the strings in it; its arrays are found by themselves."""
    if type(thing).__name__ in FRAMES and hasattr(type(thing), "estimated_size"):  # polars
        return id(thing), int(thing.estimated_size())
    if any(base.__name__ == "ArrowExtensionArray" for base in type(thing).__mro__):
        return id(thing), int(thing.nbytes)
    return None


def package(kind: type) -> str:
    """`torch` of `torch.nn.Linear`; empty where a class has something else by the name of its module."""
    return kind.__module__.partition(".")[0] if isinstance(kind.__module__, str) else ""


def block(thing: Any, kind: type) -> tuple[int, int, str] | None:
    """(address, bytes, device) of a thing that has memory of its own which Python does not see; else None."""
    measure = measure_of(kind)
    if not measure:
        return None
    try:
        if measure == "torch":
            return _of_torch(thing)
        if measure == "tensorflow":
            return _of_tensorflow(thing)
        if measure == "jax":
            return id(thing), int(thing.nbytes), ""
        found = _array(thing) if measure == "array" else _data_frame(thing)
        return (*found, "") if found is not None else (id(thing), 0, "")
    except Exception:  # noqa: BLE001 - odd objects (fake, sparse, half-built) are of no interest here
        return id(thing), 0, ""


@functools.cache
def measure_of(kind: type) -> str:
    """What a class's memory is measured as; empty: it has none of its own."""
    root = package(kind)
    names = {base.__name__ for base in kind.__mro__}
    if "ndarray" in names:
        return "array"
    if root == "torch" and "Tensor" in names:  # a class of the user's own may compute when it is asked
        return "torch"
    if root == "tensorflow" and names & {"EagerTensor", "BaseResourceVariable"}:
        return "tensorflow"
    if root == "jaxlib" and "ArrayImpl" in names:
        return "jax"
    return "data frame" if "ArrowExtensionArray" in names or root == "polars" else ""


def _of_torch(thing: Any) -> tuple[int, int, str]:
    storage, device = thing.untyped_storage(), thing.device
    size = int(storage.nbytes())
    if device.type == "cpu":
        return storage.data_ptr() or id(thing), size, ""
    try:
        return storage.data_ptr() or id(thing), size, str(device)
    except RuntimeError:  # a device without addresses
        return id(thing), size, str(device)


def _of_tensorflow(thing: Any) -> tuple[int, int, str]:
    # Two Python objects can stand for one variable: its handle tells.
    address = id(thing.handle) if hasattr(type(thing), "handle") else id(thing)
    device = str(thing.device).rpartition("device:")[2].lower()
    size = int(thing.shape.num_elements() or 0) * int(thing.dtype.size)
    return address, size, device if device.startswith(("gpu", "tpu")) else ""


def of_ipython() -> list[Any]:
    """The notebook's shell, where everything comes together: its outputs are asked for by themselves."""
    script = vars(sys.modules["__main__"])
    shell = getattr(script.get("get_ipython"), "__self__", None)
    return [shell, getattr(shell, "displayhook", None), script, script.get("Out")]


def last_traceback() -> list[Any]:
    """Local variables of the functions that an exception, shown last, went through."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    tracebacks = [getattr(sys, "last_traceback", None)]
    while isinstance(error, BaseException) and len(tracebacks) < 100:
        tracebacks.append(error.__traceback__)
        error = error.__cause__ or error.__context__
    values: list[Any] = []
    for traceback in tracebacks:
        while traceback is not None:
            frame = traceback.tb_frame
            if is_function(frame):
                values += [value for _, value in frame_items(frame)]
            traceback = traceback.tb_next
    return values
