"""What the threads of a process tree do, from two looks at /proc: run, wait for a CPU, or stand still, and for what.

Only read when a stall is suspected: a look opens several files for each thread. `schedstat` counts every time that a
thread ran (also for a microsecond) and how long it was ready without a CPU; `syscall` shows the call that it waits in,
with its arguments. The numbers of two equal looks prove that nothing ran in between.

What the kernel knows of a process's sockets, asked as `ss` does (netlink, sock_diag): bytes transferred, and peers.

/proc tells neither: `/proc/PID/io` counts `read()` but not `recv()`, and `/proc/net` adds up the whole machine. Any
user may ask. What cannot be asked (no such kernel module) is None.
"""

from __future__ import annotations

import os
import stat
import struct

from buoy.machine.procfs import field, handles_signal, parse_stat, read_bytes, to_int

_SOCK_DIAG = 4
_BY_FAMILY = 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_RAW, _TCP = 1, 2, 10, 16, 3, 6
_INET_FIXED, _INET_INODE, _INET_INFO = 72, 68, 2
_UNIX_FIXED, _UNIX_INODE, _UNIX_PEER = 16, 4, 2
_BYTES_AT = 120
"""Where `tcpi_bytes_acked` and `tcpi_bytes_received` are in struct tcp_info (Linux 4.1)."""
_PATIENCE = 1.0


def transferred_bytes(inodes: set[int]) -> dict[int, int] | None:
    """How many bytes have come and gone over each of these TCP sockets so far; None when the kernel does not say."""
    if not inodes:
        return {}
    found: dict[int, int] = {}
    for family in (_AF_INET, _AF_INET6):
        request = struct.pack("=BBBBI48x", family, _TCP, 1 << (_INET_INFO - 1), 0, 0xFFFFFFFF)
        messages = _ask(request)
        if messages is None:
            return None
        for message in messages:
            if len(message) < _INET_FIXED:
                continue
            (inode,) = struct.unpack_from("=I", message, _INET_INODE)
            info = _attribute(message, _INET_FIXED, _INET_INFO)
            if inode in inodes and len(info) >= _BYTES_AT + 16:
                found[inode] = sum(struct.unpack_from("=QQ", info, _BYTES_AT))
    return found


def peers() -> dict[int, int]:
    """The other end of each connected Unix socket, such as those of `multiprocessing.Pipe`; empty when not known."""
    request = struct.pack("=BBHIII8x", _AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 1 << 2)
    found = {}
    for message in _ask(request) or ():
        other = _attribute(message, _UNIX_FIXED, _UNIX_PEER)
        if len(message) >= _UNIX_FIXED and len(other) == 4:
            (inode,) = struct.unpack_from("=I", message, _UNIX_INODE)
            (found[inode],) = struct.unpack("=I", other)
    return found


def _ask(request: bytes) -> list[bytes] | None:
    """The answers of one dump, without their headers."""
    import _socket  # a quarter of what `socket` takes

    found: list[bytes] = []
    try:
        asker = _socket.socket(_AF_NETLINK, _SOCK_RAW, _SOCK_DIAG)
    except OSError:
        return None
    try:
        asker.settimeout(_PATIENCE)
        asker.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = asker.recv(1 << 16)
            for kind, message in _messages(data):
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    return None
                found.append(message)
    except (OSError, struct.error):
        return None
    finally:
        asker.close()


def _messages(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            break
        found.append((kind, data[at + _HEADER.size : at + length]))
        at += (length + 3) & ~3
    return found


def _attribute(message: bytes, start: int, wanted: int) -> bytes:
    at = start
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        if kind == wanted:
            return message[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return b""


_MOST_THREADS = 1024
_SIGALRM = 14
_HIDDEN = "?"

_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "read", 18: "write", 19: "read", 20: "write", 23: "select", 35: "sleep",
        42: "connect", 43: "accept", 44: "write", 45: "read", 46: "write", 47: "read", 61: "child", 73: "lock-file",
        74: "sync", 75: "sync", 202: "futex", 230: "sleep", 232: "epoll", 247: "child", 270: "select", 271: "ppoll",
        281: "epoll", 288: "accept",
    },
    "aarch64": {
        22: "epoll", 32: "lock-file", 63: "read", 64: "write", 65: "read", 66: "write", 67: "read", 68: "write",
        72: "select", 73: "ppoll", 82: "sync", 83: "sync", 95: "child", 98: "futex", 101: "sleep", 115: "sleep",
        202: "accept", 203: "connect", 206: "write", 207: "read", 211: "write", 212: "read", 242: "accept",
        260: "child",
    },
}  # fmt: skip
"""System calls that wait, by their number on this kind of processor; any other is not understood."""
_TIMEOUTS = {"poll": 2, "ppoll": 2, "select": 4, "epoll": 3}
"""Which argument of these calls is their time limit."""
_FILE_WORK = {
    "read": "is reading",
    "write": "is writing to",
    "sync": "is writing to",
    "lock-file": "waits for a lock on",
}
_LOCK = "waits for a lock or another thread"
_NETWORK = "waits for the network"
_CHILD = "waits for a child process"
_EVENTS = "waits for data from a socket, pipe or process"
_FUTEX_WAITS = (0, 6, 9, 11, 13)
_FUTEX_PRIVATE = 128
_DRIVES = ("fuse", "request_wait_answer", "nfs", "rpc_", "p9_", "v9fs", "ceph", "cifs", "smb")
"""Beginnings of kernel functions in which a thread waits for a mounted drive."""


class Thread:
    """One thread at one moment; what cannot be read is None."""

    __slots__ = ("arguments", "call", "delayed", "pid", "ran", "slices", "state", "tid", "wchan")

    def __init__(self, pid: int, tid: int, state: str, folder: str) -> None:
        self.pid, self.tid, self.state = pid, tid, state
        numbers = [to_int(word) for word in read_bytes(folder + "/schedstat", 128).split()]
        known = len(numbers) == 3 and numbers[2]  # a kernel that does not count shows three zeros
        self.ran = numbers[0] if known else None
        """Nanoseconds on a CPU."""
        self.delayed = numbers[1] if known else None
        """Nanoseconds ready to run, and not on a CPU: others were, or the quota was used up."""
        self.slices = numbers[2] if known else None
        """How often it was put on a CPU."""
        self.call, self.arguments = _call(read_bytes(folder + "/syscall", 256))
        wchan = read_bytes(folder + "/wchan", 128).decode("ascii", "replace").strip()
        self.wchan = "".join(filter(str.isprintable, wchan))[:80] if wchan not in ("", "0") else None

    @property
    def call_name(self) -> str:
        """The system call that it waits in; empty when that is not known."""
        return _CALLS.get(os.uname().machine, {}).get(-1 if self.call is None else self.call, "")

    def values(self) -> dict[str, object]:
        """Plain values for the event log."""
        return {"tid": self.tid, "state": self.state, "wchan": self.wchan}


def _call(data: bytes) -> tuple[int | None, tuple[int, ...]]:
    """The number of the system call and its six registers; None when the thread is in none, or that is not shown."""
    words = data.split()
    try:
        return (int(words[0]), tuple(int(word, 16) for word in words[1:7])) if len(words) == 9 else (None, ())
    except ValueError:
        return None, ()


def threads_of(pid: int, root: str = "/", most: int = _MOST_THREADS) -> list[Thread]:
    """The threads of a process, the main one first; empty when it is gone."""
    task = f"{root.rstrip('/')}/proc/{pid}/task"
    try:
        tids = sorted(int(name) for name in os.listdir(task) if name.isdigit())
    except OSError:
        return []
    found = []
    for tid in tids[:most]:
        read = parse_stat(read_bytes(f"{task}/{tid}/stat", 1024))
        if read is not None:
            found.append(Thread(pid, tid, read.state, f"{task}/{tid}"))
    return found


class Wait:
    """What a thread waits for."""

    __slots__ = ("ends_by_itself", "is_closed", "kind", "what")

    def __init__(self, kind: str, what: str, ends_by_itself: bool = False, is_closed: bool = False) -> None:
        self.kind = kind
        """`lock`, `pipe`, `network`, `disk`, `child`, `sleep`, `events` or `unknown`."""
        self.what = what
        """The same in words, after "it"."""
        self.ends_by_itself = ends_by_itself
        """Whether the call has a time limit."""
        self.is_closed = is_closed
        """Whether only a thread of the same process tree can end it."""


_SLEEP = Wait("sleep", "sleeps", ends_by_itself=True)
_PLACES = {
    "hrtimer_nanosleep": _SLEEP,
    "futex": Wait("lock", _LOCK),
    "do_wait": Wait("child", _CHILD),
    **dict.fromkeys(("wait_woken", "sk_", "tcp_", "inet_csk"), Wait("network", _NETWORK)),
    **dict.fromkeys(
        ("poll_", "do_poll", "do_sys_poll", "do_select", "ep_poll", "pipe_", "anon_pipe", "unix_"),
        Wait("events", _EVENTS),
    ),
}
"""Kernel functions by their beginnings, for where `syscall` may not be read: less is known, and nothing proven."""


class Look:
    """A process tree at one moment: every thread, and the bytes that its files and sockets have moved so far."""

    def __init__(self, t: float, pids: list[int], lead: int, root: str = "/") -> None:
        """`lead`: the process that trains, one of `pids`."""
        self.t, self.pids, self.lead, self.root = t, pids, lead, root
        found: list[Thread] = []
        for pid in pids:
            found += threads_of(pid, root, _MOST_THREADS - len(found) + 1)
        self.is_whole = (
            len(found) <= _MOST_THREADS
            and all(
                thread.slices is not None and (thread.call is not None or thread.state != "S")
                for thread in found
            )
            and not any(handles_signal(pid, _SIGALRM, root) for pid in pids)
        )
        """Whether nothing that could still happen is out of sight: a thread, or an alarm clock."""
        self.threads = {thread.tid: thread for thread in found if thread.state not in ("Z", "X")}
        self.descriptors = {pid: _descriptors(pid, root) for pid in pids}
        inodes = {_inode(path, "socket") for paths in self.descriptors.values() for path in paths.values()}
        self.transferred = transferred_bytes({inode for inode in inodes if inode is not None})
        """By socket, the bytes that came and went over TCP; None when the kernel does not say."""
        self.moved = [_moved(pid, root) for pid in pids]
        self._socket_peers: dict[int, int] | None = None
        self._held_elsewhere: set[str] | None = None

    @property
    def main(self) -> Thread | None:
        """The main thread of the process that trains."""
        return self.threads.get(self.lead)

    def wait(self, thread: Thread) -> Wait:
        """What this thread waits for, from the system call that it is in."""
        if thread.state == "D":
            return Wait("disk", self._file_work(thread) or "waits for a disk or a mounted drive")
        name = thread.call_name
        if thread.wchan and thread.wchan.startswith(_DRIVES):
            return Wait("disk", self._file_work(thread) or "waits for a mounted drive")
        if name == "futex":
            return _futex(thread)
        if name in (*_FILE_WORK, "accept", "connect"):
            return self._file(thread)
        if name == "child":
            return Wait("child", _CHILD, is_closed=True)
        if name in _TIMEOUTS:
            return Wait("events", _EVENTS, _is_timed(thread))
        if name == "sleep":
            return _SLEEP
        place = next((start for start in _PLACES if (thread.wchan or "").startswith(start)), None)
        return _PLACES[place] if place is not None else Wait("unknown", "waits in the kernel")

    def _path(self, thread: Thread) -> str:
        files = self.descriptors.get(thread.pid, {})
        return files.get(thread.arguments[0] & 0xFFFFFFFF, "") if thread.arguments else ""

    def _file(self, thread: Thread) -> Wait:
        path = self._path(thread)
        inode = _inode(path, "pipe")
        if inode is not None:
            return Wait("pipe", "waits for the other end of a pipe", is_closed=self._is_ours(path))
        inode = _inode(path, "socket")
        peer = self._peers().get(inode) if inode is not None else None
        if peer is not None:
            closed = self._is_ours(f"socket:[{peer}]")
            return Wait("pipe", "waits for the other end of a socket on this machine", is_closed=closed)
        if inode is not None:
            return Wait("network", _NETWORK)
        if not path.startswith("/"):  # an event counter, a timer, or a file that we may not see
            return Wait("events", "waits for an event")
        if thread.call_name == "read" and _is_fifo(path):
            return Wait("pipe", f"waits for the other end of {_printable(path)}")
        if path.startswith("/dev/") and not path.startswith("/dev/shm/"):  # noqa: S108 - only compared
            return Wait("events", f"waits for input from {_printable(path)}")
        return Wait("disk", self._file_work(thread) or "waits for a file")

    def _peers(self) -> dict[int, int]:
        if self._socket_peers is None:
            self._socket_peers = peers()
        return self._socket_peers

    def _is_ours(self, name: str) -> bool:
        """Whether no process outside of the tree holds this pipe or socket, and all of them can be looked into."""
        if self._held_elsewhere is None:
            self._held_elsewhere = _held_outside(self.pids, self.root)
        return name not in self._held_elsewhere and _HIDDEN not in self._held_elsewhere

    def _file_work(self, thread: Thread) -> str | None:
        """`is writing to /content/drive/model.pt`, where the call names a file."""
        doing, path = _FILE_WORK.get(thread.call_name), self._path(thread)
        return f"{doing} {_printable(path)}" if doing and path.startswith("/") else None


class Activity:
    """What a process tree did between two looks."""

    __slots__ = (
        "cores", "delayed", "file_wait", "is_closed", "is_still", "is_stopped", "main_delayed", "main_is_still",
        "moved", "seconds", "threads", "transferred", "wait",
    )  # fmt: skip

    def __init__(self, before: Look, after: Look) -> None:
        self.seconds = max(1e-6, after.t - before.t)
        pairs = [(before.threads[tid], now) for tid, now in after.threads.items() if tid in before.threads]
        known = [(then, now) for then, now in pairs if now.slices is not None and then.slices is not None]
        self.is_stopped = bool(pairs) and all(now.state in ("T", "t") for _, now in pairs)
        self.cores = sum(_grown(then.ran, now.ran) for then, now in known) / self.seconds / 1e9
        """CPU time, in cores."""
        delays = {now.tid: _delay(then, now, self.seconds) for then, now in known}
        self.delayed = max(delays.values(), default=None)
        """The largest share of the time that a thread was ready to run and not on a CPU; None when not known."""
        self.main_delayed = delays.get(after.lead)
        """The same of the main thread of the training."""
        same = before.threads.keys() == after.threads.keys() and len(known) == len(pairs)
        self.is_still = same and bool(known) and all(then.slices == now.slices for then, now in known)
        """Whether no thread of the tree has run at all."""
        main = after.main
        self.main_is_still = any(now is main and then.slices == now.slices for then, now in known)
        """Whether the main thread of the training has not run at all."""
        waits = {
            tid: after.wait(thread) for tid, thread in after.threads.items() if thread.state in ("S", "D")
        }
        self.wait = waits.get(after.lead)
        """What that thread waits for; None when it runs."""
        self.file_wait = next((wait for wait in waits.values() if wait.kind == "disk"), None)
        """The wait of a thread, be it the main one or another, for a file or a drive."""
        self.is_closed = (
            self.is_still
            and before.is_whole
            and after.is_whole
            and all(thread.state == "S" and _is_caught(waits[tid]) for tid, thread in after.threads.items())
        )
        """Whether every thread of the tree waits for another one of it, with no time limit: that never ends."""
        self.threads = [thread for thread in after.threads.values() if thread.pid == after.lead]
        """Those of the process that trains, the main one first."""
        self.transferred = _rate_of_sockets(before.transferred, after.transferred, self.seconds)
        """Bytes a second that came and went over the network."""
        moved = [
            _grown(early, late)
            for early, late in zip(before.moved, after.moved, strict=False)
            if early is not None and late is not None and before.pids == after.pids
        ]
        self.moved = sum(moved) / self.seconds if moved else None
        """Bytes a second that were read or written: files, pipes, terminals."""


def _is_caught(wait: Wait) -> bool:
    return wait.is_closed and not wait.ends_by_itself


def _futex(thread: Thread) -> Wait:
    operation, timeout = thread.arguments[1], thread.arguments[3]
    if operation & 0x7F not in _FUTEX_WAITS:
        return Wait("unknown", "waits in the kernel")
    # One that is not private may lie in memory shared with a process that is not of the tree.
    return Wait("lock", _LOCK, timeout != 0, bool(operation & _FUTEX_PRIVATE))


def _is_timed(thread: Thread) -> bool:
    value = thread.arguments[_TIMEOUTS[thread.call_name]]
    # A pointer that is null, or -1 milliseconds: for ever.
    is_pointer = thread.call_name in ("ppoll", "select")
    return value != 0 if is_pointer else value & 0xFFFFFFFF != 0xFFFFFFFF


def _printable(path: str) -> str:
    return "".join(filter(str.isprintable, path))[:120]


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def _descriptors(pid: int, root: str) -> dict[int, str]:
    folder = f"{root.rstrip('/')}/proc/{pid}/fd"
    found = {}
    try:
        for name in os.listdir(folder):
            try:
                found[int(name)] = os.readlink(f"{folder}/{name}")
            except (OSError, ValueError):
                continue
    except OSError:
        pass
    return found


def _inode(path: str, kind: str) -> int | None:
    start = f"{kind}:["
    return int(path[len(start) : -1]) if path.startswith(start) and path[len(start) : -1].isdigit() else None


def _held_outside(pids: list[int], root: str) -> set[str]:
    """The pipes and sockets of all other processes; with `_HIDDEN` where one of them cannot be looked into."""
    folder = root.rstrip("/") + "/proc"
    found: set[str] = set()
    for entry in os.listdir(folder):
        if not entry.isdigit() or int(entry) in pids:
            continue
        try:
            numbers = os.listdir(f"{folder}/{entry}/fd")
        except PermissionError:
            return {_HIDDEN}
        except OSError:
            continue
        for number in numbers:
            try:
                found.add(os.readlink(f"{folder}/{entry}/fd/{number}"))
            except OSError:
                continue
    return found


def _moved(pid: int, root: str) -> int | None:
    data = read_bytes(f"{root.rstrip('/')}/proc/{pid}/io", 1024)
    parts = [field(data, name) for name in (b"rchar:", b"wchar:", b"read_bytes:", b"write_bytes:")]
    return None if None in parts else sum(part or 0 for part in parts)


def _grown(before: int | None, after: int | None) -> int:
    return max(0, (after or 0) - (before or 0))


def _delay(before: Thread, after: Thread, seconds: float) -> float:
    """A thread that waits for the CPU all the time is counted only once it gets it: then its state alone tells."""
    if before.state == after.state == "R" and before.slices == after.slices:
        return 1.0
    return min(1.0, _grown(before.delayed, after.delayed) / seconds / 1e9)


def _rate_of_sockets(
    before: dict[int, int] | None, after: dict[int, int] | None, seconds: float
) -> float | None:
    if before is None or after is None:
        return None
    return sum(max(0, count - before.get(inode, 0)) for inode, count in after.items()) / seconds
