"""Tables of spans, and blocks of elements.

A table is an int64 array whose rows are spans of one tensor: (first element in the tensor, its
position in a memory, number of elements), see ``_spans/span.py``. A block is a fixed number of
consecutive elements of a whole tensor that share one value, such as a scale; the last block may be
shorter. Blocks are counted from the begin of the whole tensor, so two ranks may hold elements of
the same block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpc._spans.span import Span

NO_SPANS = np.empty((0, 3), dtype=np.int64)


def table_of(begin: int, at: int, count: int) -> np.ndarray:
    """Return the table of one span; it has no row if the span is empty."""
    return np.array([[begin, at, count]], dtype=np.int64) if count else NO_SPANS


def whole_span(numel: int) -> np.ndarray:
    """Return the table of one span: all elements of a tensor, at the begin of the memory."""
    return table_of(0, 0, numel)


def count_of(spans: np.ndarray) -> int:
    """The number of elements of all spans."""
    return int(spans[0, 2] if len(spans) == 1 else spans[:, 2].sum())  # usually there is one span


def moved_to(spans: np.ndarray, at: int) -> np.ndarray:
    """Return spans of the same elements, placed one behind another in a memory from ``at`` on."""
    moved = spans.copy()
    moved[:, 1] = at + np.cumsum(spans[:, 2]) - spans[:, 2]
    return moved


def clip(spans: np.ndarray, low: int, high: int) -> np.ndarray:
    """Cut ``spans`` to the elements ``[low, high)``. Elements are counted from the begin of the
    first span through all spans.
    """
    starts = np.cumsum(spans[:, 2]) - spans[:, 2]
    begin = np.maximum(starts, low)
    count = np.minimum(starts + spans[:, 2], high) - begin
    moved = begin - starts
    kept = np.stack([spans[:, 0] + moved, spans[:, 1] + moved, count], axis=1)
    return kept[count > 0]


def block_spans(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Return the spans of a rectangular block of a tensor. Their memory has only this block."""
    if not shape or math.prod(sizes) == 0:
        return whole_span(math.prod(sizes))
    # The block may have some last dimensions in full. A span extends over these dimensions and the
    # dimension before them.
    last = len(shape) - 1
    while last > 0 and sizes[last] == shape[last]:
        last -= 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    begins = np.zeros(1, dtype=np.int64)
    for d in range(last):
        rows = (np.arange(sizes[d], dtype=np.int64) + offsets[d]) * strides[d]
        begins = (begins[:, None] + rows[None, :]).reshape(-1)
    begins = begins + offsets[last] * strides[last]
    count = math.prod(sizes[last:])
    ats = np.arange(len(begins), dtype=np.int64) * count
    return np.stack([begins, ats, np.full(len(begins), count)], axis=1)


def blocks_of(
    shape: Sequence[int], begin: int, count: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide ``count`` > 0 elements from ``begin`` on into rectangular blocks (offsets, sizes).

    The blocks are in the elements' order. The function is the inverse of ``block_spans``.
    """
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    inner = math.prod(rest)
    row, at = divmod(begin, inner)
    found = []
    if at or count < inner:  # a part of a row
        part = min(count, inner - at)
        blocks = blocks_of(rest, at, part)
        found += [((row, *offsets), (1, *sizes)) for offsets, sizes in blocks]
        row, count = row + 1, count - part
    rows, left = divmod(count, inner)
    if rows:
        found.append(((row, *[0] * len(rest)), (rows, *rest)))
    if left:
        blocks = blocks_of(rest, 0, left)
        found += [((row + rows, *offsets), (1, *sizes)) for offsets, sizes in blocks]
    return found


def touched(span: Any, length: int) -> range:
    """Return the numbers of those blocks of ``length`` elements that contain elements of a span."""
    return range(span.begin // length, -(-(span.begin + span.count) // length))


def begun(spans: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two tables with the values of the blocks that a span touches: one value per block.

    The values lie in a memory in the order of the blocks. The first table has the blocks that begin
    inside the span. The second table has the block that begins before the span, if there is such a
    block. ``spans`` has one row or none.
    """
    if not len(spans):
        return NO_SPANS, NO_SPANS
    span = Span(*spans[0].tolist())
    blocks, first = touched(span, length), -(-span.begin // length)
    before = first - blocks.start
    return table_of(first, before, blocks.stop - first), table_of(blocks.start, 0, before)
