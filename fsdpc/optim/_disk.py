"""Optimizer states in a file on a disk, which are stepped chunk by chunk through three buffers.

The file has no name (csrc/disk), so it disappears when the process ends, even if the process is
killed. Each state of each parameter is one range of the file. ``optimizer.state`` shows a state as
a tensor over a mapping of the file, so state dicts and checkpoints read states through the page
cache, whose memory the kernel may reclaim at any time. Steps bypass the page cache: while one chunk
is stepped in a buffer, the next chunk is read and the previous chunk is written.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdpc import _C
from fsdpc._comm.channel import program_rank
from fsdpc._companions.state_layout import BUFFERS, PAGE, Chunk, chunk_bytes_of
from fsdpc.optim._chunks import Store as Chunked
from fsdpc.optim._chunks import Wishes
from fsdpc.optim._device import refuse_disk

WIPE_ON_FORK = 18  # MADV_WIPEONFORK of madvise(2), which Python 3.14 does not name
# Bytes of a part of the file that several mapped states share. Each of these states has less than
# ROOM / 8 bytes.
ROOM = 1 << 22


class DiskError(RuntimeError):
    """States on a disk are damaged, or only some of them belong to the last step, so that no
    further step is possible.
    """


@dataclass(frozen=True)
class Disk:
    """An option that keeps an optimizer's states in a file of ``folder``, on a local disk of this
    rank's host.

    ``buffer_bytes``: the memory that this rank uses for states, which is the size of three buffers
    together. ``masters``: parameters in bfloat16 and float16 get a float32 master and float32
    states in the file. ``checksum``: check with CRC-32C that the bytes that are read are those that
    were written. ``io``: "io_uring", "threads" (pread and pwrite), or "auto", which uses threads
    where the kernel refuses io_uring. ``direct``: bypass the page cache if the file system permits
    it.
    """

    folder: str | os.PathLike[str]
    buffer_bytes: int = 96 << 20
    masters: bool = False
    checksum: bool = False
    io: str = "auto"
    direct: bool = True

    def __post_init__(self) -> None:
        least = BUFFERS * 32 * PAGE
        if self.buffer_bytes < least:
            raise ValueError(f"buffer_bytes must be at least {least}, got {self.buffer_bytes}")
        if self.io not in ("auto", "io_uring", "threads"):
            raise ValueError(f"io must be 'auto', 'io_uring' or 'threads', got {self.io!r}")

    @property
    def chunk_bytes(self) -> int:
        """The number of bytes of one buffer, a multiple of the page size."""
        return chunk_bytes_of(self.buffer_bytes)


class Mapped(NamedTuple):
    """A state that is stepped in the mapping of the file. It begins at byte ``at`` of ``memory``,
    and at byte ``begin`` of the file.
    """

    values: Tensor
    memory: mmap.mmap
    at: int
    begin: int


class Store(Chunked):
    """States in a file of this rank. States of parameters in ``mapped`` do not pass through
    buffers; the operating system reads and writes their pages.
    """

    error = DiskError

    def __init__(self, options: Disk, name: str) -> None:
        super().__init__(name, options.chunk_bytes)
        self.options = options
        self.masters = options.masters
        self.rank = program_rank()
        self.buffers: list[mmap.mmap] = []
        for _ in range(BUFFERS):
            made = mmap.mmap(-1, options.chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Without this advice, fork() would copy pages into which a transfer is writing. With
            # this advice, the child gets zeroed pages. MADV_DONTFORK would leave a hole in the
            # child's address space. When the child then unmaps the buffer, it would also unmap any
            # memory that was mapped into the hole in the meantime.
            made.madvise(WIPE_ON_FORK)
            self.buffers.append(made)
        folder = os.fspath(options.folder)
        self.disk = _C.disk_open(folder, self.rank, self.buffers, options.io, options.direct)
        if _C.disk_info(self.disk)["in_memory"]:
            warnings.warn(
                f"fsdpc.optim: {folder} lies in a file system that keeps files in memory, so "
                "states there save none; use a folder on a disk",
                stacklevel=4,
            )
        self.maps: list[mmap.mmap] = []
        self.whole: dict[tuple[Tensor, str], Mapped] = {}
        # The mapping in which the next small mapped state gets a place, the first free byte of this
        # mapping, and the mapping's offset in the file.
        self.room: tuple[mmap.mmap | None, int, int] = None, 0, 0

    def takes(self, param: Tensor) -> bool:
        return param not in self.mapped

    def choose(self, wanted: Wishes) -> None:
        """Raise ``NotImplementedError`` if a parameter that has a gradient is on a GPU."""
        refuse_disk([param for param, _ in wanted if param.grad is not None])

    def _grow(self, begin: int, end: int) -> mmap.mmap:
        _C.disk_grow(self.disk, end)
        mapped = mmap.mmap(_C.disk_info(self.disk)["fd"], end - begin, offset=begin)
        self.maps.append(mapped)
        return mapped

    def _view(self, memory: mmap.mmap, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)

    def kept(self, param: Tensor, name: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Return the memory of one state of ``param``, a parameter in ``self.mapped``. A new state
        is zero.
        """
        found = self.whole.get((param, name))
        if found is None or (found.values.dtype, found.values.shape) != (dtype, shape):
            count = shape.numel()
            size = -(-count * dtype.itemsize // PAGE) * PAGE
            is_small = size < ROOM // 8
            memory, at, begin = self.room
            if not is_small or memory is None or at + size > len(memory):
                begin, at = self.end, 0
                self.end += ROOM if is_small else size
                memory = self._grow(begin, self.end)
            if is_small:
                self.room = memory, at + size, begin
            values = self._view(memory, dtype, count, at).view(shape)
            found = self.whole[param, name] = Mapped(values, memory, at, begin + at)
        return found.values

    def advise(
        self, param: Tensor, name: str, soon: bool, first: int = 0, count: int | None = None
    ) -> None:
        """If ``soon``, advise the operating system to read ``count`` elements of a state from
        ``first`` on, because they will be used. Otherwise, advise it to write these elements and
        drop them from memory. If ``count`` is None, all elements from ``first`` on are meant.
        """
        found = self.whole.get((param, name))
        if found is None:
            return
        item, page = found.values.itemsize, mmap.PAGESIZE
        low = first * item // page * page
        size = (found.values.numel() if count is None else first + count) * item - low
        if size <= 0:
            return
        if not soon:
            found.memory.madvise(mmap.MADV_DONTNEED, found.at + low, size)
        advice = os.POSIX_FADV_WILLNEED if soon else os.POSIX_FADV_DONTNEED
        os.posix_fadvise(_C.disk_info(self.disk)["fd"], found.begin + low, size, advice)

    def forget_pages(self) -> None:
        """Drop the pages of states that earlier reads have mapped into this process's memory."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    # --- a step ----------------------------------------------------------------------------------

    def passes(self, active: Sequence[Tensor]) -> Pass:
        """Start to read the chunks that have states of these parameters, in the order of the file.
        Return the pass over these chunks.
        """
        self.settle()  # if an earlier step failed, its reads may still run
        self.forget_pages()
        return Pass(self, active)

    def start(self, write: bool, buffer: int, chunk: Chunk) -> None:
        """Start reading a chunk into a buffer, or writing a chunk from a buffer."""
        _C.disk_start(self.disk, write, buffer, chunk.parts)

    def wait(self, buffer: int) -> None:
        """Wait for the last read or write that was started with the buffer."""
        _C.disk_wait(self.disk, buffer)

    def settle(self) -> None:
        """Wait for transfers that still run, and ignore their errors."""
        for buffer in range(BUFFERS):
            with suppress(OSError):
                self.wait(buffer)

    def check(self, buffer: int, chunk: Chunk) -> None:
        """Raise ``DiskError`` if a chunk differs from what was written, unless the program has
        changed the chunk's states since then.
        """
        if not self.options.checksum or chunk.crc is None:
            return
        if chunk.versions == self._versions(chunk) and chunk.crc != self._crc(buffer, chunk):
            at, count, _ = chunk.parts[0]
            raise DiskError(
                f"{self.name}: rank {self.rank}: {count} bytes at byte {at} of the file of states "
                f"in {os.fspath(self.options.folder)} are not what was written there (checksum): "
                "load a checkpoint of model and optimizer"
            )

    def sign(self, buffer: int, chunk: Chunk) -> None:
        """Store the checksum of a chunk that is about to be written."""
        if self.options.checksum:
            chunk.crc, chunk.versions = self._crc(buffer, chunk), self._versions(chunk)

    def _crc(self, buffer: int, chunk: Chunk) -> int:
        with memoryview(self.buffers[buffer]) as whole, whole[: chunk.used] as used:
            return _C.ckpt_crc32c(used)

    def _versions(self, chunk: Chunk) -> int:
        entries = [self.entries[s.number] for s in chunk.slices]
        held = (self.held[entry.param][entry.index].values() for entry in entries)
        return sum(value._version for values in held for value in values)


class Pass:
    """One pass over chunks. At any time one chunk is read, one is stepped, and one is written."""

    def __init__(self, store: Store, active: Sequence[Tensor]) -> None:
        self.store = store
        self.due = store.due(active)
        self.started = 0
        self.began = False  # whether this pass has begun to change values
        for _ in range(min(BUFFERS - 1, len(self.due))):
            self._read_next()

    def _read_next(self) -> None:
        if self.started < len(self.due):
            self.store.start(False, self.started % BUFFERS, self.due[self.started])
            self.started += 1

    def run(self, step: Any) -> None:
        """Call ``step(chunk, buffer)`` for each chunk after it was read, then write the buffer."""
        for place, chunk in enumerate(self.due):
            buffer = place % BUFFERS
            self.store.wait(buffer)
            self.store.check(buffer, chunk)
            self.began = True
            step(chunk, self.store.buffers[buffer])
            self.store.sign(buffer, chunk)
            self.store.start(True, buffer, chunk)
            self.store.wait((place + BUFFERS - 1) % BUFFERS)
            self._read_next()
        self.end()

    def end(self) -> None:
        """Wait for all reads and writes that were started."""
        for buffer in range(BUFFERS):
            self.store.wait(buffer)
