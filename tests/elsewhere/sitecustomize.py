"""A stand-in for macOS and Windows, which we do not have: loaded by a Python that finds this folder on PYTHONPATH.

It takes away what those systems lack: modules, functions, constants, /proc and /sys. It adds nothing, and paths stay
as they are on Linux. Processes that a child starts with `-I` do not load it.
"""

from __future__ import annotations

import builtins
import concurrent.futures.process
import ctypes
import faulthandler
import importlib.machinery
import mmap
import multiprocessing.synchronize
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import types
from typing import Any

SYSTEM = os.environ["BUOY_TEST_SYSTEM"]

# Of every module: what only Linux has, and what Windows lacks besides.
LINUX: dict[Any, str] = {
    os: "pidfd_open memfd_create sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise eventfd waitid "
    "P_PID O_DIRECT O_TMPFILE MFD_CLOEXEC copy_file_range fdatasync CLD_EXITED CLD_DUMPED CLD_STOPPED WNOWAIT getxattr",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX",
    select: "epoll",
    socket: "SOCK_SEQPACKET",
}
POSIX: dict[Any, str] = {
    os: "fork forkpty register_at_fork killpg getpgid setpgid getpgrp setsid getsid getuid geteuid getgid getegid "
    "uname nice getpriority setpriority PRIO_PROCESS wait3 wait4 statvfs fstatvfs mkfifo openpty pread pwrite preadv "
    "pwritev posix_spawn sync O_DIRECTORY O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_SYNC getloadavg sysconf ttyname tcgetpgrp "
    "tcsetpgrp sendfile chown fchown lchown WEXITED WSTOPPED",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGBUS SIGTRAP SIGQUIT SIGXCPU SIGXFSZ SIGCONT SIGSTOP "
    "SIGTSTP SIGTTOU SIGTTIN SIGPIPE SIGWINCH SIGVTALRM SIGPROF setitimer alarm ITIMER_REAL pthread_sigmask sigwait "
    "pause siginterrupt SIG_BLOCK SIG_UNBLOCK SIG_SETMASK pthread_kill",
    select: "poll POLLIN POLLOUT",
    socket: "AF_UNIX send_fds recv_fds",
    mmap: "PROT_READ PROT_WRITE MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS",
    faulthandler: "register unregister",
}
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"}
FOLDERS = ("/proc", "/sys/", "/dev/shm", "/dev/kmsg")
FRAMEWORKS = ("torch", "tensorflow", "keras", "transformers", "lightning")
LIBC = ("prctl", "malloc_trim", "mallopt", "mallinfo2")


class Finder:
    """No POSIX modules on Windows. The frameworks are those for Linux: they find all of it, until buoy's turn comes."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FRAMEWORKS:
            sys.platform = "linux"
        elif name.partition(".")[0] == "buoy":
            turn_away()
        elif SYSTEM == "win32" and sys.platform == SYSTEM and name in POSIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def turn_away() -> None:
    sys.platform = SYSTEM
    for name in POSIX_MODULES if SYSTEM == "win32" else ():
        sys.modules.pop(name, None)


class Library(ctypes.CDLL):
    """The C library of another system."""

    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        if name is None and SYSTEM == "win32":
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name in LIBC:
            raise AttributeError(name)
        return super().__getattr__(name)


def hide(module: types.ModuleType, names: list[str]) -> None:
    before = vars(module).get("__getattr__")
    hidden = {name: vars(module).pop(name) for name in names if name in vars(module)}

    def lookup(name: str) -> Any:
        if sys.platform == "linux" and name in hidden:
            return hidden[name]
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = lookup


def hide_folders(module: types.ModuleType, name: str) -> None:
    original = getattr(module, name)

    def function(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return original(path, *arguments, **options)

    setattr(module, name, function)


def become(system: str) -> None:
    # What the standard library itself was loaded with, it keeps: it is that of Linux.
    sysconfig.get_config_vars()
    subprocess.signal = types.SimpleNamespace(**vars(signal))  # type: ignore[attr-defined]
    shutil.os = types.SimpleNamespace(**vars(os))  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # Apple's, which urllib asks for
    vars(sys.modules["_scproxy"]).update(_get_proxy_settings=dict, _get_proxies=dict)
    assert concurrent.futures.process and multiprocessing.synchronize and importlib.machinery
    for lacking in (LINUX, POSIX) if system == "win32" else (LINUX,):
        for module, names in lacking.items():
            hide(module, names.split())
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
        hide_folders(os, name)
    hide_folders(builtins, "open")
    ctypes.CDLL = Library  # type: ignore[misc]
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    turn_away()


become(SYSTEM)
