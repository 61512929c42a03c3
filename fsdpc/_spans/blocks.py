"""Blocks: so many consecutive elements of a whole tensor that share one value, the last block
perhaps fewer. They are aligned to the whole tensor, so ranks may share one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpc._spans.span import NO_SPANS, Span, table_of


def touched(span: Any, length: int) -> range:
    """The numbers of the blocks of ``length`` elements that have elements of a span."""
    return range(span.begin // length, -(-(span.begin + span.count) // length))


def begun(spans: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A memory has one value for each block that the span touches. Returns two tables of spans of
    these values: of the blocks that begin inside the span, and of the one that has begun before it,
    if any. ``spans``: one span, or none.
    """
    if not len(spans):
        return NO_SPANS, NO_SPANS
    span = Span(*spans[0].tolist())
    blocks, first = touched(span, length), -(-span.begin // length)
    before = first - blocks.start
    return table_of(first, before, blocks.stop - first), table_of(blocks.start, 0, before)
