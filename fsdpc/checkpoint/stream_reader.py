"""The reader of the weights that ``WeightStream.publish`` sends to other processes of the host.
See ``outlet`` for the protocol.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdpc._comm.bootstrap import read_timeout
from fsdpc.checkpoint.dtypes import dtype_of
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.outlet import (
    PAGE,
    SLOTS,
    STAMP,
    peer_of,
    receive,
    send,
    socket_path,
)
from fsdpc.checkpoint.whole import ALIGNED

_RETRY_S = 0.05


class StreamReader:
    """An iterator over the sets of weights that a training run publishes at ``path`` with
    ``WeightStream.publish``:

        with StreamReader("run/weights.sock", deadline=600) as reader:
            for weights in reader:  # ends when the training run closes its stream
                engine.load_weights(weights)  # (name, tensor) pairs, on the CPU

    The reader needs no process group. The constructor waits until a process publishes at ``path``.

    Args:
        path: the path of the socket, as for ``publish``.
        deadline: seconds that each wait for the publisher may take; default ``FSDPC_TIMEOUT``.

    Local. ``CheckpointError``: the deadline has passed, or the training run has ended or failed in
    the middle of a set; make a new reader for the next set. ``PermissionError``: the process that
    publishes at ``path`` belongs to another user.
    """

    def __init__(self, path: str | os.PathLike[str], *, deadline: float | None = None) -> None:
        self._path = socket_path(path)
        self._deadline = read_timeout() if deadline is None else deadline
        self._sock = self._connect()
        self._sock.settimeout(self._deadline)
        self._pid = peer_of(self._sock)
        self._memory: mmap.mmap | None = None
        self._fd = -1
        self._slot = 0
        # For each bucket whose slot is not released yet: the mappings of the bucket's tensors.
        self._maps: dict[int, list[weakref.ref[mmap.mmap]]] = {}
        self._set: StreamedSet | None = None

    def _connect(self) -> socket.socket:
        until = time.monotonic() + self._deadline
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                sock.connect(self._path)
                return sock
            except (FileNotFoundError, ConnectionRefusedError) as error:
                sock.close()
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"nobody has published weights at {self._path} for {self._deadline:g} s"
                    ) from error
                time.sleep(_RETRY_S)

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> StreamedSet:
        """Wait for the next set and return it. Raise ``CheckpointError`` if the previous set was
        not read to its end.
        """
        if self._set is not None and not self._set.complete:
            self.close()
            raise CheckpointError(
                f"set {self._set.number} of {self._path} was not read to its end, so its weights "
                "are not whole"
            )
        self._say({"next": True})
        body, fd = self._hear("the next set")
        if "close" in body:
            self.close()
            raise StopIteration
        if fd is None or "set" not in body:
            raise CheckpointError(f"{self._path}: a message that begins no set")
        self._map(fd, int(body["slot"]))
        self._set = StreamedSet(self, body)
        return self._set

    def close(self) -> None:
        """Leave the stream. If the reader leaves in the middle of a set, ``publish`` raises an
        error. Local.
        """
        self._sock.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _hear(self, what: str) -> tuple[dict[str, Any], int | None]:
        where = "" if self._set is None or self._set.complete else f" in set {self._set.number}"
        try:
            body, fd = receive(self._sock)
        except TimeoutError as error:
            raise CheckpointError(
                f"{self._path}: the training (pid {self._pid}) has sent nothing for "
                f"{self._deadline:g} s, waiting for {what}{where}"
            ) from error
        except (EOFError, OSError) as error:
            raise CheckpointError(
                f"{self._path}: the training (pid {self._pid}) has ended, waiting for {what}{where}"
                + (": these weights are not whole" if where else "")
            ) from error
        if "abort" in body:
            raise CheckpointError(
                f"{self._path}: the training has failed{where}, so these weights are not whole: "
                f"{body['abort']}"
            )
        return body, fd

    def _map(self, fd: int, slot: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._slot = fd, slot
        if slot < 2 * PAGE or os.fstat(fd).st_size != SLOTS * slot:
            raise CheckpointError(f"{self._path}: the shared memory has another size than stated")
        self._memory = mmap.mmap(fd, SLOTS * slot, prot=mmap.PROT_READ)

    def _check_stamps(self, bucket: int) -> None:
        """Raise ``CheckpointError`` if the stamp at either end of the bucket's slot is not the
        bucket's number.
        """
        assert self._memory is not None
        at = bucket % SLOTS * self._slot
        ends = [STAMP.unpack_from(self._memory, at + end)[0] for end in (0, self._slot - PAGE)]
        if ends != [bucket, bucket]:
            raise CheckpointError(
                f"{self._path}: the memory of bucket {bucket} has the numbers {ends}: it was "
                "written while it was read, so these weights are torn"
            )

    def _tensor(self, bucket: int, form: list[Any]) -> Tensor:
        """Return a tensor of a bucket. The tensor has its own private mapping of its bytes in the
        slot. If the training run writes to the slot again, the mapping shows the new bytes, unless
        ``_give_back`` has copied the pages before.
        """
        names, type_name, shape, offset = form
        dtype = dtype_of(type_name, names[0])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if offset % ALIGNED or not 0 <= offset <= self._slot - 2 * PAGE - nbytes:
            raise CheckpointError(f"{self._path}: {names[0]} lies outside of its slot")
        at = bucket % SLOTS * self._slot + PAGE + offset
        private = mmap.MAP_PRIVATE  # no other process sees what the reader writes
        pages = mmap.mmap(self._fd, nbytes, private, mmap.PROT_READ | mmap.PROT_WRITE, offset=at)
        self._maps.setdefault(bucket, []).append(weakref.ref(pages))
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def _give_back(self, until: int, *, detach: bool = False) -> None:
        """Release the slots of the buckets with numbers up to ``until``, in order. Stop at the
        first bucket that has a living tensor. With ``detach``, do not stop: copy the pages of
        living tensors, then release their slot.
        """
        for bucket in sorted(self._maps):
            if bucket > until:
                return
            held = [pages for pages in (ref() for ref in self._maps[bucket]) if pages is not None]
            if held and not detach:
                return
            for pages in held:
                first = np.frombuffer(pages, dtype=np.uint8)[::PAGE]
                first |= 0  # because of this write, the OS copies each page
            del self._maps[bucket]
            self._say({"free": bucket})

    def _say(self, body: dict[str, Any]) -> None:
        with suppress(OSError):  # if the publisher has ended, the next ``_hear`` raises
            send(self._sock, body)


class StreamedSet:
    """A set of weights. Iterate over the set once for its ``(name, tensor)`` pairs on the CPU.

    A tensor stays valid as long as it is referenced, but it is copied if it is kept while later
    buckets are read. In-place writes into a tensor stay in this process. ``step`` is the argument
    of ``publish``. Raises ``CheckpointError`` as ``StreamReader`` does, and if the values were
    overwritten while they were read. Local.
    """

    def __init__(self, reader: StreamReader, body: dict[str, Any]) -> None:
        self.number: int = body["set"]
        self.step: int | None = body["step"]
        self.complete = False
        self._reader, self._first, self._buckets = reader, int(body["first"]), body["buckets"]
        self._begun = False

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return the name, dtype and shape of every tensor, in the order of the set. Local."""
        return [
            (name, dtype_of(type_name, name), tuple(shape))
            for bucket in self._buckets
            for names, type_name, shape, _ in bucket
            for name in names
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._begun:
            raise CheckpointError(f"set {self.number} can be read once")
        self._begun = True
        reader, count = self._reader, 0
        for number, forms in enumerate(self._buckets, self._first):
            reader._give_back(number - SLOTS, detach=True)
            body, _ = reader._hear(f"bucket {number}")
            if body.get("bucket") != number:
                raise CheckpointError(f"bucket {number} of set {self.number} is missing: {body}")
            reader._check_stamps(number)
            for form in forms:
                tensor = reader._tensor(number, form)
                for name in form[0]:
                    yield name, tensor
                    reader._give_back(number - 1)
                count += 1
                del tensor
            reader._check_stamps(number)
        body, _ = reader._hear("the end of the set")
        if (body.get("end"), body.get("tensors")) != (self.number, count):
            raise CheckpointError(f"set {self.number} ends as {body} after {count} tensors")
        self.complete = True
        reader._say({"done": self.number})
