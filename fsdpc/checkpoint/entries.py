"""Named tensors of a checkpoint, and the elements of each that this rank holds.

An entry is the same on every rank (name, shape, dtype, place in the order); its spans are a rank's
own. Rows of spans are ``(begin, at, count)``, in elements: from element ``begin`` of the whole
tensor, row-major, this rank holds ``count`` elements at ``at`` of its local memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

NO_SPANS = np.empty((0, 3), dtype=np.int64)
_CUT_BYTES = 1 << 20  # what replicas hold of a tensor is divided from this size on
_PAGE = 4096


@dataclass
class Entry:
    """One tensor. ``memory``: this rank's, 1-D and contiguous, on any device; the spans lie in it.

    ``replica``: ``(k, n)`` if ``n`` ranks hold the same elements and this is the ``k``-th of them.
    ``first_writes``: the replicas may differ (buffers), so that the first one's values are saved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.Tensor
    spans: np.ndarray = field(default_factory=lambda: NO_SPANS)
    replica: tuple[int, int] = (0, 1)
    first_writes: bool = False
    home: torch.Tensor | None = None  # ``memory`` is a copy of it: what is read goes there after
    borrowed: np.ndarray = field(default_factory=lambda: NO_SPANS)  # read; others write and verify
    steady: bool = True  # only optimizers write the values, no forward
    on_host: bool = False  # even where CPU tensors count as memory of a simulated GPU

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def own(self, index: int, *, reading: bool = False) -> np.ndarray:
        """The spans that this rank writes, so that each element is written once; ``reading``: the
        spans that it verifies. ``index``: the entry's place in the order, for an even division.
        """
        k, n = self.replica
        if n == 1:
            return self.spans
        if self.first_writes and not reading:
            return self.spans if k == 0 else NO_SPANS
        total = int(self.spans[:, 2].sum())
        if total * self.dtype.itemsize < _CUT_BYTES:
            return self.spans if index % n == k else NO_SPANS
        unit = _PAGE // self.dtype.itemsize
        low, high = (total * part // n // unit * unit for part in (k, k + 1))
        return _clip(self.spans, low, total if k + 1 == n else high)


def _clip(spans: np.ndarray, low: int, high: int) -> np.ndarray:
    """Elements ``[low, high)`` of the spans, counted over all of them."""
    starts = np.cumsum(spans[:, 2]) - spans[:, 2]
    begin = np.maximum(starts, low)
    count = np.minimum(starts + spans[:, 2], high) - begin
    moved = begin - starts
    kept = np.stack([spans[:, 0] + moved, spans[:, 1] + moved, count], axis=1)
    return kept[count > 0]


def whole_span(numel: int) -> np.ndarray:
    """All elements, at the begin of the memory."""
    return np.array([[0, 0, numel]], dtype=np.int64) if numel else NO_SPANS


def flat_and_home(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``flat``, and the tensor itself where that is a copy."""
    memory = flat(tensor)
    copied = memory.numel() > 0 and memory.data_ptr() != tensor.data_ptr()
    return memory, tensor.detach() if copied else None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a 1-D tensor; a copy where it is not contiguous."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def block_spans(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], at: int = 0
) -> np.ndarray:
    """Spans of a block of a tensor that lies contiguously from ``at`` on."""
    if math.prod(sizes) == 0:
        return NO_SPANS
    if not shape:
        return np.array([[0, at, 1]], dtype=np.int64)
    # From the first dimension on, behind which the block has all of every dimension, it is one run.
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
    ats = at + np.arange(len(begins), dtype=np.int64) * count
    return np.stack([begins, ats, np.full(len(begins), count)], axis=1)


def blocks_of(
    shape: Sequence[int], begin: int, count: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The blocks (offsets, sizes) of which ``count`` > 0 elements from ``begin`` on consist, in
    their order: the inverse of ``block_spans``.
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
