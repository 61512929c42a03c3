"""Move elements from the ranks that hold them to those that want them, through a window of bounded
size, so that no rank holds more of a sharded tensor than it wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WINDOW_BYTES = 4 << 20
LEAST_NUMEL = 8192  # per rank: below this, latency of the collectives dominates


@dataclass(frozen=True)
class Run:
    """``length`` elements of a rank's piece, from ``piece_begin``: ``target``'s from ``begin``."""

    rank: int
    piece_begin: int
    target: int
    begin: int
    length: int


@dataclass(frozen=True)
class Wanted:
    """This rank wants a target's elements from ``begin`` on in ``values``, a 1-D tensor."""

    begin: int
    values: torch.Tensor


def gather(
    comm: Any,
    piece: int,
    dtype: torch.dtype,
    fill: Callable[[torch.Tensor, int], None],
    runs: list[Run],
    wanted: dict[int, Wanted],
    what: str,
    device: torch.device,
) -> None:
    """Gather ``wanted`` elements from all ranks' pieces. Collective.

    Every rank has a piece of ``piece`` elements; ``fill(part, start)`` copies this rank's elements
    from ``start`` on into ``part``. ``runs``, equal on all ranks, map pieces to targets. The window
    is on ``device``, the communicator's.
    """
    room = min(piece, max(LEAST_NUMEL, WINDOW_BYTES // (dtype.itemsize * comm.world)))
    memory = torch.empty(comm.world * room, dtype=dtype, device=device)
    runs = [run for run in runs if run.target in wanted]
    for start in range(0, piece, max(room, 1)):
        count = min(room, piece - start)
        flat = memory[: comm.world * count]
        window = flat.view(comm.world, count)
        fill(window[comm.rank], start)
        if comm.world > 1:
            comm.all_gather(flat.view(torch.uint8), what=what)
        for run in runs:
            _take(run, wanted[run.target], window[run.rank], start)


def _take(run: Run, want: Wanted, part: torch.Tensor, start: int) -> None:
    shift = run.piece_begin - run.begin  # from the target's elements to the piece's
    low = max(run.piece_begin, start, want.begin + shift)
    high = min(
        run.piece_begin + run.length, start + len(part), want.begin + len(want.values) + shift
    )
    if low < high:
        at = low - shift - want.begin
        want.values[at : at + high - low].copy_(part[low - start : high - start])


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
        _take(Run(0, 0, 0, 0, numel), want, part, start)
