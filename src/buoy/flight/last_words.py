"""What a dying Python process can still say: its exception, an orderly exit, its stacks when a signal comes.

Signals are watched with `faulthandler`, in C: the dump is written even while the GIL is held, the action that was
there before (the default, or the user's handler) still happens, and `signal.getsignal` shows no trace of us.

Whether the kernel raised a fatal signal or somebody sent it with `kill` is in the `siginfo` that a signal handler gets:
a positive `si_code` is the kernel's own, and no process may send one to another (`man 2 rt_sigqueueinfo`). faulthandler
does not look at it, and at a crash no Python can run. So a few machine instructions in front of faulthandler's handler
copy that record into the beacon, then continue in faulthandler. Where they are not known (another processor than
x86-64), or memory may not be executed, a crash stays as likely as its traces make it.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import mmap
import os
import resource
import signal
import struct
import sys
import threading
import time
from itertools import pairwise
from types import FrameType, TracebackType

from buoy.errors import trouble
from buoy.flight.beacon import FATAL_AT, SIZE, Beacon
from buoy.flight.privacy import mask_text
from buoy.flight.stacks import STACKS_SIGNAL
from buoy.machine.files import high_number, open_new, open_old

SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Those that faulthandler handles."""
_SA_SIGINFO = 4
# struct sigaction of glibc and musl on x86-64: handler, mask (128 bytes), flags, restorer.
_ACTION = struct.Struct("<Q128sI4xQ")
# handler(rdi: number, rsi: siginfo, rdx: context)
_COPY = (
    b"\xf3\x0f\x1e\xfa"  # endbr64
    b"\x48\xb8%b"  # mov rax, PLACE
    b"\x48\x8b\x00"  # mov rax, [rax]            where the record goes
    b"\x48\x8b\x0e\x48\x89\x08"  # mov rcx, [rsi];    mov [rax], rcx        si_signo, si_errno
    b"\x48\x8b\x4e\x08\x48\x89\x48\x08"  # mov rcx, [rsi+8];  mov [rax+8], rcx      si_code
    b"\x48\x8b\x4e\x10\x48\x89\x48\x10"  # mov rcx, [rsi+16]; mov [rax+16], rcx     si_pid and si_uid, or si_addr
    b"\x48\xb8%b"  # mov rax, NEXT
    b"\xff\xe0"  # jmp rax                       faulthandler's own handler, as if the kernel had called it
)
_place: int | None = None
"""Address of the pointer to the record."""
_ours: set[int] = set()
"""Addresses of the handlers that stand before faulthandler's."""


def record_into(beacon: str) -> None:
    """From here on a fatal signal leaves its `siginfo` in this beacon; nothing changes where that cannot be done."""
    global _place
    if os.uname().machine != "x86_64" or struct.calcsize("P") != 8 or not faulthandler.is_enabled():
        return
    try:
        import ctypes

        record = _kept(_mapped(beacon)) + FATAL_AT
        _place = _place or _kept(_private_page())
        ctypes.c_uint64.from_address(_place).value = record
        _install(_place)
    except Exception as error:  # noqa: BLE001 - a crash is then only likely one, and the training continues
        trouble("who raised a fatal signal", error)


def _install(place: int) -> None:
    """Put the instructions before every handler of faulthandler's that has none yet."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    page = _private_page()
    start, actions = _kept(page), {}
    for number in SIGNALS:
        before = ctypes.create_string_buffer(_ACTION.size)
        if libc.sigaction(int(number), None, before):
            raise OSError(ctypes.get_errno(), "sigaction")
        handler, mask, flags, restorer = _ACTION.unpack(before.raw)
        if handler > 1 and handler not in _ours:  # neither the default nor ignored
            at = start + page.tell()
            page.write(_COPY % (struct.pack("<Q", place), struct.pack("<Q", handler)))
            actions[number] = (at, _ACTION.pack(at, mask, flags | _SA_SIGINFO, restorer))
    if libc.mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
    for number, (at, action) in actions.items():
        libc.sigaction(int(number), action, None)
        _ours.add(at)


def _private_page() -> mmap.mmap:
    """A page that a forked child has for itself: what it writes there is not its parent's."""
    return mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _mapped(path: str) -> mmap.mmap:
    descriptor = open_old(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)


def _kept(page: mmap.mmap) -> int:
    """The address of a page that is never given back: a crash may come when Python has let go of everything."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


WATCHED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)

_HIGH_DESCRIPTORS = 64
_SHM = "/dev/shm"  # noqa: S108 - only its free space and its device are read
_MESSAGE_MOST = 700
_CHAIN_MOST = 4
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where buoy's own source files are."""
_DEMO = os.path.join(OURS, "demo", "")


class LastWords:
    """Hooks into this process; undone in forked children, whose deaths are not ours."""

    def __init__(self, folder: str, beacon: Beacon, again: bool = False) -> None:
        self._folder = folder
        self._again = again
        self._beacon = beacon
        self._note: dict[str, object] | None = None
        self._attached = True
        self._files: dict[int, int] = {}
        self._faults = False
        self._script = _script_frame()  # let go of in time: while it is held the script's variables live on
        self._watch_signals()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)
        os.register_at_fork(after_in_child=self._detach)

    def _watch_signals(self) -> None:
        # IPython kernels enable faulthandler on a stderr nobody sees; a script that did so wants its own output.
        if self._faults or not faulthandler.is_enabled() or "ipykernel" in sys.modules:
            self._faults = True
            faulthandler.enable(self._open("fault.txt"), all_threads=True)
        faulthandler.register(STACKS_SIGNAL, self._open("stacks.txt"), all_threads=True, chain=False)
        for number in WATCHED:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: leave it ignored
                self._files[number] = self._open(f"{number.name}.txt")
                faulthandler.register(number, self._files[number], all_threads=True, chain=True)
        record_into(os.path.join(self._folder, "beacon"))

    def move(self, folder: str) -> None:
        """Write to another folder from here on. The files before stay open: their numbers may be another's by now."""
        self._folder, self._again = folder, False
        self._watch_signals()

    def set_handler(self, number: int, handler: object) -> None:
        """`signal.signal` beneath our dump: the stacks are still written, in C, before the handler is called."""
        watched = self._attached and number in self._files
        if watched:
            faulthandler.unregister(number)
        try:
            signal.signal(number, handler)  # type: ignore[arg-type]
        finally:
            if watched:
                faulthandler.register(number, self._files[number], all_threads=True, chain=True)

    def _open(self, name: str) -> int:
        return high_number(open_new(os.path.join(self._folder, name), again=self._again), _HIGH_DESCRIPTORS)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._remember(error)
        _cut(error, traceback)
        if traceback is error.__traceback__:
            leave_out_ours(error)
            traceback = error.__traceback__
        self._previous_hook(kind, error, traceback)

    def _remember(self, error: BaseException) -> None:
        if not self._attached:
            return
        try:
            # Before it calls the hook the interpreter puts an uncaught exception here; whoever only shows one does not.
            uncaught = error is (getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))
            room = _room(self._folder)["disk_free"]  # the script may save elsewhere than it works
            more = {"run_disk_free": room, "memory_limit": _memory_limit(), "uncaught": uncaught}
            self._note = {**describe(error), **more, "t": round(time.monotonic(), 4)}
            self._beacon.note(self._note)
        except Exception as failure:  # noqa: BLE001 - a failing recorder must not hide the user's own traceback
            trouble("the note of an exception", failure)

    def _on_exit(self) -> None:
        if not self._attached:
            return
        finished, self._script = _has_finished(self._script), None
        if self._note is None:  # somebody replaced our excepthook: the interpreter still kept the exception
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if isinstance(error, BaseException) and "IPython" not in sys.modules:
                self._remember(error)
        if self._note is not None:
            self._beacon.note({**self._note, "exited": True})
        else:
            self._beacon.note({"kind": "exit", "finished": finished})
            self._beacon.phase("done")

    def _detach(self) -> None:
        self._attached, self._script = False, None
        for number in (STACKS_SIGNAL, *self._files):
            faulthandler.unregister(number)
        faulthandler.disable()


def show_until(error: KeyboardInterrupt, place: str) -> None:
    """A Ctrl-C that buoy held back and now lets act: its traceback ends before our last frames in this file or folder.

    Whoever sees those takes buoy for what stopped the training.
    """
    error._buoy_frames = place  # type: ignore[attr-defined]
    # IPython does not call `sys.excepthook`, and shows the last frame however it is marked.
    if "IPython" in sys.modules:
        error._render_traceback_ = lambda: _rendered(error)  # type: ignore[attr-defined]


def _rendered(error: KeyboardInterrupt) -> list[str]:
    """What IPython shows of it: the same as ever, of a shorter traceback."""
    _cut(error, error.__traceback__)
    del error._render_traceback_  # type: ignore[attr-defined]
    try:
        shell = sys.modules["IPython"].get_ipython()
        shown = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
        return [str(line) for line in shown]
    except Exception as failure:  # noqa: BLE001 - another version of IPython
        trouble("IPython's traceback of Ctrl-C", failure)
        from traceback import format_exception

        return [line.rstrip("\n") for line in format_exception(error)]


def _cut(error: BaseException, traceback: TracebackType | None) -> None:
    place, last = getattr(error, "_buoy_frames", None), None
    while traceback is not None and place is not None:
        if last is None or not traceback.tb_frame.f_code.co_filename.startswith(place):
            last = traceback
        traceback = traceback.tb_next
    if last is not None:
        last.tb_next = None


def leave_out_ours(error: BaseException) -> None:
    """Take our frames out of an error's traceback where it only came through them: what failed is somebody else's.

    For `except BaseException as error: leave_out_ours(error); raise` around what is not ours: such a `raise` adds no
    frame of its own. Frames of ours with nothing of others below them stay: then it is our own error.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        _shorten(link)
        link = link.__cause__ or link.__context__


def _shorten(error: BaseException) -> None:
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    others = [
        number for number, entry in enumerate(entries) if _is_of_others(entry.tb_frame.f_code.co_filename)
    ]
    last = others[-1] if others else 0
    shown = [
        entry
        for number, entry in enumerate(entries)
        if number >= last or not _is_ours(entry.tb_frame.f_code.co_filename)
    ]
    if len(shown) == len(entries):
        return
    for above, below in pairwise(shown):
        above.tb_next = below
    error.__traceback__ = shown[0]


def _is_ours(path: str) -> bool:
    return path.startswith(OURS) and not path.startswith(_DEMO)  # whose script stands for a user's


def _is_of_others(path: str) -> bool:
    """Of a user or a framework; the standard library is called by all of us."""
    if "site-packages" in path or "dist-packages" in path:
        return not _is_ours(path)
    return not _is_ours(path) and not path.startswith((_STANDARD_LIBRARY, "<frozen "))


def describe(error: BaseException) -> dict[str, object]:
    """An exception as a note: type, message, where it was raised, what caused it, and the room left on disk."""
    user, inner = _frames(error.__traceback__)
    filename = getattr(error, "filename", None)
    folder = os.path.dirname(str(filename)) if filename is not None else "."
    return {
        "kind": "exception",
        **_identity(error),
        "bases": [_qualified(base) for base in type(error).__mro__[1:-1]][:6],
        "filename": str(filename) if filename is not None else None,
        "where": user,
        "inner": inner,
        "thread": threading.current_thread().name,
        "chain": _chain(error),
        **_room(folder),
        "on_shm": _is_on_shm(folder),
        "shm_free": _room(_SHM)["disk_free"],
        "starting_process": _is_starting_process(error),
    }


def _is_starting_process(error: BaseException) -> bool:
    """Whether a refused EAGAIN was a fork: the errno alone could also be a socket's."""
    if getattr(error, "errno", None) != errno.EAGAIN or error.__traceback__ is None:
        return False
    import linecache

    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    return "fork" in line or "spawn" in line


def _identity(error: BaseException) -> dict[str, object]:
    try:
        message = mask_text(str(error))
    except Exception:  # noqa: BLE001 - a broken __str__ of the user's own exception
        message = "<the exception's message could not be read>"
    if len(message) > _MESSAGE_MOST:
        message = message[: _MESSAGE_MOST // 2] + " ... " + message[-_MESSAGE_MOST // 2 :]
    number = getattr(error, "errno", None)
    return {
        "type": _qualified(type(error)),
        "message": message,
        "errno": number if isinstance(number, int) else None,
    }


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _chain(error: BaseException) -> list[dict[str, object]]:
    links: list[dict[str, object]] = []
    seen = {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen and len(links) < _CHAIN_MOST:
        seen.add(id(cause))
        links.append(_identity(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return links


def _frames(
    traceback: TracebackType | None,
) -> tuple[dict[str, object] | None, dict[str, object] | None]:
    """The innermost frame of the user's own code, and the innermost of all."""
    user = inner = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        inner = {"file": code.co_filename, "line": traceback.tb_lineno, "function": code.co_name}
        if is_user_file(code.co_filename):
            user = inner
        traceback = traceback.tb_next
    return user or inner, inner


def is_user_file(path: str) -> bool:
    """Whether a source file is the user's own: not the standard library, an installed package or buoy itself."""
    if path.startswith("<") and not path.startswith(("<stdin>", "<string>", "<ipython")):
        return False
    if "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith((_STANDARD_LIBRARY, OURS))


def _memory_limit() -> int | None:
    """The least that this process's own memory may grow to (`ulimit -v`, `ulimit -d`); None without such a limit."""
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in soft if limit != resource.RLIM_INFINITY), default=None)


def _script_frame() -> FrameType | None:
    """The outermost frame of the script itself, if that runs already: `buoy.watch()` is called below it."""
    names = getattr(sys.modules.get("__main__"), "__dict__", None)
    frame: FrameType | None = sys._getframe()
    found = None
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            found = frame
        frame = frame.f_back
    return found


def _has_finished(script: FrameType | None) -> bool | None:
    """Whether a script that is over came to its last line; None where that is unknown.

    `sys.exit` leaves it at the line that called it. The code it leaves with is known to nobody within the process.
    """
    if script is None:
        return None
    import opcode

    last = script.f_code.co_code[script.f_lasti] if script.f_lasti >= 0 else 0
    return opcode.opname[last].startswith("RETURN_")


def _is_on_shm(folder: str) -> bool:
    try:
        return os.stat(folder or ".").st_dev == os.stat(_SHM).st_dev
    except OSError:
        return False


def _room(folder: str) -> dict[str, int | None]:
    try:
        found = os.statvfs(folder or ".")
    except OSError:
        return {"disk_free": None, "inodes_free": None}
    # A file system that counts no inodes (btrfs, FUSE) says 0 of 0.
    return {
        "disk_free": found.f_bavail * found.f_frsize,
        "inodes_free": found.f_favail if found.f_files else None,
    }
