"""Spans: the elements of a whole tensor that a memory contains, and where they are in the memory.

Elements are counted in row-major order. A unit's spans come from C's layout
(``csrc/unit/layout.h``), see ``Unit.spans``.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A range of ``count`` elements of a whole tensor, and its place in a memory. The range begins
    at element ``begin`` of the tensor and at position ``at`` of the memory.
    """

    begin: int
    at: int
    count: int
