"""The block of a DTensor that a rank has, computed from the tensor's placements."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Shard

from fsdpc._spans.rows import rows
from fsdpc._torch import StridedShard


def block_of(
    tensor: DTensor, what: str
) -> tuple[tuple[int, ...] | None, tuple[int, ...], tuple[int, int]]:
    """Return the offsets and sizes of a DTensor's block on this rank, and ``(k, n)`` if this rank
    has the ``k``-th of ``n`` replicas of the block. The offsets are ``None`` if this rank is not in
    the mesh. Supports ``Replicate`` and ``Shard``. Also supports ``_StridedShard`` as FSDP with
    tensor parallelism makes it: it shards the blocks into which later mesh dimensions have cut the
    tensor. Raises ``TypeError`` for other placements.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    k, n = 0, 1
    cuts: list[tuple[int, int]] = []  # (mesh dimension, tensor dimension) of each cut, in order
    for dimension in reversed(range(mesh.ndim)):
        placement = tensor.placements[dimension]
        if placement.is_replicate():
            rank = coordinate[dimension] if coordinate is not None else 0
            k, n = k + n * rank, n * mesh.size(dimension)
        elif type(placement) is Shard:
            cuts.insert(0, (dimension, placement.dim))
        elif _cuts_last(tensor, dimension):
            cuts.append((dimension, placement.dim))
        else:
            raise TypeError(
                f"{what} is a DTensor with placement {placement} on mesh dimension {dimension}: "
                "a checkpoint holds Shard and Replicate; redistribute the tensor first"
            )
    for dimension, cut in cuts:
        rank = coordinate[dimension] if coordinate is not None else 0
        low, high = rows(sizes[cut:], mesh.size(dimension), rank)
        offsets[cut] += low
        sizes[cut] = high - low
    return (None if coordinate is None else tuple(offsets)), tuple(sizes), (k, n)


def _cuts_last(tensor: DTensor, dimension: int) -> bool:
    """Return whether ``dimension`` shards the blocks that all later mesh dimensions have cut."""
    placement: Any = tensor.placements[dimension]
    if type(placement) is not StridedShard:
        return False
    later = range(dimension + 1, tensor.device_mesh.ndim)
    split = 1
    for each in later:
        if type(tensor.placements[each]) is Shard and tensor.placements[each].dim == placement.dim:
            split *= tensor.device_mesh.size(each)
    return bool(split == placement.split_factor)
