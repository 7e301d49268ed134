"""What the kernel knows of a process's sockets, asked as `ss` does (netlink, sock_diag): bytes transferred, and peers.

/proc tells neither: `/proc/PID/io` counts `read()` but not `recv()`, and `/proc/net` adds up the whole machine. Any
user may ask. What cannot be asked (no such kernel module) is None.
"""

from __future__ import annotations

import struct

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
