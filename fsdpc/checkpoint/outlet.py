"""Sets of weights for other processes of this host: values in memory that both map, messages over a
Unix socket, so that a process that dies is noticed at once and leaves nothing behind.

The memory has two slots, of which the writer fills one while readers use the other. A slot begins
and ends with the number of the bucket in it, 0 while it is written. Messages are JSON; the first of
a set has the descriptor of the memory.
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
_LONGEST = 107  # of a socket's path
_CLOSED = -2


def socket_path(path: str | os.PathLike[str]) -> str:
    """The absolute path. ``ValueError``: it is longer than the kernel takes."""
    found = os.path.abspath(os.fspath(path))
    if len(os.fsencode(found)) > _LONGEST:
        raise ValueError(f"{found!r} is longer than the {_LONGEST} bytes that a socket's path has")
    return found


def send(sock: socket.socket, body: dict[str, Any], fd: int | None = None) -> None:
    """Send a message, perhaps with a descriptor."""
    text = json.dumps(body).encode()
    head = _HEAD.pack(_MAGIC, len(text))
    socket.send_fds(sock, [head], [] if fd is None else [fd])
    sock.sendall(text)


def receive(sock: socket.socket) -> tuple[dict[str, Any], int | None]:
    """The next message and its descriptor, if it has one. ``EOFError``: the other side has ended.
    ``CheckpointError``: something else than a message.
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
    """The id of the process at the other end. ``PermissionError``: it is another user's process."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    if uid not in (0, os.geteuid()):
        raise PermissionError(f"process {pid} at the other end of the socket is of user {uid}")
    return int(pid)


@dataclass
class _Reader:
    """A connection. ``freed``: the last bucket whose slot it has given back; ``done``: the last set
    that it has taken whole; ``waits``: it has asked for another one.
    """

    sock: socket.socket
    pid: int
    freed: int = 0
    done: int = 0
    waits: bool = False

    def hear(self) -> None:
        """Take in one message."""
        body, _ = receive(self.sock)
        self.freed = max(self.freed, int(body.get("free", 0)))
        self.done = max(self.done, int(body.get("done", 0)))
        self.waits |= "next" in body


class Outlet:
    """The writer's end. Local. ``OSError``, ``CheckpointError``: ``path`` is in use or unusable."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = self.bucket = 0  # of the set and the bucket that were begun last
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
        """True once ``count`` readers, and all that are connected, wait for a set. Those that have
        ended between two sets are forgotten.
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
        """Readers that wait for a set."""
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
        """True once no reader uses the next bucket's slot."""
        return self._heard(lambda reader: reader.freed >= self.bucket + 1 - SLOTS, timeout)

    def room(self) -> Tensor:
        """The next bucket's slot, as bytes."""
        assert self._memory is not None
        at = self._stamp(self.bucket + 1, 0)
        count = self._room - 2 * PAGE
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=at + PAGE)

    def deliver(self) -> None:
        """Tell the readers that the slot which ``room`` gave is full."""
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
        """True once all readers have the whole set."""
        return self._heard(lambda reader: reader.done >= self.number, timeout)

    def abort(self, text: str) -> None:
        """Break off a set: readers raise, and have to connect again."""
        for reader in list(self._readers):
            with suppress(OSError):
                send(reader.sock, {"abort": text})
            self._drop(reader)

    def close(self) -> None:
        """End the readers' loops. Does nothing the second time, or in a forked child."""
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
    """Whether a reader has ended, between two sets; takes in what it has sent meanwhile."""
    try:
        while select.select([reader.sock], [], [], 0)[0]:
            reader.hear()
    except (EOFError, OSError):
        return True
    return False


def _remove_stale(path: str) -> None:
    """Remove a dead process's socket. ``CheckpointError``: it lives, or ``path`` is no socket."""
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
