"""Named tensors of a checkpoint, and the elements of each that this rank holds.

An entry is the same on every rank (name, shape, dtype, place in the order); its spans are a rank's
own, as a table (``fsdpc/_companions/spans.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fsdpc import _C
from fsdpc._companions.spans import NO_SPANS, clip, count_of

_CUT_BYTES = 1 << 20  # from this size on, replicas divide what they hold of a tensor
_PAGE = 4096


@dataclass(frozen=True)
class Coding:
    """How rows of ``row`` values, which had the dtype ``dtype``, were coded (``fsdpc.lowbit``)."""

    codec: str
    row: int
    dtype: torch.dtype


class Decoder(Protocol):
    """Values that this rank computes, in the place of an entry's memory."""

    def read(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Values from the ``first`` on, 1-D, in host memory."""


@dataclass
class Entry:
    """One tensor. ``memory``: this rank's, 1-D and contiguous, on any device; the spans lie in it.

    ``replica``: ``(k, n)`` if ``n`` ranks hold the same elements and this is the ``k``-th of them.
    ``first_writes``: the replicas may differ (buffers), so that the first one's values are saved.
    ``ranks``: the number of ranks among which ``spans`` and ``replica`` divide the tensor, 0 for
    all; other ranks may hold the same elements, see ``settle``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.Tensor
    spans: np.ndarray = field(default_factory=lambda: NO_SPANS)
    replica: tuple[int, int] = (0, 1)
    first_writes: bool = False
    home: torch.Tensor | None = None  # if set, ``memory`` is its copy, written back after a load
    borrowed: np.ndarray = field(default_factory=lambda: NO_SPANS)  # read here; written elsewhere
    steady: bool = True  # only optimizers write the values, no forward
    on_host: bool = False  # even where CPU tensors count as memory of a simulated GPU
    ranks: int = 0
    unit: Any = None  # whose flat parameter has the tensor as parameter ``number``
    number: int = 0
    frozen: bool = False  # requires no gradient: lies in files of such tensors alone
    exact: bool = False  # codes, or their scales: never converted
    coding: Coding | None = None
    decoder: Decoder | None = None  # then ``memory`` is empty, and spans are places in the values

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
        total = count_of(self.spans)
        if total * self.dtype.itemsize < _CUT_BYTES:
            return self.spans if index % n == k else NO_SPANS
        unit = _PAGE // self.dtype.itemsize
        low, high = (total * part // n // unit * unit for part in (k, k + 1))
        return clip(self.spans, low, total if k + 1 == n else high)


@dataclass
class OptimParam:
    """A parameter as an optimizer holds it, and the entries whose elements lie in it: spans of
    their own, because a flat parameter covers several. ``check_cut`` raises if a state with one
    element per element, by name, has no form in a checkpoint.
    """

    param: nn.Parameter
    covers: list[tuple[Entry, np.ndarray]]
    check_cut: Callable[[str], None] | None = None

    @property
    def names(self) -> list[str]:
        return [entry.name for entry, _ in self.covers]


def parts_of_some(entries: Sequence[Entry], world: int) -> np.ndarray:
    """This rank's part of each entry that fewer than ``world`` ranks divide, for ``settle``."""
    rows = [
        (index, entry.replica[0], entry.spans[:, 2].sum(), _C.ckpt_crc32c(entry.spans.tobytes(), 0))
        for index, entry in enumerate(entries)
        if entry.ranks not in (0, world)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def settle(entries: Sequence[Entry], received: Sequence[np.ndarray], rank: int) -> None:
    """Count parts that groups of ranks beside each other hold alike (parameters on the data
    parallel dimension of a mesh beside tensor parallelism) as replicas, of which the first writes.
    ``received``: every rank's ``parts_of_some``. Local.
    """
    table = np.concatenate(received)
    if len(table) == 0:
        return
    _, group, counts = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")  # in each group by rank
    nth = np.empty(len(table), dtype=np.int64)
    nth[order] = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = sum(len(rows) for rows in received[:rank])
    for at, index in enumerate(received[rank][:, 0].tolist(), first):
        several = int(counts[group[at]])
        if several > 1:
            k, n = entries[index].replica
            entries[index].replica = (k + n * int(nth[at]), n * several)
            entries[index].first_writes = True


def flat_and_home(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``flat``, and the tensor itself if ``flat`` is a copy."""
    memory = flat(tensor)
    copied = memory.numel() > 0 and memory.data_ptr() != tensor.data_ptr()
    return memory, tensor.detach() if copied else None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a 1-D tensor; a copy where it is not contiguous."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)
