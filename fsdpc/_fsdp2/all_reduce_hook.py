"""The implementation of ``set_all_reduce_hook``, which passes the sum of a unit's gradients to a
user's hook as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def sum_and_call(
    hook: Callable[[Tensor], None],
    stream: Any,
    unit: Any,
    grads: Sequence[Tensor],
    segments: Sequence[dict[str, Any]],
) -> list[Tensor]:
    """Sum the gradients over all ranks, divide the sums, call the hook with them, and return this
    rank's shards of the results. The hook is called once for each dtype in which gradients are
    accumulated. Collective over the unit's groups.
    """
    pieces: dict[int, Tensor] = {}
    dtypes = [getattr(torch, segment["accumulate"]) for segment in segments]
    for dtype in dict.fromkeys(dtypes):
        members = [i for i, each in enumerate(dtypes) if each is dtype]
        world = unit.groups.shard.world
        rows = torch.cat([grads[i].view(world, -1).to(dtype) for i in members], dim=1)
        own = _mean(unit, rows)
        _call(hook, stream, own)
        parts = own.split([segments[i]["piece_numel"] for i in members])
        pieces.update(zip(members, parts, strict=True))
    return [pieces[i] for i in range(len(segments))]


def _mean(unit: Any, rows: Tensor) -> Tensor:
    """Return this rank's row of the sum of ``rows`` over all ranks of the shard group and the
    replicate group, divided by the unit's divisor.
    """
    shard, replicate = unit.groups.shard, unit.groups.replicate
    if shard.world > 1:
        shard.reduce_scatter(rows, what=f"all-reduce hook of {unit.name}")
    own = rows[shard.rank].clone()
    if replicate is not None:
        replicate.all_reduce(own, what=f"all-reduce hook of {unit.name}")
    return own.div_(unit.flat.divide)


def _call(hook: Callable[[Tensor], None], stream: Any, own: Tensor) -> None:
    if stream is None:
        hook(own)
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        hook(own)
    torch.cuda.current_stream().wait_stream(stream)
