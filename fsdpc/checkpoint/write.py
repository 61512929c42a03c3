"""Writing those ranges of a set's files that one rank has to write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fsdpc import _C
from fsdpc._companions.lane import ordinal_of
from fsdpc.checkpoint.dtypes import codes
from fsdpc.checkpoint.entries import Decoder, Entry
from fsdpc.checkpoint.layout import (
    BLOCK_BYTES,
    COMPUTED,
    ELEMENT_BYTES,
    FILE_TYPE,
    IN_TENSOR,
    INDEX,
    MEMORY,
    MEMORY_TYPE,
    NBYTES,
    OFFSET,
    Layout,
    Place,
    PlannedSet,
    Table,
    fragments,
)
from fsdpc.checkpoint.staging import SIZES, begun, cut_row, in_host_memory

_COLUMNS = 7
_COMPUTED_BYTES = 32 << 20
_WAVE_BYTES = 256 << 20  # largest size of one write; signals are checked between writes
_PAGE = 4096


@dataclass
class Job:
    """Ranges of one file to write. Their bytes are in host memory. ``keep`` has the tensors into
    which the addresses in ``rows`` point.
    """

    path: Path
    rows: np.ndarray
    keep: list[torch.Tensor]


def planned_set(layout: Layout, entries: Sequence[Entry]) -> PlannedSet:
    """Return, for these entries, the ranges that this rank writes. Local."""
    gpus = np.array([_memory_of(entry) for entry in entries], np.int64)
    steady = np.array([entry.steady for entry in entries], bool)
    tables = []
    for file in layout.files:
        rows = _all_rows([(place, entries[place.index]) for place in file.places])
        rows = rows[np.argsort(rows[:, OFFSET], kind="stable")]
        tables.append(Table(rows, gpus[rows[:, INDEX]], steady[rows[:, INDEX]]))
    decoders = {i: entry.decoder for i, entry in enumerate(entries) if entry.decoder is not None}
    return PlannedSet(layout, tables, [entry.memory for entry in entries], decoders)


def _memory_of(entry: Entry) -> int | None:
    """Return where an entry's memory is, in the form of ``Table.gpu``."""
    if entry.decoder is not None:
        return -2
    return -1 if in_host_memory(entry) else ordinal_of(entry.memory)


def jobs(folder: Path, planned: PlannedSet) -> Iterator[Job]:
    """Yield what this rank writes, file by file, in jobs of bounded size. Memory of GPUs is copied
    through staging buffers, so each job is valid only until the next one is requested.
    """
    for file, table in zip(planned.layout.files, planned.tables, strict=True):
        path = folder / planned.layout.path(file)
        for part in waves(table.rows[table.gpu == -1], _WAVE_BYTES):
            yield Job(path, part, planned.keep)
        if planned.decoders:
            places = {place.index: place for place in file.places}
            yield from computed(path, table.rows[table.gpu == -2], places, planned.decoders)
        for ordinal in np.unique(table.gpu[table.gpu >= 0]).tolist():
            for part in begun(ordinal, rows := table.rows[table.gpu == ordinal]).rows_out(rows):
                yield Job(path, part, planned.keep)


def computed(
    path: Path, rows: np.ndarray, places: Mapping[int, Place], decoders: Mapping[int, Decoder]
) -> Iterator[Job]:
    """Compute the values of tensors that have a decoder, in the dtype of the file, and yield jobs
    that write these values.
    """
    for part in waves(rows, _COMPUTED_BYTES):
        made, keep = part.copy(), []
        for row in made:
            dtype = places[row[INDEX]].dtype
            types = row[MEMORY_TYPE], row[FILE_TYPE]
            wide = dtype.itemsize if types[0] == types[1] else SIZES[types[0]]
            first, count = int(row[MEMORY] - COMPUTED) // wide, int(row[NBYTES]) // dtype.itemsize
            keep.append(decoders[row[INDEX]].read(first, count, dtype))
            row[MEMORY] = keep[-1].data_ptr()
            row[MEMORY_TYPE], row[FILE_TYPE] = codes(dtype, dtype)
        yield Job(path, made, keep)


def write_rows(place: Place, entry: Entry) -> np.ndarray:
    """Return a table of those ranges of one tensor that this rank writes."""
    memory = None if entry.decoder is None else COMPUTED
    return rows_of(place, entry, entry.own(place.index), memory)


def _all_rows(items: Sequence[tuple[Place, Entry]]) -> np.ndarray:
    """Return the tables of ``write_rows`` for many tensors as one table, in any order."""
    single, parts = [], []
    for place, entry in items:
        spans = entry.own(place.index)
        if len(spans) == 1 and entry.decoder is None:  # true for nearly all tensors of units
            single.append(_row(place, entry, spans, entry.memory.data_ptr()))
        else:
            parts.append(write_rows(place, entry))
    return np.concatenate([np.array(single, np.int64).reshape(-1, _COLUMNS), *parts])


def _row(place: Place, entry: Entry, spans: np.ndarray, base: int) -> tuple[int, ...]:
    begin, at, count = spans[0].tolist()
    item = place.dtype.itemsize
    first, types = begin * item, codes(entry.dtype, place.dtype)
    address, offset = base + at * entry.dtype.itemsize, place.offset + first
    return address, offset, count * item, first, *types, place.index


def rows_of(place: Place, entry: Entry, spans: np.ndarray, memory: int | None = None) -> np.ndarray:
    """Return a table with one range of the file for each span of a tensor. ``memory`` is the
    address of the values, by default that of the entry's memory. If ``memory`` is 0, the ranges are
    only read for their checksums, and the values are not kept.
    """
    item, own = place.dtype.itemsize, entry.dtype.itemsize
    types = codes(entry.dtype, place.dtype)
    base = entry.memory.data_ptr() if memory is None else memory
    if memory == 0:
        own, types = 0, (types[1], types[1])
    table = np.empty((len(spans), _COLUMNS), dtype=np.int64)
    if len(spans) == 1 and own:
        table[0] = _row(place, entry, spans, base)
        return table
    table[:, MEMORY] = base + spans[:, 1] * own
    table[:, OFFSET] = place.offset + spans[:, 0] * item
    table[:, NBYTES] = spans[:, 2] * item
    table[:, IN_TENSOR] = spans[:, 0] * item
    table[:, MEMORY_TYPE], table[:, FILE_TYPE] = types
    table[:, -1] = place.index
    return table


def waves(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Yield the table in parts of about ``most`` bytes. Long ranges are cut at page boundaries of
    the file.
    """
    if rows[:, NBYTES].sum() <= most:
        if len(rows):
            yield rows
        return
    part: list[np.ndarray] = []
    used = 0
    for row in rows:
        while used + row[NBYTES] > most and row[NBYTES] > _PAGE:
            cut = max(_PAGE, (most - used) // _PAGE * _PAGE - int(row[OFFSET]) % _PAGE)
            cut -= cut % ELEMENT_BYTES
            if cut <= 0 or cut >= row[NBYTES]:
                break
            head, row = cut_row(row, cut)
            yield np.stack([*part, head])
            part, used = [], 0
        part.append(row)
        used += int(row[NBYTES])
    yield np.stack(part)


def write_job(job: Job, *, skip_edges: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Write one job and return its fragments and their digests. The bytes become durable when
    ``folders.sync`` is called for the file.
    """
    parts = fragments(job.rows)
    digests = np.zeros(len(parts), dtype=np.uint32)
    table = np.ascontiguousarray(job.rows[:, : _COLUMNS - 1])
    _C.ckpt_write(str(job.path), table, BLOCK_BYTES, digests, skip_edges=skip_edges, no_sync=True)
    return parts, digests


def joined(
    found: Iterable[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the fragments and digests of several parts, one behind the other."""
    rows, crcs = [np.empty((0, 3), np.int64)], [np.empty(0, np.uint32)]
    for part, digests in found:
        rows.append(part)
        crcs.append(digests)
    return np.concatenate(rows), np.concatenate(crcs)


def write_edges(job: Job) -> None:
    """Write only the partial pages at the two ends of each run of adjoining ranges."""
    table = job.rows[:, : _COLUMNS - 1]
    ends = table[:, OFFSET] + table[:, NBYTES]
    runs = np.split(table, np.flatnonzero(table[1:, OFFSET] != ends[:-1]) + 1)
    rows = np.array([row for run in runs for row in _edges(run)], dtype=np.int64)
    if len(rows):
        parts = fragments(np.concatenate([rows, rows[:, :1]], axis=1))
        digests = np.zeros(len(parts), dtype=np.uint32)
        _C.ckpt_write(str(job.path), rows, BLOCK_BYTES, digests, direct=False, no_sync=True)


def _edges(run: np.ndarray) -> Iterator[np.ndarray]:
    start, stop = int(run[0][OFFSET]), int(run[-1][OFFSET] + run[-1][NBYTES])
    first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
    if first >= last:
        yield from run
        return
    for row in run:
        if row[OFFSET] >= first:
            break
        yield _between(row, start, first)
    tail = []
    for row in run[::-1]:
        if row[OFFSET] + row[NBYTES] <= last:
            break
        tail.append(_between(row, last, stop))
    yield from tail[::-1]


def _between(row: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the part of a range that lies in ``[low, high)`` of the file, extended to whole
    elements.
    """
    item = SIZES[row[FILE_TYPE]]
    begin = max(0, low - int(row[OFFSET])) // item * item
    end = -(-min(int(row[NBYTES]), high - int(row[OFFSET])) // item) * item
    rest = cut_row(row, begin)[1] if begin else row
    return cut_row(rest, end - begin)[0] if end - begin < rest[NBYTES] else rest
