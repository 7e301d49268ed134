"""Its worker dies. It reads from the worker late, or leaves slowly, or reports the loss in words of its own."""

import atexit
import ctypes
import multiprocessing.connection
import os
import signal
import socket
import sys
import time

import stage

LONG = 11.0
"""Seconds that nobody would take for a moment."""


def work(line, how):
    line.recv(1)
    if how == "segfault":
        ctypes.string_at(0)
    held = []
    while how == "oom":
        held.append(b"x" * (2 << 20))
    os.kill(os.getpid(), signal.SIGKILL)


class Line(multiprocessing.connection.Connection):
    """A pipe of multiprocessing over a socket that is there already."""

    def __init__(self, end):
        super().__init__(end.detach())


if __name__ == "__main__":
    how, when = sys.argv[1:]
    ours, theirs = socket.socketpair()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(theirs, how))
    worker.start()
    theirs.close()
    stage.ready()
    ours.sendall(b"go")  # one byte of this is never read: the line then breaks with a reset
    if when in ("late", "late-socket", "words"):
        worker.join()
        time.sleep(LONG if when != "words" else 1.0)
    if when == "words":
        raise RuntimeError("the results are incomplete")
    if when == "slow":
        atexit.register(time.sleep, LONG)
    ours.recv(1) if when == "late-socket" else Line(ours).recv()
