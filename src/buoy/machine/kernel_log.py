"""The kernel's own log: who it killed and why, faults, GPU errors. Often not readable, and then it says so.

Lines that user space wrote into the log are left out: only the kernel's word is evidence.
"""

from __future__ import annotations

import errno
import os

_TELLING = (
    "Killed process",
    "oom-kill:",
    "Memory cgroup out of memory",
    "Out of memory",
    "segfault at",
    "traps:",
    "general protection",
    "NVRM: Xid",
    "I/O error",
    "No space",
    "blocked for more than",
)
_RECORD_SIZE = 8192  # the kernel refuses to read a record into less
_MOST_RECORDS = 4096
_MOST_LINES = 200
_MOST_CHARS = 1000

_REASONS = {
    errno.ENOENT: "there is no {path} here (usual in a container)",
    errno.EPERM: "not permitted (kernel.dmesg_restrict is 1 and we lack CAP_SYSLOG)",
    errno.EACCES: "not permitted to read {path}",
}


class KernelLog:
    """Lines about deaths that the kernel writes from now on."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._fd = -1
        self.reason: str | None = None
        """Why the log cannot be read; None when it can."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except (OSError, ValueError) as error:
            self.close()
            template = _REASONS.get(getattr(error, "errno", None) or 0, "{path}: {error}")
            self.reason = template.format(path=path, error=getattr(error, "strerror", None) or error)

    @property
    def readable(self) -> bool:
        """Whether silence of the log means anything."""
        return self._fd >= 0

    def read_new(self) -> list[dict[str, object]]:
        """Telling lines since the last call: `[{"t": monotonic seconds, "text"}]`."""
        lines: list[dict[str, object]] = []
        for _ in range(_MOST_RECORDS):
            if self._fd < 0 or len(lines) >= _MOST_LINES:
                break
            try:
                data = os.read(self._fd, _RECORD_SIZE)
            except BlockingIOError:
                break
            except OSError as error:
                # The oldest records were overwritten; reading continues behind them.
                if error.errno == errno.EPIPE:
                    continue
                self.close()
                self.reason = f"reading stopped: {error.strerror}"
                break
            if not data:
                break
            for record in data.decode("utf-8", "replace").split("\n"):
                line = _parse_record(record)
                if line is not None:
                    lines.append(line)
        return lines

    def close(self) -> None:
        """Let go of the log."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def parse_oom_kill(text: str) -> dict[str, object] | None:
    """Whom an OOM line names: `{"pid", "name", ...}`, sizes in bytes; None when it is no such line.

    >>> parse_oom_kill("Out of memory: Killed process 7 (python3) total-vm:8kB, anon-rss:4kB, UID:0")
    {'pid': 7, 'name': 'python3', 'total_vm': 8192, 'anon_rss': 4096}
    """
    if text.startswith("oom-kill:"):
        return _parse_oom_context(text[len("oom-kill:") :])
    _, found, rest = text.partition("Killed process ")
    number, _, rest = rest.partition(" (")
    name, closed, sizes = rest.rpartition(") total-vm:")
    if not found or not closed or not _is_pid(number):
        return None
    result: dict[str, object] = {"pid": int(number), "name": name}
    for part in ("total-vm:" + sizes).replace(",", " ").split():
        key, _, size = part.partition(":")
        if size.endswith("kB") and size[:-2].isdecimal() and key in _SIZES:
            result[_SIZES[key]] = int(size[:-2]) * 1024
    return result


def parse_segfault(text: str) -> dict[str, object] | None:
    """Who faulted, from `name[pid]: segfault at ...` or `traps: name[pid] general protection ...`.

    >>> parse_segfault("python3[42]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6")
    {'pid': 42, 'name': 'python3'}
    """
    head, found, _ = text.partition(": segfault at ")
    if not found:
        if not text.startswith("traps: "):
            return None
        start, closed, _ = text[len("traps: ") :].partition("] ")
        head = start + "]" if closed else ""
    name, bracket, number = head.rpartition("[")
    if not bracket or not number.endswith("]") or not _is_pid(number[:-1]):
        return None
    return {"pid": int(number[:-1]), "name": name}


def parse_xid(text: str) -> dict[str, object] | None:
    """An NVIDIA driver error: its number, the device, and the process when named.

    >>> parse_xid("NVRM: Xid (PCI:0000:00:04): 79, pid=1234, name=python3, GPU has fallen off the bus.")
    {'xid': 79, 'device': 'PCI:0000:00:04', 'pid': 1234, 'name': 'python3'}
    """
    _, found, rest = text.partition("NVRM: Xid (")
    device, closed, rest = rest.partition("): ")
    words = rest.split(", ")
    if not found or not closed or not words[0].strip().isdecimal() or len(words[0]) > 9:
        return None
    result: dict[str, object] = {"xid": int(words[0]), "device": device}
    for word in words[1:3]:
        key, _, value = word.partition("=")
        if key == "pid" and _is_pid(value.strip("'")):
            result["pid"] = int(value.strip("'"))
        elif key == "name" and "unknown" not in value:
            result["name"] = value
    return result


_SIZES = {
    "total-vm": "total_vm",
    "anon-rss": "anon_rss",
    "file-rss": "file_rss",
    "shmem-rss": "shmem_rss",
    "pgtables": "pgtables",
}


def _parse_record(record: str) -> dict[str, object] | None:
    """`priority,sequence,microseconds,flags;text`; priority holds the facility, and the kernel's own is 0."""
    head, found, text = record.partition(";")
    fields = head.split(",")
    if not found or len(fields) < 3 or not fields[0].isdecimal() or not fields[2].isdecimal():
        return None
    if int(fields[0][:9]) >> 3 or not any(word in text for word in _TELLING):
        return None
    shown = "".join(char if " " <= char <= "~" else " " for char in text)
    return {"t": int(fields[2][:18]) / 1e6, "text": shown[:_MOST_CHARS]}


def _parse_oom_context(text: str) -> dict[str, object] | None:
    """`constraint=...,oom_memcg=...,task_memcg=...,task=NAME,pid=N,uid=N`; a name may hold commas."""
    before, found, after = text.rpartition(",pid=")
    number = after.partition(",")[0]
    context, named, name = before.partition(",task=")
    if not found or not named or not _is_pid(number):
        return None
    result: dict[str, object] = {"pid": int(number), "name": name}
    for part in context.split(","):
        key, _, value = part.partition("=")
        if key in ("constraint", "oom_memcg", "task_memcg"):
            result["memcg" if key == "oom_memcg" else key] = value
    return result


def _is_pid(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 10
