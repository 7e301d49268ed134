"""The trainer's end of the writer process: starting it, handing over a checkpoint, hearing how it went."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time

_WRITER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "writer.py")
_START_SECONDS = 20.0
_MOST_REPLY = 65536


class WriterLink:
    """A started writer; `OSError` when it cannot be started."""

    def __init__(self, lock: int) -> None:
        """`lock`: the run's lock, which the writer holds too, until all it was given is on disk."""
        if not sys.executable:
            raise OSError("this Python does not know its own program")
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = (theirs.fileno(), lock)
        try:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", _WRITER, *map(str, descriptors), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,
            )
            if launcher.wait(_START_SECONDS):  # it forks at once: the writer is nobody's child
                raise OSError(f"the writer did not start (exit code {launcher.returncode})")
        except (OSError, subprocess.SubprocessError) as error:
            self._ours.close()
            raise OSError(str(error)) from error
        finally:
            theirs.close()

    def send(self, arena: int, request: dict[str, object], values: bytes) -> None:
        """Hand over a checkpoint: once this returns, it needs the trainer no more."""
        text = json.dumps(request).encode()
        note = os.memfd_create("buoy-note", os.MFD_CLOEXEC)
        try:
            for data in (len(text).to_bytes(8, "little") + text, values):
                view = memoryview(data)
                while view:
                    view = view[os.write(note, view) :]
            socket.send_fds(self._ours, [b"save"], [arena, note])
        finally:
            os.close(note)

    def reply(self, timeout: float) -> dict[str, object] | None:
        """What the writer says; None if it says nothing in time; `OSError` when it has died."""
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        if not poll.poll(max(0.0, (deadline - time.monotonic()) * 1000)):
            return None
        data = self._ours.recv(_MOST_REPLY)
        if not data:
            raise OSError("the writer process has died")
        reply = json.loads(data)
        return reply if isinstance(reply, dict) else {}

    def dismiss(self) -> None:
        """It is given nothing more, and leaves once what it has is on disk."""
        try:
            self._ours.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has died

    def is_silent(self) -> bool:
        """Whether a writer that was given up has said nothing yet; one that has, or has died, is let go."""
        try:
            if self.reply(0.0) is None:
                return True
        except (OSError, ValueError):
            pass
        self.forget()
        return False

    def end(self, timeout: float) -> None:
        """Let the writer go, and wait until it has: then the lock is free."""
        try:
            self._ours.shutdown(socket.SHUT_WR)
            while self.reply(timeout) is not None:
                pass
        except OSError:
            pass
        self.forget()

    def forget(self) -> None:
        """Close our end without a word: a forked child's part."""
        self._ours.close()
