"""Processes as /proc shows them: cheap enough to be read ten times a second.

The sidecar imports this file, so it stays with `os` and `struct`. No reading raises: what cannot be
read is None or empty.
"""

from __future__ import annotations

import os
import struct

from buoy.machine.files import PAGE, READ, TICKS, read_at

MOST_PROCESSES = 1024
"""No tree of processes is followed beyond this many: a fork bomb must not take the recorder with it."""

# struct pidfd_info, first version (64 bytes): mask and cgroupid (u64), eleven u32 ids, exit_code (s32 at 60).
_PIDFD_INFO_SIZE = 64
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO_SIZE << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


class FileReader:
    """A file kept open and read from its start each time: microseconds instead of an open per reading.

    An open /proc/PID file also stays with its process: once that is gone it reads as empty, even if the pid
    is used again.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, READ)
        except (OSError, ValueError):
            self._fd = -1

    def read(self, size: int = 4096) -> bytes:
        """The first `size` bytes as they are now; empty when unreadable."""
        if self._fd < 0:
            return b""
        try:
            return read_at(self._fd, size, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Let go of the file; it reads as empty from now on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                pass


def read_bytes(path: str, size: int = 65536) -> bytes:
    """The first `size` bytes of a file, empty when it cannot be read."""
    try:
        fd = os.open(path, READ)
    except (OSError, ValueError):
        return b""
    try:
        chunks = []
        while size > 0:
            chunk = os.read(fd, size)
            if not chunk:
                break
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return b""
    finally:
        os.close(fd)


def to_int(data: bytes) -> int | None:
    """A whole non-negative number in plain digits, or None.

    >>> to_int(b"42\\n"), to_int(b"max"), to_int(b"-1"), to_int(b"")
    (42, None, None, None)
    """
    digits = data.strip()
    return int(digits) if digits.isdigit() and len(digits) < 25 else None


def field(data: bytes, name: bytes) -> int | None:
    """The number after `name` at the start of a line, as meminfo, vmstat and memory.stat have them.

    >>> field(b"low 0\\noom 2\\noom_kill 1\\n", b"oom_kill"), field(b"MemFree:   12 kB\\n", b"MemFree:")
    (1, 12)
    """
    if data.startswith(name + b" "):
        start = len(name)
    else:
        at = data.find(b"\n" + name + b" ")
        if at < 0:
            return None
        start = at + 1 + len(name)
    end = data.find(b"\n", start)
    words = data[start : end if end >= 0 else len(data)].split()
    return to_int(words[0]) if words else None


class ProcessStat:
    """What /proc/PID/stat says. `exit_code` is a raw wait status and means something for a zombie only."""

    # Written out: a namedtuple would cost the sidecar half a megabyte for importing `collections`.
    __slots__ = ("cpu_seconds", "exit_code", "major_faults", "ppid", "start_ticks", "state", "threads")

    def __init__(self, words: list[bytes]) -> None:
        """From the words after the name; ValueError when they are not numbers."""
        self.state = words[0].decode("ascii")
        self.ppid = int(words[1])
        self.major_faults = int(words[9])
        self.cpu_seconds = (int(words[11]) + int(words[12])) / TICKS
        self.threads = int(words[17])
        self.start_ticks = int(words[19])
        self.exit_code = int(words[49])
        if self.start_ticks >> 63:
            raise ValueError("no such time")


def parse_stat(data: bytes) -> ProcessStat | None:
    """Read one /proc/PID/stat line; None when it is not one.

    The name stands in parentheses and may itself hold any character, so fields are counted from the last one.
    """
    close = data.rfind(b")")
    words = data[close + 2 :].split() if close >= 0 else []
    if len(words) < 50 or not data.endswith(b"\n"):  # cut short, and a cut number is a wrong number
        return None
    try:
        return ProcessStat(words)
    except (ValueError, OverflowError):
        return None


def stat_of(pid: int | str, root: str = "/") -> ProcessStat | None:
    """What /proc says of a process just now (`self` is this one); None when it is gone."""
    return parse_stat(read_bytes(f"{_folder(pid, root)}/stat", 1024))


class ProcessReader:
    """One process, through files kept open; readings are None once it is gone."""

    def __init__(self, pid: int, root: str = "/") -> None:
        self.pid = pid
        folder = _folder(pid, root)
        self._stat = FileReader(folder + "/stat")
        self._statm = FileReader(folder + "/statm")

    def stat(self) -> ProcessStat | None:
        """State, parent, CPU time, major faults."""
        return parse_stat(self._stat.read(1024))

    def rss(self) -> int | None:
        """Resident bytes, pages shared with other processes included."""
        return self.memory()[0]

    def memory(self) -> tuple[int | None, int | None]:
        """Resident bytes, and those of them that are anonymous: no files, no shared memory."""
        data = self._statm.read(256)
        resident = _resident(data)
        shared = to_int(data.split()[2]) if resident is not None else None
        return resident, None if resident is None or shared is None else max(0, resident - shared * PAGE)

    def close(self) -> None:
        """Let go of the files."""
        self._stat.close()
        self._statm.close()


def descendants(pid: int, root: str = "/") -> list[int]:
    """All processes below `pid`, parents first; one whose parent died belongs to init and is missed."""
    if not read_bytes(f"{_folder(pid, root)}/stat", 8):
        return []
    try:
        # `children` stands empty for most; that it exists at all depends on how the kernel was built.
        os.stat(f"{_folder(pid, root)}/task/{pid}/children")
    except OSError:
        return _descendants_by_parent(pid, root)
    found = [pid]
    for parent in found:
        if len(found) > MOST_PROCESSES:
            break
        task = f"{_folder(parent, root)}/task"
        try:
            threads = os.listdir(task)
        except OSError:
            continue
        for thread in threads:
            for word in read_bytes(f"{task}/{thread}/children").split():
                child = to_int(word)
                if child and child not in found:
                    found.append(child)
    return found[1 : MOST_PROCESSES + 1]


def process_name(pid: int, root: str = "/") -> str:
    """A short name for users: `python train.py`, `pt_data_worker`; empty when the process cannot be read.

    Arguments after the script are left out. A process that renamed itself goes by the name it chose.
    """
    folder = _folder(pid, root)
    comm = read_bytes(folder + "/comm", 64).decode("utf-8", "replace").strip()
    line = read_bytes(folder + "/cmdline", 4096).decode("utf-8", "replace")
    words = [word for word in line.split("\0") if word]
    if not words:  # a zombie or a kernel thread has no command line
        return _printable(comm)
    heads = [os.path.basename(word) for word in words[:2]]
    if comm and not any(head.startswith(comm) or comm.startswith(head) for head in heads if head):
        return _printable(comm)
    return _printable(_short_command(heads[0], words[1:]))


def cpu_limits(pid: int, root: str = "/") -> tuple[int | None, int | None]:
    """RLIMIT_CPU in seconds, soft and hard; None is unlimited or unreadable."""
    for line in read_bytes(_folder(pid, root) + "/limits").split(b"\n"):
        if line.startswith(b"Max cpu time"):
            words = line[len(b"Max cpu time") :].split()
            if len(words) >= 2:
                return to_int(words[0]), to_int(words[1])
    return None, None


def io_bytes(pid: int, root: str = "/") -> tuple[int, int] | None:
    """Bytes this process has fetched from and sent to storage."""
    data = read_bytes(_folder(pid, root) + "/io", 1024)
    read, written = field(data, b"read_bytes:"), field(data, b"write_bytes:")
    return None if read is None or written is None else (read, written)


def handles_signal(pid: int, signum: int, root: str = "/") -> bool:
    """Whether the process catches this signal: sending it then does not take the default action."""
    for line in read_bytes(_folder(pid, root) + "/status").split(b"\n"):
        if line.startswith(b"SigCgt:"):
            try:
                return bool(int(line[7:].strip(), 16) >> (signum - 1) & 1)
            except ValueError:
                return False
    return False


def cpu_times(pid: int) -> dict[str, float] | None:
    """The CPU seconds of a process, zombies too, with those of its reaped children: `utime` and `stime` as `wait4`
    would say them."""
    words = read_bytes(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    try:
        user, system = int(words[11]) + int(words[13]), int(words[12]) + int(words[14])
    except (ValueError, IndexError):
        return None
    return {"utime": user / TICKS, "stime": system / TICKS}


def zombie_status(pid: int, root: str = "/") -> int | None:
    """The raw wait status if the process has ended and nobody has collected it yet.

    A main thread that left while others work on is also shown as a zombie: more than one thread means that it
    is not over. Without the right to inspect the process the kernel writes 0 for the status: a 0 counts only
    where a link under the same protection can be read. (No file: those of a zombie belong to root.)
    """
    stat = stat_of(pid, root)
    if stat is None or stat.state not in ("Z", "X") or stat.threads > 1:
        return None
    if stat.exit_code == 0 and not _may_inspect(_folder(pid, root)):
        return None
    return stat.exit_code


def _may_inspect(folder: str) -> bool:
    try:
        return bool(os.readlink(folder + "/ns/pid"))
    except OSError:
        return False


def pidfd_exit_status(pidfd: int) -> int | None:
    """The raw wait status of a process that has been collected; Linux 6.15 and later, None before."""
    import fcntl

    info = bytearray(_PIDFD_INFO_SIZE)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info, True)
    except (OSError, ValueError):
        return None
    if not struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    return int(struct.unpack_from("<i", info, 60)[0])


def mounts(root: str = "/") -> list[tuple[str, str, str, str]]:
    """(folder of the file system, mount point, type, options of the file system) of everything that is mounted."""
    found = []
    data = read_bytes(root.rstrip("/") + "/proc/self/mountinfo", 1 << 20)
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 5 and right[0]:
            found.append((_unescaped(left[3]), _unescaped(left[4]), right[0], right[-1]))
    return found


def _unescaped(field: str) -> str:
    """The kernel writes as octal what would end a field."""
    for octal, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, char)
    return field


def process_memory(pid: int, root: str = "/") -> int | None:
    """Resident bytes of a process, pages shared with others included; None when it is gone."""
    return _resident(read_bytes(_folder(pid, root) + "/statm", 256))


def _folder(pid: int | str, root: str) -> str:
    return f"{root.rstrip('/')}/proc/{pid}"


def _resident(statm: bytes) -> int | None:
    words = statm.split()
    pages = to_int(words[1]) if len(words) == 7 else None
    return None if pages is None else pages * PAGE


def _descendants_by_parent(pid: int, root: str) -> list[int]:
    try:
        names = os.listdir(root.rstrip("/") + "/proc")
    except OSError:
        return []
    children: dict[int, list[int]] = {}
    for name in names:
        if name.isdigit():
            stat = stat_of(name, root)
            if stat is not None:
                children.setdefault(stat.ppid, []).append(int(name))
    found = [pid]
    for parent in found:
        found.extend(child for child in children.get(parent, ()) if child not in found)
        if len(found) > MOST_PROCESSES:
            break
    return found[1 : MOST_PROCESSES + 1]


def _short_command(program: str, arguments: list[str]) -> str:
    """The program and what it runs: `python train.py`, `python -m torch.distributed.run`, `bash`."""
    for index, word in enumerate(arguments):
        if word == "-c":
            code = arguments[index + 1] if index + 1 < len(arguments) else ""
            if code.startswith("from multiprocessing."):  # what spawned workers and their tracker show
                return f"{program} -c {code.split(' ')[1]}"
            return f"{program} -c"
        if word == "-m" and index + 1 < len(arguments):
            return f"{program} -m {arguments[index + 1]}"
        if not word.startswith("-"):
            return f"{program} {os.path.basename(word)}"
    return program


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:80]
