"""A child process whose loss an exception reports, in the words of the library that noticed it.

The parent's line that raised is not at fault for such an exception: what counts is how the child ended.
"""

from __future__ import annotations

import signal
from typing import Any, Literal, NamedTuple

from buoy.text import whole_number
from buoy.verdict.status import Status, make_status
from buoy.verdict.values import mapping, mappings, text

_ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_SPAWNED = ("torch.multiprocessing.spawn.ProcessExitedException",)
_POOLS = ("BrokenProcessPool", "TerminatedWorkerError", "WorkerCrashedError")
_SOURCE = "the parent's exception"
_BROKEN = (
    "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError",
    "IncompleteReadError",
)  # fmt: skip
_SILENT = ("EOFError", "Empty", "TimeoutError")
"""What a line to a child says whose other end is gone; a file that is cut short, or a slow server, says the same."""
_LINES_TO_CHILDREN = ("/multiprocessing/", "/concurrent/futures/")


class LostChild(NamedTuple):
    """Who was lost, by which pids, and how it ended as far as the words say."""

    who: str
    pids: tuple[int, ...] = ()
    status: Status = Status()
    exact: bool = False
    """Whether the words come of the parent's own wait status, in a type that only its library raises."""
    is_in_chain: bool = False
    """Whether another exception followed from it, or while it was dealt with."""


BrokenLine = Literal["to a child", "to anyone"]
"""Whose end a line led to: only processes that belong together talk through `multiprocessing`."""


def lost_child(note: dict[str, Any]) -> LostChild | None:
    """What an exception note says of a lost child; None when it reports none, itself or in its chain."""
    found = _reported(note)
    if found is not None:
        return found
    inner = next((lost for lost in map(_reported, mappings(note.get("chain"))) if lost is not None), None)
    return inner._replace(exact=False, is_in_chain=True) if inner is not None else None


def broken_line(note: dict[str, Any]) -> BrokenLine | None:
    """The line to another process, if that it broke is what an exception or its chain says."""
    kinds = {str(link.get("type")).rpartition(".")[2] for link in (note, *mappings(note.get("chain")))}
    file = text(mapping(note.get("inner")).get("file")) or ""
    if any(part in file for part in _LINES_TO_CHILDREN):
        return "to a child" if kinds & {*_BROKEN, *_SILENT} else None
    return "to anyone" if kinds & {*_BROKEN} else None


def _reported(note: dict[str, Any]) -> LostChild | None:
    kind, message = text(note.get("type")) or "", text(note.get("message")) or ""
    if kind == _ELASTIC:
        return _failed_rank(message)
    if kind in _SPAWNED:
        return LostChild(_before(message, " terminated") or "a spawned process", (), _status(message), True)
    if kind == "subprocess.CalledProcessError" and "died with <Signals." in message:
        name = _before(message.partition("died with <Signals.")[2], ":")
        return LostChild("the command that it ran", (), _by_name(name), True)
    if message.startswith("DataLoader worker (pid"):
        links = [message, *(text(link.get("message")) or "" for link in mappings(note.get("chain")))]
        known = (_status(words) for words in links if words.startswith("DataLoader worker (pid"))
        status = next((found for found in known if found.known), Status())
        return LostChild(
            "DataLoader worker", pids_in(message.partition(" exited ")[0].partition(" is killed")[0]), status
        )
    if kind.rpartition(".")[2] in _POOLS:
        return LostChild("a worker of the process pool", (), _status(message))
    return None


def pids_in(message: str) -> tuple[int, ...]:
    """The numbers of a message that may be pids: `DataLoader worker (pid(s) 5097) exited unexpectedly`."""
    digits = "".join(sign if sign.isdecimal() else " " for sign in message.partition("pid")[2]).split()
    return tuple(int(word) for word in digits if len(word) < 9)


def _failed_rank(message: str) -> LostChild:
    """The root cause that torchelastic names: the last of its list, which a shortened message still holds."""
    _, found, root = message.partition("Root Cause")
    if not found:
        root = message.partition(" ... ")[2]
    rank = pid = code = None
    for line in root.splitlines():
        name, _, value = line.strip().partition(":")
        words = value.replace("(", " ").replace(")", " ").split()
        if name.strip() == "rank" and words:
            rank = whole_number(words[0])
        elif name.strip() == "exitcode" and words:
            code = whole_number(words[0].removeprefix("-"))
            code = -code if code is not None and words[0].startswith("-") else code
            pid = next(iter(pids_in(value)), None)
    if code is None or not -65 < code < 256:
        return LostChild("a rank", exact=True)
    raw = -code if code < 0 else code << 8
    return LostChild(
        f"rank {rank}" if rank is not None else "a rank",
        (pid,) if pid else (),
        make_status(raw, _SOURCE),
        True,
    )


def _status(message: str) -> Status:
    """How the words say it ended: `killed by signal: Killed`, `with signal SIGKILL`, `with exit code 3`."""
    for marker in ("killed by signal: ", "terminated with signal ", "{"):
        _, found, rest = message.partition(marker)
        if found:
            return _by_name(rest.partition(".")[0].partition("(")[0])
    _, found, rest = message.partition("with exit code ")
    code = whole_number(rest.split(" ", 1)[0].rstrip(".")) if found else None
    return make_status(code << 8, _SOURCE) if code is not None and code < 256 else Status()


def _by_name(name: str) -> Status:
    for number in signal.Signals:
        if name.strip() in (number.name, signal.strsignal(number)):
            return make_status(int(number), _SOURCE)
    return Status()


def _before(message: str, marker: str) -> str:
    words, found, _ = message.partition(marker)
    return words.strip() if found and len(words) < 40 else ""
