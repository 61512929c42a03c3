"""Dequantization of weights, a part at a time, while a checkpoint is written.

A quantized weight is a matrix of bytes, here called codes; the scales of each row are stored behind
the row's codes. If several ranks have parts of a row, the rank that has the first byte of the row
receives the other parts and decodes the row.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fsdpc import _C
from fsdpc._companions.spans import NO_SPANS, whole_span
from fsdpc.checkpoint.entries import Coding, Entry
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.lowbit import CODECS, decode_rows

# A table with a row (entry, row, first byte, length) for each piece, and the bytes of all pieces.
Pieces = tuple[np.ndarray, np.ndarray]
_Rest = dict[tuple[int, int], list[tuple[int, np.ndarray]]]


class Rows:
    """An ``entries.Decoder`` of quantized rows. ``read_codes(first, last)`` returns the rows of
    codes from ``first`` to ``last`` (exclusive), on any device.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding, self._count = coding, 0
        self._begins: list[int] = []
        self._runs: list[Callable[[int, int], Tensor]] = []

    def add(self, rows: int, read_codes: Callable[[int, int], Tensor]) -> int:
        """Add rows, and return the position of their first value among all values."""
        begin = self._count
        self._begins.append(begin)
        self._runs.append(read_codes)
        self._count += rows * self._coding.row
        return begin

    def read(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        run, row = bisect_right(self._begins, first) - 1, self._coding.row
        first -= self._begins[run]
        low, high = first // row, -(-(first + count) // row)
        coded = self._runs[run](low, high)
        wide = torch.float32 if dtype == torch.float64 else dtype
        found = decode_rows(coded, row, wide, self._coding.codec).to("cpu", dtype).view(-1)
        return found[first - low * row :][:count]


def cut_rows(entries: Sequence[Entry]) -> Pieces:
    """Return this rank's parts of rows that begin on another rank. Local. Raises ``TypeError`` for
    codes of bitsandbytes, and for a tensor of codes that is sharded by columns, because every row
    is then spread over ranks.
    """
    table, pieces = [], [np.empty(0, np.uint8)]
    for index, entry in enumerate(entries):
        if entry.coding is None:
            _refuse_unknown(entry)
            continue
        size, found = entry.shape[-1], 0
        for begin, at, count in entry.spans.tolist():
            if begin % size and count:
                nbytes = min(count, size - begin % size)
                table.append((index, begin // size, begin % size, nbytes))
                pieces.append(entry.memory[at : at + nbytes].cpu().numpy())
                found += 1
        if found > 1:
            raise TypeError(
                f"values=True: {entry.name} is cut between the columns of its codes, so that no "
                "rank can decode its part: shard its rows, or save without values=True"
            )
    return np.array(table, np.int64).reshape(-1, 4), np.concatenate(pieces)


def _refuse_unknown(entry: Entry) -> None:
    if entry.exact:
        raise TypeError(
            f"values=True: {entry.name} has codes or scales of bitsandbytes, which only that "
            "library decodes: save without values=True, load that into an unsharded model, and "
            "call its dequantize() there"
        )


def decoded(entries: Sequence[Entry], received: Sequence[Pieces]) -> list[Entry]:
    """Return the entries, with dequantized entries in place of quantized ones. ``received`` has the
    result of ``cut_rows`` of every rank. Local.
    """
    rest: _Rest = defaultdict(list)
    for table, raw in received:
        at = 0
        for index, row, begin, nbytes in table.tolist():
            rest[index, row].append((begin, raw[at : at + nbytes]))
            at += nbytes
    return [_decoded(entry, index, rest) for index, entry in enumerate(entries)]


def _decoded(entry: Entry, index: int, rest: _Rest) -> Entry:
    if entry.coding is None:
        return dataclasses.replace(entry, frozen=False)
    row, size, rows, spans = entry.coding.row, entry.shape[-1], Rows(entry.coding), []
    for begin, at, count in entry.spans.tolist():
        first, last = -(-begin // size), (begin + count) // size
        if last > first:
            start = at + first * size - begin
            own = entry.memory[start : start + (last - first) * size].view(-1, size)
            spans.append((first * row, rows.add(len(own), _slices(own)), len(own) * row))
        tail = begin + count - last * size
        if last >= first and tail:
            head = entry.memory[at + count - tail : at + count]
            whole = _whole(entry, head, size, rest[index, last])
            spans.append((last * row, rows.add(1, _slices(whole)), row))
    return values_entry(entry, rows, np.array(spans, np.int64) if spans else NO_SPANS)


def _slices(codes: Tensor) -> Callable[[int, int], Tensor]:
    return lambda first, last: codes[first:last]


def _whole(entry: Entry, head: Tensor, size: int, pieces: list[tuple[int, np.ndarray]]) -> Tensor:
    found, until = torch.empty(1, size, dtype=torch.uint8, device=head.device), len(head)
    found[0, :until] = head
    for begin, raw in sorted(pieces, key=lambda piece: piece[0]):
        if begin > until:
            break
        found[0, begin : begin + len(raw)] = torch.from_numpy(raw.copy())
        until = max(until, begin + len(raw))
    if until < size:
        raise CheckpointError(
            f"{entry.name}: no rank has bytes {until} to {size} of a row of codes: all ranks must "
            "save the same model, sharded alike"
        )
    return found


def values_entry(entry: Entry, rows: Rows, spans: np.ndarray) -> Entry:
    """Return the entry of the dequantized tensor, whose values ``rows`` decodes. Local."""
    assert entry.coding is not None
    dtype = entry.coding.dtype
    return dataclasses.replace(
        entry,
        shape=(*entry.shape[:-1], entry.coding.row),
        dtype=dtype,
        memory=torch.empty(0, dtype=dtype, device="cpu"),
        spans=spans,
        home=None,
        frozen=False,
        coding=None,
        decoder=rows,
    )


def stored_values(entry: Entry, read_codes: Callable[[int, int], Tensor]) -> Entry:
    """Return the dequantized entry of a tensor of codes in a file; ``read_codes`` reads rows of the
    codes. Raises ``CheckpointError`` if this version of fsdpc does not have the codec, or if the
    codes have another dtype or shape than the manifest says.
    """
    coding = entry.coding
    assert coding is not None
    if coding.codec not in CODECS:
        raise CheckpointError(f"{entry.name} is in {coding.codec!r}, which this fsdpc cannot read")
    size = _C.row_codes_bytes(coding.codec, coding.row)
    if entry.dtype != torch.uint8 or entry.shape[1:] != (size,):
        raise CheckpointError(
            f"{entry.name} is {entry.dtype} of shape {tuple(entry.shape)}, and the manifest says "
            f"rows of {coding.row} values in {coding.codec}, {size} bytes each"
        )
    rows = Rows(coding)
    rows.add(entry.shape[0], read_codes)
    return values_entry(entry, rows, whole_span(entry.shape[0] * coding.row))
