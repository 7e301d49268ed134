"""`buoy notebook install`: a start-up file of IPython that loads buoy in each new kernel."""

from __future__ import annotations

import os
import shlex

from buoy.errors import UsageError

_NAME = "50-buoy.py"
_MARK = "# written by `buoy notebook install`; `buoy notebook uninstall` removes it\n"
_CODE = (
    _MARK
    + """\
try:
    if get_ipython().__class__.__name__ != "TerminalInteractiveShell":
        get_ipython().extension_manager.load_extension("buoy")
except Exception as error:  # a notebook must open, whatever happened to buoy
    print(f"buoy was not loaded: {error}")
"""
)


def path() -> str:
    """Where the start-up file is, or would be."""
    home = os.environ.get("IPYTHONDIR") or os.path.join(os.path.expanduser("~"), ".ipython")
    return os.path.join(home, "profile_default", "startup", _NAME)


def is_installed() -> bool:
    """Whether new kernels load buoy."""
    return os.path.exists(path())


def install() -> str:
    """Write the start-up file; returns its path."""
    target = path()
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8") as file:
            file.write(_CODE)
    except OSError as error:
        raise UsageError(
            "cannot write IPython's start-up file",
            received=f"{target} ({error.strerror})",
            expected="a folder that can be written",
            hint="put `%load_ext buoy` in the first cell instead, or set IPYTHONDIR",
        ) from error
    return target


def uninstall() -> bool:
    """Remove the start-up file if it is ours; False when there was none."""
    target = path()
    try:
        with open(target, encoding="utf-8") as file:
            if not file.read().startswith(_MARK):
                raise UsageError(
                    "this start-up file has been edited; leaving it alone",
                    received=target,
                    expected="the file that `buoy notebook install` wrote",
                    hint=f"remove it by hand: `rm {shlex.quote(target)}`",
                )
    except FileNotFoundError:
        return False
    os.unlink(target)
    return True
