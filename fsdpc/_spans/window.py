"""Move elements from the ranks that hold them to those that want them, through a window of bounded
size, so that no rank holds more of a sharded tensor than it wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdpc._spans.span import Span

WINDOW_BYTES = 4 << 20
LEAST_NUMEL = 8192  # per rank: below this, latency of the collectives dominates


@dataclass(frozen=True)
class Wanted:
    """This rank wants a target's elements from ``begin`` on in ``values``, a 1-D tensor."""

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
    """Gather ``wanted`` elements from all ranks' pieces. Collective.

    Every rank has a piece of ``piece`` elements; each of this rank's ``parts`` is a place in its
    piece and the 1-D values there. ``spans``: for each target and rank, the target's elements in
    that rank's piece. The window is on ``device``, the communicator's.
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
    """Copy the elements that two ranges share: ``source`` begins with element ``first``, ``to``
    with element ``begin``.
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
    window on ``device``, the communicator's; each rank keeps what it wants. Collective.
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
