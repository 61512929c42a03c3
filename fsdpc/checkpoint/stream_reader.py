"""The reading end of ``WeightStream.publish``, in another process of the host. See ``outlet``."""

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
    """The sets of weights that a training publishes at ``path`` (``WeightStream.publish``):

        with StreamReader("run/weights.sock", deadline=600) as reader:
            for weights in reader:  # until the training closes its stream
                engine.load_weights(weights)  # (name, tensor) pairs, on the CPU

    Needs no process group. The constructor waits until somebody publishes there.

    Args:
        path: the socket's, as for ``publish``.
        deadline: seconds that each wait for the other side may take; default ``FSDPC_TIMEOUT``.

    Local. ``CheckpointError``: the deadline has passed, or the training has ended or failed in the
    middle of a set: connect again for the next one. ``PermissionError``: another user trains there.
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
        self._maps: dict[int, list[weakref.ref[mmap.mmap]]] = {}  # of buckets not given back
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
        """The next set; waits for it. ``CheckpointError``: the last one was not read to its end."""
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
        """Leave the stream; in the middle of a set, ``publish`` then raises an error. Local."""
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
        """``CheckpointError``: an end of the bucket's slot does not have the bucket's number."""
        assert self._memory is not None
        at = bucket % SLOTS * self._slot
        ends = [STAMP.unpack_from(self._memory, at + end)[0] for end in (0, self._slot - PAGE)]
        if ends != [bucket, bucket]:
            raise CheckpointError(
                f"{self._path}: the memory of bucket {bucket} has the numbers {ends}: it was "
                "written while it was read, so these weights are torn"
            )

    def _tensor(self, bucket: int, form: list[Any]) -> Tensor:
        """A tensor of a bucket, over a private mapping of its own: writes of the training would
        still show in its pages, until ``_give_back`` makes copies of them.
        """
        names, type_name, shape, offset = form
        dtype = dtype_of(type_name, names[0])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if offset % ALIGNED or not 0 <= offset <= self._slot - 2 * PAGE - nbytes:
            raise CheckpointError(f"{self._path}: {names[0]} lies outside of its slot")
        at = bucket % SLOTS * self._slot + PAGE + offset
        private = mmap.MAP_PRIVATE  # what a reader writes in place, nobody else sees
        pages = mmap.mmap(self._fd, nbytes, private, mmap.PROT_READ | mmap.PROT_WRITE, offset=at)
        self._maps.setdefault(bucket, []).append(weakref.ref(pages))
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def _give_back(self, until: int, *, detach: bool = False) -> None:
        """Give back the slots of buckets up to ``until`` of which nobody holds a tensor.
        ``detach``: give back all; tensors that somebody holds become copies.
        """
        for bucket in sorted(self._maps):
            if bucket > until:
                return
            held = [pages for pages in (ref() for ref in self._maps[bucket]) if pages is not None]
            if held and not detach:
                return
            for pages in held:
                first = np.frombuffer(pages, dtype=np.uint8)[::PAGE]
                first |= 0  # a write, by which the kernel copies the page
            del self._maps[bucket]
            self._say({"free": bucket})

    def _say(self, body: dict[str, Any]) -> None:
        with suppress(OSError):  # if the other side has ended, the next ``_hear`` raises
            send(self._sock, body)


class StreamedSet:
    """One set: iterate over it, once, for ``(name, tensor)`` on the CPU.

    A tensor stays valid while it is held; to hold more than one bucket's tensors costs copies.
    What is written into it in place stays in this process. ``step``: as given to ``publish``.
    ``CheckpointError`` as ``StreamReader``, also: the values are torn. Local.
    """

    def __init__(self, reader: StreamReader, body: dict[str, Any]) -> None:
        self.number: int = body["set"]
        self.step: int | None = body["step"]
        self.complete = False
        self._reader, self._first, self._buckets = reader, int(body["first"]), body["buckets"]
        self._begun = False

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor, in their order. Local."""
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
