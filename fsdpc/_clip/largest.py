"""The norm of order infinity of DTensors of which some ranks have no elements.

torch's norms of order infinity raise on the ranks without elements, while the other ranks wait for
these ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fsdpc._clip.norm import by_mesh


def has_empty_parts(tensors: Sequence[Tensor], norm_type: float) -> bool:
    """Whether the norm has order infinity and some rank has no elements of one of the DTensors. The
    result is the same on all ranks. False if a DTensor has a ``Partial`` placement, because that
    DTensor's sum is not made yet. Local.
    """
    if not math.isinf(norm_type) or norm_type < 0:
        return False
    found = [t for t in tensors if isinstance(t, DTensor)]
    if any(place.is_partial() for tensor in found for place in tensor.placements):
        return False
    return any(_someone_holds_nothing(tensor) for tensor in found)


def _someone_holds_nothing(tensor: DTensor) -> bool:
    for dim, place in enumerate(tensor.placements):
        if not place.is_replicate():
            size, world = tensor.shape[place.dim], tensor.device_mesh.size(dim)  # type: ignore[attr-defined]
            if -(-size // world) * (world - 1) >= size:
                return True
    return False


def largest(tensors: Sequence[Any]) -> Tensor:
    """Return the largest |x| of all elements of the DTensors, or NaN if an element is NaN.

    The result is 0-dim and equal on every rank: it is a replicated DTensor if all DTensors
    have one mesh, else a plain tensor. Collective over the DTensors' meshes.
    """
    meshes = by_mesh(tensors)
    first = tensors[0]._local_tensor
    # ``total[0]`` is the maximum. ``total[1]`` is 1.0 if an element is NaN, else 0.0.
    total = torch.zeros(2, dtype=torch.float64, device=first.device)
    for mesh, members in meshes.items():
        local = [tensor._local_tensor for tensor in members]
        found = [tensor.abs().max().double() for tensor in local if tensor.numel()]
        part = torch.stack(found) if found else total[:1]
        values = torch.stack([part.nan_to_num(0.0, math.inf).max(), part.isnan().any().double()])
        for dim in range(mesh.ndim):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        total = torch.maximum(total, values)
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    value = torch.where(total[1] > 0, math.nan, total[0]).to(dtype)
    if len(meshes) > 1:
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
