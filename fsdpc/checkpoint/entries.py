"""Named tensors of a checkpoint, and the elements of each that this rank holds.

The name, shape, dtype and position of an entry are the same on every rank. Its spans, a table of
ranges of elements (``fsdpc/_companions/spans.py``), say which elements this rank has.
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

_CUT_BYTES = 1 << 20  # if a tensor has at least this size, each of its replicas writes a part
_PAGE = 4096


@dataclass(frozen=True)
class Coding:
    """How a tensor was quantized (``fsdpc.lowbit``): ``codec`` is the codec's name, ``row`` the
    number of values in a row, and ``dtype`` the dtype of the values before.
    """

    codec: str
    row: int
    dtype: torch.dtype


class Decoder(Protocol):
    """Computes an entry's values while this rank saves them; the entry then has no memory."""

    def read(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` values from number ``first`` on, as a 1-D tensor in host memory."""


@dataclass
class Entry:
    """One tensor of a checkpoint. ``memory`` is this rank's memory of the tensor, 1-D and
    contiguous, on any device; ``spans`` says which elements are where in ``memory``.

    ``replica`` is ``(k, n)`` if ``n`` ranks have the same elements and this rank is the ``k``-th of
    them. ``first_writes`` means that the first replica's values are saved, because the values of
    the replicas may differ (as those of buffers may). ``ranks`` is the number of ranks among which
    ``spans`` and ``replica`` divide the tensor, or 0 for all ranks. If ``ranks`` is smaller than
    the world, ranks of other groups may have the same elements; see ``settle``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.Tensor
    spans: np.ndarray = field(default_factory=lambda: NO_SPANS)
    replica: tuple[int, int] = (0, 1)
    first_writes: bool = False
    home: torch.Tensor | None = None  # if set, a load copies ``memory`` into this tensor
    # Spans of elements that this rank reads but another rank writes.
    borrowed: np.ndarray = field(default_factory=lambda: NO_SPANS)
    steady: bool = True  # only optimizers write the values; the forward does not
    # True if the engine can access ``memory`` directly although CPU tensors simulate a GPU.
    on_host: bool = False
    ranks: int = 0
    unit: Any = None  # the FSDP unit of which the tensor is parameter ``number``
    number: int = 0
    frozen: bool = False  # requires no gradient; saved in files that have only frozen tensors
    exact: bool = False  # codes or scales of quantized weights, which are never converted
    coding: Coding | None = None
    # If set, it computes the values: ``memory`` is empty, and ``spans`` refer to decoded values.
    decoder: Decoder | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def own(self, index: int, *, reading: bool = False) -> np.ndarray:
        """Return the spans that this rank writes. The ranks together write each element exactly
        once. With ``reading``, return the spans that this rank verifies. The replica that writes
        a small tensor is chosen by ``index``, the entry's position, so that each has its share.
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
    """A parameter of an optimizer. ``covers`` has the entries whose elements are in the parameter,
    each with its spans in the parameter; a flat parameter covers several entries.
    ``check_cut(key)`` raises if the state ``key``, which has one element per element of the
    parameter, cannot be saved by parameter names.
    """

    param: nn.Parameter
    covers: list[tuple[Entry, np.ndarray]]
    check_cut: Callable[[str], None] | None = None

    @property
    def names(self) -> list[str]:
        return [entry.name for entry, _ in self.covers]


def parts_of_some(entries: Sequence[Entry], world: int) -> np.ndarray:
    """Return a table with one row for each entry that is divided among fewer than ``world`` ranks.
    The row describes this rank's part of the entry. ``settle`` compares the rows of all ranks.
    """
    rows = [
        (index, entry.replica[0], entry.spans[:, 2].sum(), _C.ckpt_crc32c(entry.spans.tobytes(), 0))
        for index, entry in enumerate(entries)
        if entry.ranks not in (0, world)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def settle(entries: Sequence[Entry], received: Sequence[np.ndarray], rank: int) -> None:
    """If several groups of ranks have equal parts of an entry, treat these parts as replicas, of
    which only the first is written. Such parts occur with tensor parallelism, for parameters that
    are sharded only over the data-parallel dimension of the mesh. ``received`` has the result of
    ``parts_of_some`` of every rank. Local.
    """
    table = np.concatenate(received)
    if len(table) == 0:
        return
    _, group, counts = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")  # group by group, in the order of the ranks
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
    """Return ``flat(tensor)``, and the tensor itself if ``flat`` has made a copy, else None."""
    memory = flat(tensor)
    copied = memory.numel() > 0 and memory.data_ptr() != tensor.data_ptr()
    return memory, tensor.detach() if copied else None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as a 1-D tensor, or a copy if the tensor is not contiguous."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)
