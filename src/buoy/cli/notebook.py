"""`buoy notebook`: load buoy by itself in each new kernel, or stop doing so."""

from __future__ import annotations

import os
import shlex
import sys

from buoy.cli.parser import Parser
from buoy.errors import ExitCode, UsageError

_DESCRIPTION = (
    "Load buoy by itself in each new notebook kernel; without it, `%load_ext buoy` in the first cell does."
)


def execute(arguments: list[str]) -> int:
    """Run the verb."""
    parser = Parser("buoy notebook", "buoy notebook install|uninstall|status", _DESCRIPTION)
    parser.add_argument("what", choices=("install", "uninstall", "status"))
    chosen = parser.parse_args(arguments)
    if chosen.what == "install":
        sys.stdout.write(f"{_install()}\n")
        sys.stderr.write("buoy: new kernels load buoy; restart those that are open\n")
    elif chosen.what == "uninstall":
        sys.stderr.write("buoy: removed\n" if _uninstall() else "buoy: it was not installed\n")
    else:
        installed = _is_installed()
        sys.stdout.write(f"{'installed' if installed else 'not installed'}: {_path()}\n")
        return int(ExitCode.OK if installed else ExitCode.FOUND)
    return int(ExitCode.OK)


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


def _path() -> str:
    """Where the start-up file is, or would be."""
    home = os.environ.get("IPYTHONDIR") or os.path.join(os.path.expanduser("~"), ".ipython")
    return os.path.join(home, "profile_default", "startup", _NAME)


def _is_installed() -> bool:
    """Whether new kernels load buoy."""
    return os.path.exists(_path())


def _install() -> str:
    """Write the start-up file; returns its path."""
    target = _path()
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


def _uninstall() -> bool:
    """Remove the start-up file if it is ours; False when there was none."""
    target = _path()
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
