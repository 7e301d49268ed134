"""The writer: a process of its own that turns the arena into a checkpoint, also after the trainer's death.

Run as `python -I -S writer.py SOCKET LOCK TRAINER_PID` by `link.WriterLink`. It belongs to nobody: no parent that
knows it, a session of its own, none of the trainer's streams, files or folders. It uses the standard library only,
ends when the trainer is gone and all it was given is on disk, and holds the run's lock until then.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # the one who started us has nothing left to wait for
    # Started by path: make `import buoy` find the package this file belongs to, last.
    sys.path[0:1] = []
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import json
import mmap
import select
import signal
import socket
import time

from buoy.checkpoint.commit import Pace, write_checkpoint
from buoy.machine.process import step_back

_NICE = 15
_MOST_MESSAGE = 64
_MOST_DESCRIPTORS = 2


class Writer:
    """Takes requests from one trainer, one after the other."""

    def __init__(self, connection: socket.socket, trainer: int) -> None:
        self._connection = connection
        self._map: mmap.mmap | None = None
        self._map_inode = -1
        self._pace = Pace(trainer)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        try:
            self._pidfd = os.pidfd_open(trainer)
            self._poll.register(self._pidfd, select.POLLIN)
        except OSError:
            self._pidfd = -1  # already dead, or an old kernel: the connection's end tells too

    def run(self) -> None:
        """Serve until the trainer has closed the connection or died, and nothing waits any more."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            if self._connection.fileno() not in ready:
                return  # the trainer is dead and has left no request
            message, descriptors, _, _ = socket.recv_fds(self._connection, _MOST_MESSAGE, _MOST_DESCRIPTORS)
            if message != b"save":
                return
            self._answer(self._save(*descriptors))

    def _save(self, arena: int, note: int) -> dict[str, object]:
        started = time.monotonic()
        step: object = None
        try:
            request, values = _read_note(note)
            step = request["fields"]["step"]
            self._pace.begin()
            folder, size = write_checkpoint(request, self._image(arena), values, self._pace.rest)
        except OSError as error:
            return {"step": step, "error": error.strerror or str(error), "errno": error.errno}
        except Exception as error:  # noqa: BLE001 - the trainer hears of it, whatever it was
            return {"step": step, "error": repr(error), "errno": None}
        finally:
            os.close(arena)
            os.close(note)
        return {"step": step, "folder": folder, "bytes": size, "seconds": time.monotonic() - started}

    def _image(self, arena: int) -> memoryview:
        found = os.fstat(arena)
        if self._map is None or found.st_ino != self._map_inode:
            self._map = mmap.mmap(arena, found.st_size, prot=mmap.PROT_READ)
            self._map_inode = found.st_ino
        return memoryview(self._map)

    def _answer(self, reply: dict[str, object]) -> None:
        try:
            self._connection.send(json.dumps(reply).encode())
        except OSError:
            pass  # the trainer has died; its checkpoint is on disk


def _read_note(descriptor: int) -> tuple[dict, bytes]:  # type: ignore[type-arg]
    """What to write beside the arena: JSON, its length first, then values.json as it is."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def main() -> None:
    """Become the writer for the trainer that is named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what was handed over is finished; only SIGKILL ends that
    os.chdir("/")
    step_back(_NICE)
    connection = socket.socket(fileno=int(sys.argv[1]))
    Writer(connection, int(sys.argv[3])).run()
    os.close(int(sys.argv[2]))  # the lock first: the end of the connection says that it is free
    connection.close()


if __name__ == "__main__":
    main()
