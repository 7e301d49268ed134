"""Who raised a fatal signal: the kernel, because of what the code did, or somebody with `kill`.

A wait status does not tell the two apart, and faulthandler does not look. The kernel does tell, in the `siginfo` that
it hands to a signal handler: a positive `si_code` is its own, and it lets no process send such a one to another (`man 2
rt_sigqueueinfo`). A few machine instructions in front of faulthandler's handler copy that record into the beacon, then
continue in faulthandler: at a crash no Python can run. Where they are not known (another processor than x86-64), or
memory may not be executed, a crash stays as likely as its traces make it.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct

from buoy.flight.beacon import FATAL_AT, SIZE
from buoy.machine.files import open_old

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
    except Exception:  # noqa: BLE001 - a crash is then only likely one, and the training goes on
        return


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
