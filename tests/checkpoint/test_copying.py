"""The copy that a training waits for."""

from __future__ import annotations

import ctypes
import random
import signal
import threading
import time

import pytest
import torch

from buoy.checkpoint import arena as copying
from buoy.checkpoint.arena import copy_all
from buoy.torch.state.tensors import as_tensor


def address(source: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(source))


def test_every_byte_arrives_whatever_the_sizes() -> None:
    sizes = [1, 7, 8 << 20, (8 << 20) + 1, 40 << 20, 4096]
    sources = [bytearray(random.Random(size).randbytes(size)) for size in sizes]
    arena = memoryview(bytearray(sum(sizes) + 2))
    rooms, at = [], 1
    for size in sizes:
        rooms.append(arena[at : at + size])
        at += size

    copy_all([(room, address(source)) for room, source in zip(rooms, sources, strict=True)])

    assert all(room == source for room, source in zip(rooms, sources, strict=True))
    assert arena[0] == arena[-1] == 0, "nothing beside them was written"


def test_after_ctrl_c_nobody_copies_on() -> None:
    """What is in the arena then belongs to the next checkpoint."""
    source, room = bytearray(1 << 29), memoryview(bytearray(1 << 29))
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            copy_all([(room, address(source))])
            time.sleep(0.5)  # a machine that copies so fast: the alarm comes here
    finally:
        signal.signal(signal.SIGALRM, before)

    assert not [thread for thread in threading.enumerate() if thread.name == "buoy-copy"]


class Own(torch.Tensor):
    """Of somebody's own."""


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (torch.randn(3, 4), True),
        (torch.nn.Parameter(torch.randn(3)), True),
        (torch.randn(6)[2:], True),
        (torch.randn(3, 4).T, False),
        (torch.randn(4)[::2], False),
        (torch.randn(1, 4).expand(3, 4), False),
        (torch.randn(2, dtype=torch.complex64).conj(), False),
        (torch.randn(2, dtype=torch.complex64).conj().imag, False),
        (torch.randn(3).as_subclass(Own), False),
    ],
)
def test_only_what_lies_as_it_is_saved_is_copied_as_it_lies(tensor: torch.Tensor, plain: bool) -> None:
    found = as_tensor(tensor)
    assert found is not None
    room = bytearray(found.nbytes)
    found.copy_into(memoryview(room))

    assert (found.address is not None) == plain
    if found.address is not None:
        lies = bytearray(found.nbytes)
        copy_all([(memoryview(lies), found.address)])
        assert lies == room


@pytest.mark.parametrize("moment", ["start", "join"])
def test_whatever_a_signal_raises_the_other_thread_is_waited_for(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes into memory that the next checkpoint is laid into, from tensors that may be gone by then."""
    threads: list[threading.Thread] = []
    came: list[str] = []

    class Interrupted(threading.Thread):
        """A signal comes while it is waited for, and its handler raises."""

        def start(self) -> None:
            threads.append(self)
            super().start()
            self.alarm("start")

        def join(self, timeout: float | None = None) -> None:
            self.alarm("join")
            super().join(timeout)

        def run(self) -> None:
            time.sleep(0.3)
            super().run()

        def alarm(self, now: str) -> None:
            if now == moment and not came:
                came.append(now)
                raise TimeoutError("an alarm")

    source = (ctypes.c_char * copying._WORTH_A_THREAD)()
    room = memoryview(bytearray(len(source)))
    monkeypatch.setattr(copying.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(TimeoutError):
        copy_all([(room, ctypes.addressof(source))])

    assert not threads[0].is_alive()


def test_every_byte_arrives_also_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    source = ctypes.create_string_buffer(bytes(range(256)) * (copying._WORTH_A_THREAD // 256))
    room = bytearray(copying._WORTH_A_THREAD)
    copy_all([(memoryview(room), ctypes.addressof(source))])

    assert room == source.raw[:-1]
