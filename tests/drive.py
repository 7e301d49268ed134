"""A mounted drive as Google's is: FUSE, all files of one owner with one mode, no links, no locks of its own.

`python -m tests.drive MOUNT_POINT UID [NAME]` mounts it and serves it from memory until it is killed; once a file of
this name is made it hangs, as with a network that is down. While a file `full` is in it no other takes a byte, whatever
it reports as free. The protocol is the kernel's (include/uapi/linux/fuse.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import sys
import time
from dataclasses import dataclass, field

_MOST_WRITE = 128 << 10
_MS_NODEV_NOSUID = 6
_SIZE = 1 << 3  # FATTR_SIZE
_FORGET, _BATCH_FORGET, _INTERRUPT, _DESTROY = 2, 42, 36, 38


@dataclass
class Node:
    """A file or a folder."""

    number: int
    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, Node] = field(default_factory=dict)
    written: float = field(default_factory=time.time)


class Drive:
    """Answers the kernel's questions."""

    def __init__(self, uid: int, hangs_at: str) -> None:
        self._uid = uid
        self._hangs_at = hangs_at.encode()
        self._nodes = {1: Node(1, True)}
        self._answers = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 9: self._mkdir, 10: self._unlink, 11: self._rmdir,
            12: self._rename, 45: self._rename2, 14: self._open, 27: self._open, 15: self._read, 16: self._write,
            17: self._statfs, 28: self._readdir, 26: self._init, 35: self._create,
            **dict.fromkeys((18, 20, 25, 29, 30, 34), lambda node, body: b""),
        }  # fmt: skip

    def serve(self, descriptor: int) -> None:
        """Until the drive is unmounted."""
        while True:
            try:
                message = os.read(descriptor, _MOST_WRITE + (64 << 10))
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue
            _, code, unique, node = struct.unpack_from("<IIQQ", message)
            if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                known = self._answers.get(code)
                if known is None:  # links, devices, modes: a drive has none
                    raise OSError(errno.EPERM if code in (5, 6, 8, 13) else errno.ENOSYS, "")
                data, number = known(self._nodes.get(node, self._nodes[1]), message[40:]), 0
            except OSError as error:
                data, number = b"", -(error.errno or errno.EIO)
            os.write(descriptor, struct.pack("<IiQ", 16 + len(data), number, unique) + data)
            if code == _DESTROY:
                return

    def _init(self, node: Node, body: bytes) -> bytes:
        return struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 20, 1 << 5, 12, 9, _MOST_WRITE, 1, 0, 0, 0, *[0] * 7)

    def _attributes(self, node: Node) -> bytes:
        mode = (stat.S_IFDIR | 0o700) if node.is_folder else (stat.S_IFREG | 0o600)
        when = int(node.written)
        return struct.pack("<6Q10I", node.number, len(node.data), -(-len(node.data) // 512), when, when, when, 0, 0, 0,
                           mode, 1, self._uid, self._uid, 0, 4096, 0)  # fmt: skip

    def _entry(self, node: Node) -> bytes:
        return struct.pack("<QQQQII", node.number, 0, 0, 0, 0, 0) + self._attributes(node)

    def _getattr(self, node: Node, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _setattr(self, node: Node, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _SIZE:
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        return self._getattr(node, body)  # modes and owners are taken and forgotten

    def _lookup(self, node: Node, body: bytes) -> bytes:
        found = node.names.get(body.rstrip(b"\0"))
        if found is None:
            raise OSError(errno.ENOENT, "")
        return self._entry(found)

    def _made(self, node: Node, name: bytes, is_folder: bool) -> Node:
        if name in node.names:
            raise OSError(errno.EEXIST, "")
        made = Node(max(self._nodes) + 1, is_folder)
        self._nodes[made.number] = node.names[name] = made
        return made

    def _mkdir(self, node: Node, body: bytes) -> bytes:
        return self._entry(self._made(node, body[8:].rstrip(b"\0"), True))

    def _create(self, node: Node, body: bytes) -> bytes:
        name = body[16:].rstrip(b"\0")
        if name == self._hangs_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._entry(self._made(node, name, False)) + self._open(node, b"")

    def _unlink(self, node: Node, body: bytes) -> bytes:
        if node.names.pop(body.rstrip(b"\0"), None) is None:
            raise OSError(errno.ENOENT, "")
        return b""  # whoever has it open still reads it by its number

    def _rmdir(self, node: Node, body: bytes) -> bytes:
        if node.names[body.rstrip(b"\0")].names:
            raise OSError(errno.ENOTEMPTY, "")
        return self._unlink(node, body)

    def _rename(self, node: Node, body: bytes, names_at: int = 8) -> bytes:
        (to,) = struct.unpack_from("<Q", body)
        old, new = body[names_at:].rstrip(b"\0").split(b"\0")
        there = self._nodes[to].names.get(new)
        if there is not None and there.names:
            raise OSError(errno.ENOTEMPTY, "")
        self._nodes[to].names[new] = node.names.pop(old)
        return b""

    def _rename2(self, node: Node, body: bytes) -> bytes:
        return self._rename(node, body, 16)

    def _open(self, node: Node, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def _read(self, node: Node, body: bytes) -> bytes:
        _, at, size = struct.unpack_from("<QQI", body)
        return bytes(node.data[at : at + size])

    def _write(self, node: Node, body: bytes) -> bytes:
        if b"full" in self._nodes[1].names:
            raise OSError(errno.ENOSPC, "")
        _, at, size = struct.unpack_from("<QQI", body)
        node.data.extend(bytes(max(0, at - len(node.data))))
        node.data[at : at + size] = body[40 : 40 + size]
        node.written = time.time()
        return struct.pack("<II", size, 0)

    def _readdir(self, node: Node, body: bytes) -> bytes:
        _, at, most = struct.unpack_from("<QQI", body)
        listed = b""
        for number, (name, there) in list(enumerate(node.names.items(), 1))[at:]:
            kind = stat.S_IFMT(stat.S_IFDIR if there.is_folder else stat.S_IFREG) >> 12
            entry = struct.pack("<QQII", there.number, number, len(name), kind) + name
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > most:
                break
            listed += entry
        return listed

    def _statfs(self, node: Node, body: bytes) -> bytes:
        return struct.pack("<5QIIII6I", 1 << 20, 1 << 20, 1 << 20, 0, 0, 4096, 255, 4096, 0, *[0] * 6)


def main(mount_point: str, uid: int, hangs_at: str = "") -> None:
    """Mount, say so, and serve."""
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    given = b"drive", mount_point.encode(), b"fuse.drive", _MS_NODEV_NOSUID, options.encode()
    if libc.mount(*given):
        print(os.strerror(ctypes.get_errno()), flush=True)
        return
    print("mounted", flush=True)
    Drive(uid, hangs_at).serve(descriptor)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
