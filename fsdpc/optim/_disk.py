"""Optimizer states in a file on a disk, stepped part by part through three buffers.

The file has no name (csrc/disk): it ends with the process, however that ends. Each state of each
parameter is one range of the file, and ``optimizer.state`` shows it as a tensor over a mapping of
the file, so that state dicts and checkpoints read it through the page cache, which the kernel
empties as it likes. Steps pass by that cache: while one chunk is stepped in a buffer, the next is
read and the one before is written.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc.optim._disk_layout import BUFFERS, PAGE, Chunk, Wanted, chunk_bytes_of, lay_out
from fsdpc.optim._places import Place, Span, local_of

MASTER = "master"
NARROW = (torch.bfloat16, torch.float16)


class DiskError(RuntimeError):
    """States on a disk that no step may start from."""


@dataclass(frozen=True)
class Disk:
    """States of an optimizer in a file of ``folder``, on a local disk of this rank's host.

    ``buffer_bytes``: the memory of this rank for all states together, in three buffers.
    ``masters``: parameters in bfloat16 and float16 get a float32 master and float32 states in the
    file. ``checksum``: every part that is read must be what was written (CRC-32C).
    ``io``: "io_uring", "threads" (pread and pwrite), or "auto", which uses threads where the kernel
    refuses io_uring. ``direct``: pass by the page cache where the file system can.
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
        """Bytes of one buffer, in whole pages."""
        return chunk_bytes_of(self.buffer_bytes)


class GuardedState(defaultdict[Any, Any]):
    """An optimizer's ``state`` that raises ``DiskError`` while states are mixed."""

    broken: str | None = None

    def __init__(self, content: Any = ()) -> None:
        super().__init__(dict, content)

    def check(self) -> None:
        """Raise if states are mixed."""
        if self.broken is not None:
            raise DiskError(self.broken)

    def __getitem__(self, key: Any) -> Any:
        self.check()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.check()
        return super().get(key, default)

    def items(self) -> Any:
        self.check()
        return super().items()

    def clear(self) -> None:
        super().clear()
        self.broken = None

    def __reduce__(self) -> Any:
        """A copy is an ordinary one, in memory."""
        return defaultdict, (dict,), None, None, iter(self.items())


class Store:
    """The states of one optimizer on this rank."""

    def __init__(self, options: Disk, name: str) -> None:
        self.options = options
        self.name = name
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.buffers: list[mmap.mmap] = []
        for _ in range(BUFFERS):
            made = mmap.mmap(-1, options.chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            made.madvise(mmap.MADV_DONTFORK)  # a fork would copy pages under a transfer
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
        self.chunks: list[Chunk] = []
        self.params: list[Tensor] = []
        self.held: dict[Tensor, dict[str, Tensor]] = {}
        self.zero: set[tuple[Tensor, str]] = set()  # whose space has never been written
        self.end = 0

    # --- where states lie ------------------------------------------------------------------------

    def reserve(self, wanted: Sequence[tuple[Tensor, Sequence[tuple[str, torch.dtype]]]]) -> None:
        """Space for the states of parameters that have none. ``OSError``: too little."""
        new = []
        for param, states in wanted:
            if param not in self.held:
                new.append((param, states))
            elif missing := {name for name, _ in states} - self.held[param].keys():
                raise ValueError(
                    f"{self.name}: states {sorted(missing)} cannot be added to parameters that "
                    "have states on a disk already: set the option before the first step"
                )
        sizes = [
            Wanted(local_of(param).numel(), tuple((name, t.itemsize) for name, t in states))
            for param, states in new
        ]
        layout = lay_out(sizes, self.options.chunk_bytes, self.end)
        begin, number, mapped = self.end, len(self.params), None
        if layout.end > begin:
            _C.disk_grow(self.disk, layout.end)
            fd = _C.disk_info(self.disk)["fd"]
            mapped = mmap.mmap(fd, layout.end - begin, offset=begin)
            self.maps.append(mapped)
        for (param, states), offsets in zip(new, layout.offsets, strict=True):
            self.params.append(param)
            self.held[param] = {
                name: _over(mapped, param, dtype, at - begin)
                for (name, dtype), at in zip(states, offsets, strict=True)
            }
            self.zero.update((param, name) for name, _ in states)
        for chunk in layout.chunks:
            chunk.slices = [s._replace(number=s.number + number) for s in chunk.slices]
        self.chunks += layout.chunks
        self.end = layout.end

    def zeros(self, param: Tensor, name: str) -> Tensor:
        """As ``tensor``, with zeros in it."""
        if (param, name) in self.zero:
            self.zero.remove((param, name))
        else:
            self.held[param][name].zero_()
        return self.tensor(param, name)

    def tensor(self, param: Tensor, name: str) -> Tensor:
        """The state as ``optimizer.state`` shows it: a DTensor for a DTensor."""
        found = self.held[param][name]
        if not isinstance(param, DTensor):
            return found
        return DTensor.from_local(
            found,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def adopt(self, param: Tensor, state: dict[str, Any]) -> None:
        """Copy states that lie elsewhere (loaded, or set by the user) into the file."""
        for name, own in self.held.get(param, {}).items():
            given = state.get(name)
            if not isinstance(given, Tensor):
                continue
            local = local_of(given).detach()
            if local.data_ptr() != own.data_ptr() or local.dtype != own.dtype:
                own.copy_(local.view(own.shape))
                self.zero.discard((param, name))
                state[name] = self.tensor(param, name)

    def forget_pages(self) -> None:
        """Drop what reading states has left in this process's memory."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    # --- a step ----------------------------------------------------------------------------------

    def passes(self, active: Iterable[Tensor]) -> Pass:
        """The chunks with states of these parameters, in the order of the file; starts reading."""
        self.settle()  # reads of a step that ended before its first chunk
        self.forget_pages()
        return Pass(self, {id(param) for param in active})

    def start(self, write: bool, buffer: int, chunk: Chunk) -> None:
        """Start moving a chunk."""
        _C.disk_start(self.disk, write, buffer, chunk.parts)

    def wait(self, buffer: int) -> None:
        """Wait for what was started last with the buffer."""
        _C.disk_wait(self.disk, buffer)

    def settle(self) -> None:
        """End what is on its way, whatever comes of it."""
        for buffer in range(BUFFERS):
            with suppress(OSError):
                self.wait(buffer)

    def check(self, buffer: int, chunk: Chunk) -> None:
        """``DiskError``: the chunk is not what was written, and nobody has set its states since."""
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
        """Remember the checksum of what is going to be written."""
        if self.options.checksum:
            chunk.crc, chunk.versions = self._crc(buffer, chunk), self._versions(chunk)

    def _crc(self, buffer: int, chunk: Chunk) -> int:
        with memoryview(self.buffers[buffer]) as whole, whole[: chunk.used] as used:
            return _C.ckpt_crc32c(used)

    def _versions(self, chunk: Chunk) -> int:
        held = (self.held[self.params[s.number]].values() for s in chunk.slices)
        return sum(value._version for values in held for value in values)


def _over(mapped: mmap.mmap | None, param: Tensor, dtype: torch.dtype, offset: int) -> Tensor:
    local = local_of(param)
    if mapped is None or local.numel() == 0:
        return torch.empty(local.shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(mapped, dtype=dtype, count=local.numel(), offset=offset)
    return flat.view(local.shape)


class Pass:
    """One pass over chunks, three at a time: read, stepped, written."""

    def __init__(self, store: Store, active: set[int]) -> None:
        self.store = store
        self.todo = [
            chunk
            for chunk in store.chunks
            if any(id(store.params[s.number]) in active for s in chunk.slices)
        ]
        self.started = 0
        self.began = False  # values have been changed
        for _ in range(min(BUFFERS - 1, len(self.todo))):
            self._read_next()

    def _read_next(self) -> None:
        if self.started < len(self.todo):
            self.store.start(False, self.started % BUFFERS, self.todo[self.started])
            self.started += 1

    def run(self, step: Any) -> None:
        """Call ``step(chunk, buffer)`` with each chunk in memory, and write what it leaves."""
        for place, chunk in enumerate(self.todo):
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
        """Wait for everything that was started."""
        for buffer in range(BUFFERS):
            self.store.wait(buffer)


class ChunkStates:
    """The states of a chunk's slices, as tensors over a buffer: what ``Store`` is to an optimizer
    that steps slices.
    """

    def __init__(self) -> None:
        self.held: dict[int, dict[str, Tensor]] = {}

    def zeros(self, shown: Tensor, name: str) -> Tensor:
        """Of a state that is about to be made; what it holds is not read."""
        return self.held[id(shown)][name]


def step_chunks(optimizer: Any, reading: Pass, members: Sequence[Any], scaling: Any) -> None:
    """Step all ``members``, one per group, chunk by chunk. If that fails in the middle, every later
    use of the states raises ``DiskError``.
    """
    rows: dict[int, tuple[int, Tensor, Tensor]] = {}
    for number, found in enumerate(members):
        for param, value, grad in zip(found.params, found.values, found.grads, strict=True):
            rows[id(param)] = (number, value.view(-1), grad.view(-1))

    def step(chunk: Chunk, buffer: mmap.mmap) -> None:
        _step_chunk(optimizer, chunk, buffer, rows, members, scaling)

    try:
        reading.run(step)
    except BaseException as error:
        reading.store.settle()
        if reading.began:
            optimizer.state.broken = (
                f"a step of {reading.store.name} ended in the middle ({error}): parameters and "
                "states are partly of this step and partly of the one before. Load a checkpoint "
                "of the model and of the optimizer"
            )
        raise
    has_places = hasattr(optimizer, "_place")
    for found in members:
        for param in found.params:
            state = optimizer.state[param]
            if "step" in state and not (has_places and not optimizer._place(param).spans):
                state["step"] += 1
            for name in reading.store.held[param]:
                if name not in state:
                    state[name] = reading.store.tensor(param, name)


def _step_chunk(
    optimizer: Any,
    chunk: Chunk,
    buffer: mmap.mmap,
    rows: dict[int, tuple[int, Tensor, Tensor]],
    members: Sequence[Any],
    scaling: Any,
) -> None:
    store, has_places = optimizer._store, hasattr(optimizer, "_place")
    worker = object.__new__(type(optimizer))  # the same rules over other tensors
    worker.__dict__.update(optimizer.__dict__)
    worker.state, worker._store, worker._known, worker._order = {}, ChunkStates(), {}, {}
    shown: list[list[Tensor]] = [[] for _ in members]
    grads: list[list[Tensor]] = [[] for _ in members]
    masters: list[tuple[Tensor, Tensor]] = []
    for piece in chunk.slices:
        param = store.params[piece.number]
        if id(param) not in rows or piece.begin == piece.end:
            continue
        number, value, grad = rows[id(param)]
        states = {
            name: torch.frombuffer(
                buffer, dtype=own.dtype, count=piece.end - piece.begin, offset=place
            )
            for (name, own), place in zip(store.held[param].items(), piece.places, strict=True)
        }
        part = value[piece.begin : piece.end]
        master = states.get(MASTER)
        if master is not None:
            _follow(master, part)
            masters.append((part, master))
            part = master
        real = optimizer.state[param]
        held = {name: own for name, own in states.items() if name in real}
        if "step" in real:
            held["step"] = real["step"].clone()
        worker.state[part] = held
        worker._store.held[id(part)] = states
        if has_places:
            worker._known[part] = slice_of_place(optimizer._place(param), piece.begin, piece.end)
            worker._order[part] = optimizer._number(param)
        shown[number].append(part)
        grads[number].append(grad[piece.begin : piece.end])
    for group, found, parts, own in zip(optimizer.param_groups, members, shown, grads, strict=True):
        if parts:
            slices = found._replace(params=parts, values=parts, grads=own, copies=[])
            worker._step_group(group, slices, scaling)
    for part, master in masters:
        part.copy_(master)


def _follow(master: Tensor, value: Tensor) -> None:
    """Where a parameter is not its master rounded, it was changed since: the master restarts."""
    changed = master.to(value.dtype) != value
    if bool(changed.any()):
        torch.where(changed, value.to(master.dtype), master, out=master)


def slice_of_place(place: Place, begin: int, end: int) -> Place:
    """The place of elements [begin, end) of a parameter's local tensor."""
    cut = []
    for span in place.spans:
        low, high = max(span.start, begin), min(span.start + span.length, end)
        if low < high:
            first = span.first + low - span.start
            cut.append(
                Span(low - begin, high - low, first, span.shape, span.key, span.cuts, span.name)
            )
    return Place(cut, place.group)
