"""A GPU's memory to and from files, through pinned host memory that is kept for the next time.

The copies run on a lane (``_companions/lane.py``), behind the work that torch's current stream
has so far. A save in the foreground, and a load, use two slots: while the writer writes one, the
lane fills the other. A save in the background copies everything into one snapshot. Its thread waits
for the copy, and so does the current stream before the next optimizer step; the caller does not.
Where the snapshot would be larger than ``FSDPC_PINNED_MIB`` (default: no bound), or memory cannot
be pinned, the copy goes slot by slot into ordinary memory before ``save`` returns.
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
_FOR_THREADS = 1 << 20  # bytes from which torch copies by several threads, where it has them
_PINNED = "FSDPC_PINNED_MIB"
_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")
SIZES = (4, 2, 2, 8, 1)  # bytes of an element, by the engine's number of its type


def in_host_memory(entry: Entry) -> bool:
    """True if the engine reads and writes the entry's memory itself."""
    return entry.on_host or ordinal_of(entry.memory) is None


class Spare:
    """Memory that is kept from one snapshot to the next. While a save has it, another one may begin
    (in a signal handler or a thread): the second gets memory of its own.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._kept))

    def take(self, total: int, make: Callable[[int], Tensor]) -> Tensor:
        """At least ``total`` bytes, the caller's until ``give``. Raises what ``make`` raises."""
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = _NONE
        if len(memory) < total:
            memory = _NONE  # frees the old memory first: both might not fit
            memory = make(total)
        return memory

    def give(self, memory: Tensor) -> None:
        self._kept[:] = [memory]


@dataclass
class _Slot:
    memory: Tensor
    mark: int = 0  # of the last copy


class Staging:
    """What one GPU's checkpoints use: a lane, two slots, the memory of a snapshot."""

    def __init__(self, ordinal: int) -> None:
        self.lane = Lane(ordinal)
        self.slots: list[_Slot] = []
        self.snapshot, self.ordinary = Spare(), Spare()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory that are kept."""
        return self.snapshot.nbytes + sum(len(slot.memory) for slot in self.slots)

    def begin(self, most: int) -> None:
        """Get ready for copies of at most ``most`` bytes in all, behind the current stream's work
        so far. ``MemoryError``: not even the slots can be pinned.
        """
        room = min(SLOT_BYTES, -(-most // _GRAIN) * _GRAIN)
        for slot in self.slots:
            self._finish(slot)
        if not self.slots or len(self.slots[0].memory) < room:
            self.slots = []  # the old ones go first
            self.slots = [_Slot(pinned(self.lane.ordinal, room)) for _ in range(2)]
        self.lane.begin()

    def _finish(self, slot: _Slot) -> None:
        if slot.mark:
            self.lane.finish(slot.mark, "a checkpoint's copies to and from host memory")

    def rows_out(self, table: np.ndarray) -> Iterator[np.ndarray]:
        """The ranges, whose addresses are on the GPU, part by part with addresses in a slot with
        their values. While the caller uses one part, the lane copies the next one.
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
        """Read ranges with addresses on the GPU, each part through a slot. The current stream has
        yet to wait for the lane (``joined``).
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
        """Have the current stream wait for all copies so far."""
        self.lane.join(self.lane.mark())

    def pinned_snapshot(self, total: int) -> Tensor | None:
        """Memory from ``snapshot``; None: ``total`` bytes may not, or cannot, be pinned."""
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
    """This process's staging of one GPU. Local."""
    return Staging(ordinal)


def cut_row(row: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a range of a file in two, the first of ``at`` bytes."""
    head, tail = row.copy(), row.copy()
    head[NBYTES] = at
    tail[NBYTES] -= at
    tail[OFFSET] += at
    tail[IN_TENSOR] += at
    if row[MEMORY]:
        tail[MEMORY] += at // SIZES[row[FILE_TYPE]] * SIZES[row[MEMORY_TYPE]]
    return head, tail


def _parts(table: np.ndarray, room: int) -> Iterator[np.ndarray]:
    """The table in file order, in parts that fit in a slot; long ranges are cut at file pages."""
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
    """Address and bytes of each range in memory."""
    return [
        (int(row[MEMORY]), int(row[NBYTES]) // SIZES[row[FILE_TYPE]] * SIZES[row[MEMORY_TYPE]])
        for row in part
    ]


def _placed(part: np.ndarray, slot: _Slot) -> np.ndarray:
    """The ranges with addresses in a slot, one behind the other."""
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
    """Entries on GPUs and their tables of ranges, put together by GPU, each ready to copy."""
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
    """A GPU's staging, ready to copy these ranges, of which there is one at least."""
    staging = staging_of(ordinal)
    staging.begin(int(_rooms(rows)[1].sum()))
    return staging


def _rooms(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each range in memory, and of its place in a slot or snapshot."""
    sizes = np.array(SIZES)
    nbytes = rows[:, NBYTES] // sizes[rows[:, FILE_TYPE]] * sizes[rows[:, MEMORY_TYPE]]
    return nbytes, -(-nbytes // _ALIGNED) * _ALIGNED


# --- snapshots -----------------------------------------------------------------------------------


@dataclass
class Landing:
    """A snapshot that the lanes may still be copying.

    ``watched``: parameters that a program may write without a hook; the snapshot is torn
    if one is written before the current stream has waited.
    """

    watched: Sequence[Tensor]
    lanes: list[tuple[Lane, int]] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)  # alive until they are copied
    versions: list[int] = field(default_factory=list)
    joined: bool = False
    torn: bool = False
    taken: list[tuple[Spare, Tensor]] = field(default_factory=list)

    def take(self, spare: Spare, memory: Tensor) -> Tensor:
        """Have the memory given back to ``spare`` by ``give_back``."""
        self.taken.append((spare, memory))
        return memory

    def give_back(self) -> None:
        """Let the next save have the snapshot's memory. Local."""
        while self.taken:
            spare, memory = self.taken.pop()
            spare.give(memory)

    def await_write(self) -> None:
        """Have the current stream wait for the snapshot before the next optimizer step."""
        if self.lanes:
            self.versions = [tensor._version for tensor in self.watched]
            call_before_write(self.join)

    def join(self) -> None:
        """Have the current stream wait for the snapshot, at the first call. Local."""
        if not self.joined and self.lanes:
            self.torn = self._changed()
            for lane, mark in self.lanes:
                lane.join(mark)
        self.joined = True

    def finish(self) -> None:
        """Host sync: wait until the snapshot is in host memory. ``CheckpointError``: it is torn."""
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
    """The tables with addresses in copies in host memory, and the copies. ``landing`` waits for
    copies from GPUs; ``keep``: what the old addresses point into. ``MemoryError``.
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
    """``moves``: rows of address, offset in the snapshot (made the address there), and bytes."""
    memory = landing.take(_on_host, _on_host.take(total, _ordinary))
    moves[:, 1] += memory.data_ptr()
    small = moves[:, 2] < _FOR_THREADS
    _C.ckpt_copy(moves[small])
    for source, target, nbytes in moves[~small].tolist():
        bytes_at(target, nbytes).copy_(bytes_at(source, nbytes))
    return memory


def bytes_at(address: int, nbytes: int) -> Tensor:
    """Memory as a tensor that does not keep the memory alive. Local."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _gpu_snapshot(
    staging: Staging, moves: np.ndarray, total: int, steady: np.ndarray, landing: Landing
) -> Tensor:
    """As ``_host_snapshot``, of a GPU's memory."""
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
    for kind in (False, True):  # what a forward may write comes first
        for source, target, nbytes in moves[steady == kind].tolist():
            staging.lane.out(target, source, nbytes)
        if not kind:
            staging.joined()
    landing.lanes.append((staging.lane, staging.lane.mark()))
    return memory


def _through_slots(staging: Staging, moves: np.ndarray) -> None:
    """Copy ``moves`` to ordinary memory, whose addresses stand for offsets in a file."""
    table = np.zeros((len(moves), INDEX + 1), dtype=np.int64)
    table[:, [MEMORY, OFFSET, NBYTES]] = moves
    table[:, MEMORY_TYPE] = table[:, FILE_TYPE] = SIZES.index(1)
    for part in staging.rows_out(table):
        _C.ckpt_copy(np.ascontiguousarray(part[:, [MEMORY, OFFSET, NBYTES]]))
