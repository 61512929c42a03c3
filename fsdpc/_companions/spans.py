"""Tables of spans, and blocks of elements.

Many spans (``_spans/span.py``) of one tensor are a table: an int64 array whose rows are spans. A
block is a fixed number of consecutive elements of a whole tensor (fewer in its last block) that
share one value. Blocks are aligned to the whole tensor, so two ranks may hold parts of one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpc._spans.span import Span

NO_SPANS = np.empty((0, 3), dtype=np.int64)


def table_of(begin: int, at: int, count: int) -> np.ndarray:
    """The table of one span, without a row if the span is empty."""
    return np.array([[begin, at, count]], dtype=np.int64) if count else NO_SPANS


def whole_span(numel: int) -> np.ndarray:
    """The table of one span: all elements, at the begin of the memory."""
    return table_of(0, 0, numel)


def count_of(spans: np.ndarray) -> int:
    """The number of elements of all spans."""
    return int(spans[0, 2] if len(spans) == 1 else spans[:, 2].sum())  # one span as a rule


def moved_to(spans: np.ndarray, at: int) -> np.ndarray:
    """The spans of the same elements, one behind the other in a memory from ``at`` on."""
    moved = spans.copy()
    moved[:, 1] = at + np.cumsum(spans[:, 2]) - spans[:, 2]
    return moved


def clip(spans: np.ndarray, low: int, high: int) -> np.ndarray:
    """Elements ``[low, high)`` of the spans, counted over all of them."""
    starts = np.cumsum(spans[:, 2]) - spans[:, 2]
    begin = np.maximum(starts, low)
    count = np.minimum(starts + spans[:, 2], high) - begin
    moved = begin - starts
    kept = np.stack([spans[:, 0] + moved, spans[:, 1] + moved, count], axis=1)
    return kept[count > 0]


def block_spans(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Spans of a rectangular block of a tensor, in a memory of its own."""
    if not shape or math.prod(sizes) == 0:
        return whole_span(math.prod(sizes))
    # The last dimensions, which the block has in full, make one run with the dimension before them.
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
    """The rectangular blocks (offsets, sizes) of which ``count`` > 0 elements from ``begin`` on
    consist, in their order: the inverse of ``block_spans``.
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
    """The numbers of the blocks of ``length`` elements that have elements of a span."""
    return range(span.begin // length, -(-(span.begin + span.count) // length))


def begun(spans: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A memory has one value for each block that the span touches. Returns two tables of spans of
    these values: of the blocks that begin inside the span, and of the block that has begun before
    the span, if any. ``spans``: one span, or none.
    """
    if not len(spans):
        return NO_SPANS, NO_SPANS
    span = Span(*spans[0].tolist())
    blocks, first = touched(span, length), -(-span.begin // length)
    before = first - blocks.start
    return table_of(first, before, blocks.stop - first), table_of(blocks.start, 0, before)
