"""Every system call of a save: the writer dies at it, or it fails."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buoy.checkpoint import commit
from buoy.checkpoint.encoding import encode, encode_all
from buoy.checkpoint.manifest import PAGE, lay_out
from buoy.machine import files
from tests.checkpoint.ground import about, as_tensor, open_saver, save, state, writers
from tests.kills.kind import Tally, go_on, judge

SIZE = 40_000
WRITING = (
    "mkdir",
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "rename",
    "close",
    "unlink",
    "rmdir",
    "truncate",
)
_TRACED = ("mkdir", "openat", "pwrite64", "write", "ftruncate", "fsync", "rename", "close")


class Calls:
    """The `os` module with every call that reaches the disk handed to `on_call` first."""

    def __init__(self, on_call: Callable[[str, tuple[Any, ...]], object]) -> None:
        self._on_call = on_call

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in WRITING:
            return real

        def called(*arguments: Any, **options: Any) -> Any:
            self._on_call(name, arguments)
            return real(*arguments, **options)

        return called


def save_here(folder: Path, step: int, calls: Any) -> None:
    """What the writer process does, in this process, through `calls` instead of `os`."""
    encoded = encode_all(state(step, SIZE), as_tensor)
    layout = lay_out(encoded.tensors)
    image = _pages(layout.size)
    image[: len(layout.header)] = layout.header
    for name, (start, end) in layout.places.items():
        encoded.tensors[name].copy_into(image[start:end])
    request = {"checkpoints": str(folder / "checkpoints"), "name": f"step-{step:09d}", "size": layout.size,
               "ends": layout.ends,
               "fields": {"step": step, "about": encode("about", about(step), as_tensor).tree}}  # fmt: skip
    commit.os = files.os = calls
    try:
        commit.write_checkpoint(
            request, image, json.dumps(encoded.tree).encode(), lambda size, began: 1 << 20
        )
    finally:
        commit.os = files.os = os


def killed_at_each_call(number: int, chance: random.Random, folder: Path) -> Tally:
    """SIGKILL right before each call that reaches the disk, in a process of its own."""
    tally = Tally()
    before = folder / "before"
    save(before, 1, size=SIZE)
    count = 0
    while True:
        run = folder / f"call-{count}"
        shutil.copytree(before, run)
        pid = os.fork()
        if pid == 0:
            seen = [0]

            def on_call(
                name: str, arguments: tuple[Any, ...], seen: list[int] = seen, count: int = count
            ) -> None:
                if seen[0] == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen[0] += 1

            save_here(run, 2, Calls(on_call))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        finished = os.waitstatus_to_exitcode(status) == 0
        judge(tally, run, 2 if finished else 1, SIZE, f"call {count}")
        if number >= 50 or count % 6 == 0:
            go_on(tally, run, 3, SIZE, f"call {count}")
        shutil.rmtree(run)
        count += 1
        if finished:
            return tally


def killed_at_each_traced_call(number: int, chance: random.Random, folder: Path) -> Tally:
    """The same in the real writer process, killed by strace at the entry of the system call itself."""
    tally = Tally()
    if not shutil.which("strace"):
        tally.skipped = "strace is not installed"
        return tally
    points = [(name, count) for name in _TRACED for count in range(1, 8)]
    died = 0
    for name, count in points if number >= 50 else chance.sample(points, max(2, number // 3)):
        run = folder / f"{name}-{count}"
        saver = open_saver(run)
        saver.save(state(1, SIZE), about(1), as_tensor, wait=True)
        (writer,) = writers(run)
        strace = _trace(writer, name, count)
        if strace is None:
            tally.skipped = "strace may not attach here"
            saver.close()
            return tally
        saver.save(state(2, SIZE), about(2), as_tensor)
        # Another writer takes over when this one dies: here the dead one's work alone is judged first.
        died += _dies(writer, run)
        judge(tally, run, 1, SIZE, f"{name} {count}")
        done = saver.wait()
        if done is None or not done.committed:
            tally.fail("lost", f"{name} {count}: {done}")
        saver.close()
        strace.wait(30)
        judge(tally, run, 2, SIZE, f"{name} {count}, taken over")
        shutil.rmtree(run)
    if number >= 50 and died < 10:
        tally.fail("stuck", f"strace killed only {died} writers: nothing is proven")
    return tally


def failing_at_each_call(number: int, chance: random.Random, folder: Path) -> Tally:
    """ENOSPC, EDQUOT and EIO at each call: the part is taken away, what was there stays."""
    tally = Tally()
    run = folder / "failing"
    save(run, 1, size=SIZE)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        count, finished = 0, False
        while not finished:
            seen = [0]

            def on_call(name: str, arguments: tuple[Any, ...], seen: list[int] = seen, count: int = count,
                        code: int = code) -> None:  # fmt: skip
                if name in ("close", "unlink", "rmdir"):
                    return
                seen[0] += 1
                if seen[0] == count + 1:
                    raise OSError(code, os.strerror(code))

            words = f"{errno.errorcode[code]} at call {count}"
            try:
                save_here(run, 2, Calls(on_call))
                finished = True
            except OSError as error:
                if error.errno != code:
                    tally.fail("stuck", f"{words}: {error}")
            judge(tally, run, 1, SIZE, words)
            left = [name for name in os.listdir(run / "checkpoints") if name.startswith(".")]
            if left:
                tally.fail("stuck", f"{words}: left {left}")
            shutil.rmtree(run / "checkpoints" / "step-000000002", ignore_errors=True)
            count += 1
    return tally


def full_disk(number: int, chance: random.Random, folder: Path) -> Tally:
    """A real small file system that fills up at a random point of the save."""
    tally = Tally()
    mount = folder / "disk"
    mount.mkdir()
    for trial in range(max(3, number // 4)):
        room = chance.randrange(30, 260)
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}k", "tmpfs", str(mount)],
                              capture_output=True, text=True)  # fmt: skip
        if made.returncode:
            tally.skipped = f"cannot mount a small tmpfs here: {made.stderr.strip()}"
            return tally
        try:
            saver = open_saver(mount)
            committed = 0
            for step in (1, 2, 3):
                receipt = saver.save(state(step, SIZE), about(step), as_tensor, wait=True)
                committed = step if receipt.committed else committed
                if not receipt.committed and receipt.errno != errno.ENOSPC:
                    tally.fail("stuck", f"{room} KiB: {receipt}")
            saver.close()
            judge(tally, mount, committed, SIZE, f"trial {trial}, {room} KiB")
            if [name for name in os.listdir(mount / "checkpoints") if name.startswith(".")]:
                tally.fail("stuck", f"{room} KiB: a part is left")
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=True)
    return tally


def _pages(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(PAGE, -(-size // PAGE) * PAGE)))


def _trace(pid: int, name: str, count: int) -> subprocess.Popen[bytes] | None:
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid), "-e", f"trace={name}",
               "-e", f"inject={name}:signal=KILL:when={count}"]  # fmt: skip
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and started.poll() is None:
        with open(f"/proc/{pid}/status") as status:
            if any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status):
                return started
        time.sleep(0.002)
    started.kill()
    return None


def _dies(writer: int, run: Path) -> bool:
    """Whether the traced writer dies of the injected signal, rather than finishing its checkpoint."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if writer not in writers(run):
            return True
        if (run / "checkpoints" / "step-000000002").exists():
            time.sleep(0.02)  # the calls after the rename
            return writer not in writers(run)
        time.sleep(0.002)
    return False
