"""Copies between a GPU and files, through pinned host memory that is kept for the next call.

The copies run on a lane (``_companions/lane.py``), after the work that torch's current stream has
queued so far. A save in the foreground, and a load, use two slots: while the writer writes one
slot, the lane fills the other. A save in the background copies everything into one snapshot. The
thread of the save waits for this copy, and so does the current stream before the next optimizer
step, but the caller does not wait. If the snapshot would be larger than ``FSDPC_PINNED_MIB``
(default: no bound), or if memory cannot be pinned, the values are copied through the slots into
ordinary memory before ``save`` returns.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fsdpc import _C
from fsdpc._companions.lane import Lane, call_before_write, ordinal_of, pinned
from fsdpc.checkpoint.entries import Entry
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import (
    ELEMENT_BYTES,
    FILE_TYPE,
    IN_TENSOR,
    INDEX,
    MEMORY,
    MEMORY_TYPE,
    NBYTES,
    OFFSET,
    Table,
)

SLOT_BYTES = 32 << 20
_PAGE = 4096
_ALIGNED = 64
_GRAIN = 1 << 16
_FOR_THREADS = 1 << 20  # bytes; copies of at least this size use torch and its threads
_PINNED = "FSDPC_PINNED_MIB"
_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")
SIZES = (4, 2, 2, 8, 1)  # bytes of an element, by the engine's number of the dtype


def in_host_memory(entry: Entry) -> bool:
    """Return True if the engine can read and write the entry's memory directly."""
    return entry.on_host or ordinal_of(entry.memory) is None


class Spare:
    """Memory that is kept from one snapshot to the next. If a second save begins while a first one
    uses the memory (in a signal handler or a thread), the second save gets new memory.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._kept))

    def take(self, total: int, make: Callable[[int], Tensor]) -> Tensor:
        """Return at least ``total`` bytes, which belong to the caller until ``give``. If no kept
        memory is large enough, ``make`` allocates new memory. Raises what ``make`` raises.
        """
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = _NONE
        if len(memory) < total:
            memory = _NONE  # free the old memory first: old and new memory might not both fit
            memory = make(total)
        return memory

    def give(self, memory: Tensor) -> None:
        self._kept[:] = [memory]


@dataclass
class _Slot:
    memory: Tensor
    mark: int = 0  # the lane's mark after the last copy through this slot


class Staging:
    """The lane, the two slots and the snapshot memory that saves and loads of one GPU use."""

    def __init__(self, ordinal: int) -> None:
        self.lane = Lane(ordinal)
        self.slots: list[_Slot] = []
        self.snapshot, self.ordinary = Spare(), Spare()

    @property
    def pinned_bytes(self) -> int:
        """Return how many bytes of pinned memory are kept."""
        return self.snapshot.nbytes + sum(len(slot.memory) for slot in self.slots)

    def begin(self, most: int) -> None:
        """Prepare for copies of at most ``most`` bytes in total, which run after the work that the
        current stream has queued so far. Raises ``MemoryError`` if the slots cannot be pinned.
        """
        room = min(SLOT_BYTES, -(-most // _GRAIN) * _GRAIN)
        for slot in self.slots:
            self._finish(slot)
        if not self.slots or len(self.slots[0].memory) < room:
            self.slots = []  # free the old slots first
            self.slots = [_Slot(pinned(self.lane.ordinal, room)) for _ in range(2)]
        self.lane.begin()

    def _finish(self, slot: _Slot) -> None:
        if slot.mark:
            self.lane.finish(slot.mark, "a checkpoint's copies to and from host memory")

    def rows_out(self, table: np.ndarray) -> Iterator[np.ndarray]:
        """Copy ranges from the GPU to the slots, one part at a time. Yields each part of the table
        with addresses in a slot in place of those on the GPU. While the caller uses one part, the
        lane copies the next one.
        """
        before: tuple[np.ndarray, _Slot] | None = None
        for number, part in enumerate(_parts(table, len(self.slots[0].memory))):
            slot = self.slots[number % 2]
            staged = _placed(part, slot)
            for (source, nbytes), row in zip(_sources(part), staged, strict=True):
                self.lane.out(int(row[MEMORY]), source, nbytes)
            slot.mark = self.lane.mark()
            if before is not None:
                self._finish(before[1])
                yield before[0]
            before = staged, slot
        if before is not None:
            self._finish(before[1])
            yield before[0]

    def rows_in(
        self, table: np.ndarray, read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Read ranges into the GPU's memory, each part through a slot, and yield what ``read``
        returns. Call ``joined`` afterwards, so that the current stream waits for the copies.
        """
        for number, part in enumerate(_parts(table, len(self.slots[0].memory))):
            slot = self.slots[number % 2]
            self._finish(slot)
            staged = _placed(part, slot)
            yield read(staged)
            for (target, nbytes), row in zip(_sources(part), staged, strict=True):
                self.lane.back(target, int(row[MEMORY]), nbytes)
            slot.mark = self.lane.mark()

    def joined(self) -> None:
        """Let the current stream wait for all copies so far."""
        self.lane.join(self.lane.mark())

    def pinned_snapshot(self, total: int) -> Tensor | None:
        """Return pinned memory for a snapshot, or None if ``total`` bytes are more than
        ``FSDPC_PINNED_MIB`` or cannot be pinned.
        """
        bound = os.environ.get(_PINNED)
        if bound is not None and total > int(float(bound) * (1 << 20)):
            return None
        try:
            return self.snapshot.take(
                total, lambda least: pinned(self.lane.ordinal, -(-least // _GRAIN) * _GRAIN)
            )
        except MemoryError:
            return None


@cache
def staging_of(ordinal: int) -> Staging:
    """Return the ``Staging`` of one GPU in this process. Local."""
    return Staging(ordinal)


def cut_row(row: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a range of a file into two ranges, of which the first has ``at`` bytes in the file."""
    head, tail = row.copy(), row.copy()
    head[NBYTES] = at
    tail[NBYTES] -= at
    tail[OFFSET] += at
    tail[IN_TENSOR] += at
    if row[MEMORY]:
        tail[MEMORY] += at // SIZES[row[FILE_TYPE]] * SIZES[row[MEMORY_TYPE]]
    return head, tail


def _parts(table: np.ndarray, room: int) -> Iterator[np.ndarray]:
    """Yield the ranges in the order of the file, in parts that fit in a slot. Long ranges are cut
    at page boundaries of the file.
    """
    part: list[np.ndarray] = []
    used = 0
    for row in table[np.argsort(table[:, OFFSET], kind="stable")]:
        wide, narrow = SIZES[row[MEMORY_TYPE]], SIZES[row[FILE_TYPE]]
        while used + row[NBYTES] // narrow * wide > room:
            fits = (room - used) // wide * narrow
            cut = (int(row[OFFSET]) + fits) // _PAGE * _PAGE - int(row[OFFSET])
            cut -= cut % ELEMENT_BYTES
            if cut > 0:
                head, row = cut_row(row, cut)
                part.append(head)
            yield np.stack(part)
            part, used = [], 0
        part.append(row)
        used += -(-int(row[NBYTES] // narrow * wide) // _ALIGNED) * _ALIGNED
    if part:
        yield np.stack(part)


def _sources(part: np.ndarray) -> list[tuple[int, int]]:
    """Return the address of each range in memory, and its number of bytes there."""
    return [
        (int(row[MEMORY]), int(row[NBYTES]) // SIZES[row[FILE_TYPE]] * SIZES[row[MEMORY_TYPE]])
        for row in part
    ]


def _placed(part: np.ndarray, slot: _Slot) -> np.ndarray:
    """Return the ranges with addresses in a slot, where they follow one another."""
    staged = part.copy()
    at = slot.memory.data_ptr()
    for row, (_, nbytes) in zip(staged, _sources(part), strict=True):
        row[MEMORY] = at
        at += -(-nbytes // _ALIGNED) * _ALIGNED
    return staged


# --- files ---------------------------------------------------------------------------------------


def by_device(
    items: Iterable[tuple[Entry, np.ndarray]],
) -> Iterator[tuple[Staging, np.ndarray]]:
    """Yield, for each GPU, a ``Staging`` that is ready to copy, and the ranges of all entries on
    that GPU in one table.
    """
    tables: dict[int, list[np.ndarray]] = {}
    for entry, rows in items:
        ordinal = ordinal_of(entry.memory)
        assert ordinal is not None
        tables.setdefault(ordinal, []).append(rows)
    for ordinal, parts in tables.items():
        table = np.concatenate(parts)
        if len(table):
            yield begun(ordinal, table), table


def begun(ordinal: int, rows: np.ndarray) -> Staging:
    """Return the ``Staging`` of a GPU, ready to copy these ranges. ``rows`` must not be empty."""
    staging = staging_of(ordinal)
    staging.begin(int(_rooms(rows)[1].sum()))
    return staging


def _rooms(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many bytes each range has in memory, and how many in a slot or a snapshot."""
    sizes = np.array(SIZES)
    nbytes = rows[:, NBYTES] // sizes[rows[:, FILE_TYPE]] * sizes[rows[:, MEMORY_TYPE]]
    return nbytes, -(-nbytes // _ALIGNED) * _ALIGNED


# --- snapshots -----------------------------------------------------------------------------------


@dataclass
class Landing:
    """A snapshot that the lanes may still be copying.

    ``watched`` are the parameters. A program may write parameters outside of an optimizer's step.
    If a parameter is written before the current stream has waited for the copies, the snapshot is
    ``torn``: the snapshot may have both old and new values.
    """

    watched: Sequence[Tensor]
    lanes: list[tuple[Lane, int]] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)  # kept alive until the copies end
    versions: list[int] = field(default_factory=list)
    joined: bool = False
    torn: bool = False
    taken: list[tuple[Spare, Tensor]] = field(default_factory=list)

    def take(self, spare: Spare, memory: Tensor) -> Tensor:
        """Return ``memory``, and record that ``give_back`` must give it back to ``spare``."""
        self.taken.append((spare, memory))
        return memory

    def give_back(self) -> None:
        """Give the snapshot's memory back, so that the next save can use it. Local."""
        while self.taken:
            spare, memory = self.taken.pop()
            spare.give(memory)

    def await_write(self) -> None:
        """Arrange that the current stream waits for the snapshot before the next optimizer step."""
        if self.lanes:
            self.versions = [tensor._version for tensor in self.watched]
            call_before_write(self.join)

    def join(self) -> None:
        """Let the current stream wait for the snapshot; only the first call does this. Local."""
        if not self.joined and self.lanes:
            self.torn = self._changed()
            for lane, mark in self.lanes:
                lane.join(mark)
        self.joined = True

    def finish(self) -> None:
        """Wait on the host until the snapshot is in host memory. Raises ``CheckpointError`` if the
        snapshot is torn.
        """
        for lane, mark in self.lanes:
            lane.finish(mark, "the snapshot of a checkpoint")
        self.sources.clear()
        if not self.lanes:
            return
        if self.torn or (not self.joined and self._changed()):
            raise CheckpointError(
                "a parameter was written in place while the snapshot was being copied, outside of "
                "torch.optim.Optimizer.step(): call handle.join() before such writes"
            )

    def _changed(self) -> bool:
        return self.versions != [tensor._version for tensor in self.watched]


def snapshot(
    tables: Sequence[Table], keep: Sequence[Tensor], landing: Landing
) -> tuple[list[Table], list[Tensor]]:
    """Copy the ranges of tables to host memory. Returns the tables with the addresses of the
    copies, and the memory of the copies. Copies from GPUs may still run: ``landing.finish`` waits
    for them. ``keep`` has the tensors into which the old addresses point. Raises ``MemoryError`` if
    no memory can be pinned.
    """
    if not tables:
        return [], []
    rows = np.concatenate([table.rows for table in tables])
    gpu = np.concatenate([table.gpu for table in tables])
    steady = np.concatenate([table.steady for table in tables])
    copies = []
    for ordinal in np.unique(gpu).tolist():
        mine = np.flatnonzero(gpu == ordinal)
        nbytes, rooms = _rooms(rows[mine])
        moves = np.stack([rows[mine, MEMORY], np.cumsum(rooms) - rooms, nbytes], axis=1)
        if ordinal < 0:
            memory = _host_snapshot(moves, int(rooms.sum()), landing)
        else:
            memory = _gpu_snapshot(
                staging_of(ordinal), moves, int(rooms.sum()), steady[mine], landing
            )
            landing.sources += keep
        rows[mine, MEMORY] = moves[:, 1]
        copies.append(memory)
    ends = np.cumsum([len(table.rows) for table in tables])
    on_host = np.full(len(rows), -1)
    columns = (np.split(each, ends[:-1]) for each in (rows, on_host, steady))
    return [Table(*parts) for parts in zip(*columns, strict=True)], copies


_on_host = Spare()


def _ordinary(total: int) -> Tensor:
    return torch.empty(total, dtype=torch.uint8, device="cpu")


def _host_snapshot(moves: np.ndarray, total: int, landing: Landing) -> Tensor:
    """Copy ranges of host memory into a snapshot, and return the snapshot's memory. Each row of
    ``moves`` has an address, an offset in the snapshot, and a number of bytes. This
    function overwrites the offsets in ``moves`` with the addresses of the copies.
    """
    memory = landing.take(_on_host, _on_host.take(total, _ordinary))
    moves[:, 1] += memory.data_ptr()
    small = moves[:, 2] < _FOR_THREADS
    _C.ckpt_copy(moves[small])
    for source, target, nbytes in moves[~small].tolist():
        bytes_at(target, nbytes).copy_(bytes_at(source, nbytes))
    return memory


def bytes_at(address: int, nbytes: int) -> Tensor:
    """Return the memory at an address as a tensor, which does not keep the memory alive. Local."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _gpu_snapshot(
    staging: Staging, moves: np.ndarray, total: int, steady: np.ndarray, landing: Landing
) -> Tensor:
    """Copy ranges of a GPU's memory into a snapshot, as ``_host_snapshot`` does."""
    whole = staging.pinned_snapshot(total)
    if whole is None:
        memory = landing.take(staging.ordinary, staging.ordinary.take(total, _ordinary))
    else:
        memory = landing.take(staging.snapshot, whole)
    moves[:, 1] += memory.data_ptr()
    if whole is None:
        staging.begin(total)
        _through_slots(staging, moves)
        return memory
    staging.lane.begin()
    for kind in (False, True):  # first the tensors that a forward may write (not steady)
        for source, target, nbytes in moves[steady == kind].tolist():
            staging.lane.out(target, source, nbytes)
        if not kind:
            staging.joined()
    landing.lanes.append((staging.lane, staging.lane.mark()))
    return memory


def _through_slots(staging: Staging, moves: np.ndarray) -> None:
    """Copy ``moves`` through the slots to ordinary memory. In the table of ranges, the addresses in
    ordinary memory take the place of offsets in a file.
    """
    table = np.zeros((len(moves), INDEX + 1), dtype=np.int64)
    table[:, [MEMORY, OFFSET, NBYTES]] = moves
    table[:, MEMORY_TYPE] = table[:, FILE_TYPE] = SIZES.index(1)
    for part in staging.rows_out(table):
        _C.ckpt_copy(np.ascontiguousarray(part[:, [MEMORY, OFFSET, NBYTES]]))
