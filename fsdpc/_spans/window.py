"""Transfers of elements from the ranks that have them to the ranks that want them, through a window
of bounded size, so that no rank stores more of a sharded tensor than it wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdpc._spans.span import Span

WINDOW_BYTES = 4 << 20
# The smallest window, in elements per rank. With a smaller window, latency would dominate.
LEAST_NUMEL = 8192


@dataclass(frozen=True)
class Wanted:
    """A request of this rank for elements of a sharded tensor, the target. The request begins at
    element ``begin`` of the target. The elements are written to the 1-D tensor ``values``, whose
    size is their number.
    """

    begin: int
    values: torch.Tensor


def gather(
    comm: Any,
    piece: int,
    dtype: torch.dtype,
    parts: Sequence[tuple[int, torch.Tensor]],
    spans: Mapping[int, Sequence[Span]],
    wanted: dict[int, Wanted],
    what: str,
    device: torch.device,
) -> None:
    """Gather the ``wanted`` elements of each target from all ranks. Collective.

    Every rank has a buffer of ``piece`` elements. Each entry of ``parts`` is a position in this
    rank's buffer and the 1-D values there. ``spans`` has for each target one span per rank: the
    elements of the target in that rank's buffer. The window is on ``device``, the device of the
    communicator.
    """
    room = min(piece, max(LEAST_NUMEL, WINDOW_BYTES // (dtype.itemsize * comm.world)))
    memory = torch.empty(comm.world * room, dtype=dtype, device=device)
    for start in range(0, piece, max(room, 1)):
        count = min(room, piece - start)
        flat = memory[: comm.world * count]
        window = flat.view(comm.world, count)
        for at, values in parts:
            _copy_common(values, at, window[comm.rank], start)
        if comm.world > 1:
            comm.all_gather(flat.view(torch.uint8), what=what)
        for target, want in wanted.items():
            for span, part in zip(spans[target], window, strict=True):
                low, high = max(span.at, start), min(span.at + span.count, start + count)
                if low < high:
                    begin = low - span.at + span.begin
                    _copy_common(part[low - start : high - start], begin, want.values, want.begin)


def _copy_common(source: torch.Tensor, first: int, to: torch.Tensor, begin: int) -> None:
    """Copy the elements that ``source`` and ``to`` have in common. ``source`` begins with element
    ``first`` of a tensor, and ``to`` with element ``begin`` of the same tensor.
    """
    low, high = max(first, begin), min(first + len(source), begin + len(to))
    if low < high:
        to[low - begin : high - begin].copy_(source[low - first : high - first])


def broadcast(
    comm: Any,
    whole: torch.Tensor | None,
    numel: int,
    want: Wanted,
    what: str,
    device: torch.device,
) -> None:
    """Broadcast rank 0's ``whole``, a flat contiguous tensor (None on other ranks), through a
    window on ``device``, the device of the communicator. Each rank keeps the elements that ``want``
    requests. Collective.
    """
    dtype = want.values.dtype
    room = max(1, min(numel, WINDOW_BYTES // dtype.itemsize))
    passes_on = whole is not None and whole.device == device
    memory = None if passes_on else torch.empty(room, dtype=dtype, device=device)
    for start in range(0, numel, room):
        count = min(room, numel - start)
        end = start + count
        part = whole[start:end] if memory is None else memory[:count]  # type: ignore[index]
        if whole is not None and not passes_on:
            part.copy_(whole[start:end])
        if comm.world > 1:
            comm.broadcast(part.view(torch.uint8), root=0, what=what)
        _copy_common(part, start, want.values, want.begin)
