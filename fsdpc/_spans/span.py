"""A span: which elements of a whole tensor a memory holds, and where; counted row-major. A unit's
spans come from C's layout (``csrc/unit/layout.h``), see ``Unit.spans``.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """The elements of a whole tensor from ``begin`` on, ``count`` of them, lie from ``at`` on in a
    memory.
    """

    begin: int
    at: int
    count: int
