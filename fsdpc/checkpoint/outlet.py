"""Sending sets of weights to other processes of this host.

The values are in memory that the writer and its readers map. Messages go over a Unix socket, so
that a process that dies is noticed at once and leaves nothing behind. A set is sent in buckets,
each in one slot of the memory. The memory has two slots: the writer fills one slot while readers
use the other. A slot begins and ends with the number of its bucket; this number is 0 while the slot
is being written. Messages are JSON. The first message of a set carries the file descriptor of the
memory.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdpc.checkpoint.errors import CheckpointError

PAGE = 4096
SLOTS = 2
STAMP = struct.Struct("<Q")
_HEAD = struct.Struct("<4sQ")
_MAGIC = b"fsw1"
_MOST_BYTES = 1 << 30
_CREDENTIALS = struct.Struct("3i")
_LONGEST = 107  # the most bytes that the path of a socket may have
_CLOSED = -2


def socket_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path. Raises ``ValueError`` if it is too long for a socket."""
    found = os.path.abspath(os.fspath(path))
    if len(os.fsencode(found)) > _LONGEST:
        raise ValueError(f"{found!r} is longer than the {_LONGEST} bytes that a socket's path has")
    return found


def send(sock: socket.socket, body: dict[str, Any], fd: int | None = None) -> None:
    """Send a message, with the file descriptor ``fd`` if it is given."""
    text = json.dumps(body).encode()
    head = _HEAD.pack(_MAGIC, len(text))
    socket.send_fds(sock, [head], [] if fd is None else [fd])
    sock.sendall(text)


def receive(sock: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Return the next message and its file descriptor, if it has one. Raises ``EOFError`` if the
    other side has ended, and ``CheckpointError`` if the bytes are not a message.
    """
    head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    fd = fds[0] if fds else None
    head += _exactly(sock, _HEAD.size - len(head)) if head else b""
    if not head:
        raise EOFError
    magic, nbytes = _HEAD.unpack(head)
    if magic != _MAGIC or nbytes > _MOST_BYTES:
        raise CheckpointError("what comes over the socket is no stream of weights of this version")
    body = json.loads(_exactly(sock, nbytes))
    return body, fd


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = sock.recv(min(nbytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def peer_of(sock: socket.socket) -> int:
    """Return the id of the process at the other end. Raises ``PermissionError`` if the process
    belongs to another user than this one or root.
    """
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    if uid not in (0, os.geteuid()):
        raise PermissionError(f"process {pid} at the other end of the socket is of user {uid}")
    return int(pid)


@dataclass
class _Reader:
    """The connection of a reader. ``freed`` is the last bucket whose slot the reader has given
    back, ``done`` the last set that the reader has received whole. ``waits`` is True if the reader
    has asked for another set.
    """

    sock: socket.socket
    pid: int
    freed: int = 0
    done: int = 0
    waits: bool = False

    def hear(self) -> None:
        """Receive one message of the reader, and record what it says."""
        body, _ = receive(self.sock)
        self.freed = max(self.freed, int(body.get("free", 0)))
        self.done = max(self.done, int(body.get("done", 0)))
        self.waits |= "next" in body


class Outlet:
    """The writer's end of the stream. Local. Raises ``OSError`` or ``CheckpointError`` if ``path``
    is in use or cannot be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = self.bucket = 0  # numbers of the last begun set and the last delivered bucket
        self._readers: list[_Reader] = []
        self._fd = -1
        self._memory: mmap.mmap | None = None
        self._room = 0
        self._tensors = 0
        _remove_stale(path)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            self._server.bind(path)
        finally:
            os.umask(before)
        self._server.listen()
        self._pid = os.getpid()

    def connected(self, count: int, timeout: float) -> bool:
        """Return True once at least ``count`` readers are connected and all of them wait for a set;
        False if this takes longer than ``timeout`` seconds. Readers that have ended between two
        sets are dropped.
        """
        until = time.monotonic() + timeout
        while True:
            for reader in [each for each in self._readers if _has_ended(each)]:
                self._drop(reader)
            if count <= self.waiting == len(self._readers):
                return True
            known = [self._server, *(each.sock for each in self._readers)]
            ready, _, _ = select.select(known, [], [], max(0, until - time.monotonic()))
            if not ready:
                return False
            if self._server in ready:
                sock, _ = self._server.accept()
                try:
                    self._readers.append(_Reader(sock, peer_of(sock), self.bucket))
                except PermissionError:
                    sock.close()

    @property
    def waiting(self) -> int:
        """Return the number of readers that wait for a set."""
        return sum(reader.waits for reader in self._readers)

    def begin(self, room: int, step: int | None, buckets: Sequence[Any], deadline: float) -> None:
        """Announce a set whose buckets have at most ``room`` bytes."""
        if self._memory is None or room > self._room:
            self._map(room)
        self.number += 1
        self._tensors = sum(len(bucket) for bucket in buckets)
        for reader in self._readers:
            reader.sock.settimeout(deadline)
            reader.waits = False
        body = {"set": self.number, "step": step, "first": self.bucket + 1, "slot": self._room,
                "buckets": buckets}  # fmt: skip
        self._tell(body, self._fd)

    def _map(self, room: int) -> None:
        if self._memory is not None:
            os.close(self._fd)
        self._room = -(-room // PAGE) * PAGE + 2 * PAGE
        self._fd = os.memfd_create("fsdpc weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, SLOTS * self._room)
        self._memory = mmap.mmap(self._fd, SLOTS * self._room)

    def is_free(self, timeout: float) -> bool:
        """Return True once no reader uses the slot of the next bucket, or False if this takes
        longer than ``timeout`` seconds.
        """
        return self._heard(lambda reader: reader.freed >= self.bucket + 1 - SLOTS, timeout)

    def room(self) -> Tensor:
        """Mark the slot of the next bucket as being written, and return its memory as bytes."""
        assert self._memory is not None
        at = self._stamp(self.bucket + 1, 0)
        count = self._room - 2 * PAGE
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=at + PAGE)

    def deliver(self) -> None:
        """Mark the slot that ``room`` has returned as full, and tell the readers."""
        self.bucket += 1
        self._stamp(self.bucket, self.bucket)
        self._tell({"bucket": self.bucket})

    def _stamp(self, bucket: int, value: int) -> int:
        assert self._memory is not None
        at = bucket % SLOTS * self._room
        STAMP.pack_into(self._memory, at, value)
        STAMP.pack_into(self._memory, at + self._room - PAGE, value)
        return at

    def end(self) -> None:
        """Tell the readers that the set is complete."""
        self._tell({"end": self.number, "tensors": self._tensors})

    def is_taken(self, timeout: float) -> bool:
        """Return True once all readers have the whole set, or False if this takes longer than
        ``timeout`` seconds.
        """
        return self._heard(lambda reader: reader.done >= self.number, timeout)

    def abort(self, text: str) -> None:
        """Abort a set. The readers raise an error and have to connect again."""
        for reader in list(self._readers):
            with suppress(OSError):
                send(reader.sock, {"abort": text})
            self._drop(reader)

    def close(self) -> None:
        """Close the stream, which ends the readers' loops. A second call, or a call in a forked
        child, does nothing.
        """
        if self._fd == _CLOSED or os.getpid() != self._pid:
            return
        for reader in list(self._readers):
            with suppress(OSError):
                send(reader.sock, {"close": True})
            self._drop(reader)
        self._server.close()
        with suppress(OSError):
            os.unlink(self.path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = _CLOSED

    def _heard(self, holds: Callable[[_Reader], bool], timeout: float) -> bool:
        until = time.monotonic() + timeout
        while True:
            late = {each.sock: each for each in self._readers if not holds(each)}
            if not late:
                return True
            ready, _, _ = select.select(list(late), [], [], max(0, until - time.monotonic()))
            if not ready:
                return False
            for sock in ready:
                try:
                    late[sock].hear()
                except (EOFError, OSError) as error:
                    raise self._left(late[sock]) from error

    def _tell(self, body: dict[str, Any], fd: int | None = None) -> None:
        for reader in self._readers:
            try:
                send(reader.sock, body, fd)
            except OSError as error:
                raise self._left(reader) from error

    def _left(self, reader: _Reader) -> CheckpointError:
        return CheckpointError(
            f"the reader at {self.path} (pid {reader.pid}) has ended or left in the middle of set "
            f"{self.number}: it does not have these weights whole"
        )

    def _drop(self, reader: _Reader) -> None:
        reader.sock.close()
        self._readers.remove(reader)


def _has_ended(reader: _Reader) -> bool:
    """Return whether a reader has ended between two sets. Receives the messages that the reader has
    sent since the last set.
    """
    try:
        while select.select([reader.sock], [], [], 0)[0]:
            reader.hear()
    except (EOFError, OSError):
        return True
    return False


def _remove_stale(path: str) -> None:
    """Remove the socket of a dead process. Raises ``CheckpointError`` if the process is alive, or
    if ``path`` is not a socket.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return
    raise CheckpointError(f"another process publishes weights at {path}")
