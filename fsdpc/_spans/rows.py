"""The SHARDED form of one value: rows of a tensor, one block of rows per rank of a sharding group.

Block ``r`` of ``shape`` over ``world`` ranks is the one that ``torch.chunk`` gives: each block has
``ceil(shape[0] / world)`` rows, and the last blocks have fewer or none. A unit cuts its parameters
in this way only with ``by_rows`` (see ``csrc/unit/layout.h``). The SHARDED form has row blocks in
any case, because torch's FSDP writes row blocks and ``torch.distributed.checkpoint`` can reshard
them to another number of ranks. Values without rows (0-dim tensors) or without elements are not
cut: every rank keeps them whole, as plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpc._spans.span import Span
from fsdpc._torch import Shard as LocalShard
from fsdpc._torch import ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties


def is_cut(shape: Sequence[int]) -> bool:
    """Return whether a value of this shape is cut into rows."""
    return len(shape) > 0 and all(size > 0 for size in shape)


def rows(shape: Sequence[int], world: int, rank: int) -> tuple[int, int]:
    """Return the first row and the end row (exclusive) of a rank's block. Both are equal if the
    block is empty.
    """
    block = -(-shape[0] // world)
    return min(rank * block, shape[0]), min((rank + 1) * block, shape[0])


def rows_shape(shape: Sequence[int], world: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's block, which is ``(0, *shape[1:])`` for an empty block."""
    start, stop = rows(shape, world, rank)
    return (stop - start, *shape[1:])


def block(shape: Sequence[int], world: int, rank: int) -> Span:
    """Return the span of a rank's block of rows, in a memory that begins with the block. A value
    that is not cut is one whole block.
    """
    if not is_cut(shape):
        return Span(0, 0, math.prod(shape))
    start, stop = rows(shape, world, rank)
    return Span(start * row_numel(shape), 0, (stop - start) * row_numel(shape))


def block_shape(shape: Sequence[int], world: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's ``block``."""
    return rows_shape(shape, world, rank) if is_cut(shape) else tuple(shape)


def row_numel(shape: Sequence[int]) -> int:
    """Return the number of elements of one row, at least 1. A 0-dim value is one row."""
    return max(1, math.prod(shape[1:]))


def wrap_rows(
    local_rows: torch.Tensor,
    shape: Sequence[int],
    pg: dist.ProcessGroup,
    mesh: DeviceMesh | None = None,
) -> ShardedTensor | DTensor:
    """Return the distributed value with ``local_rows`` as this rank's block, without a copy. Local.

    Without ``mesh`` it is a ``ShardedTensor`` over ``pg``. With ``mesh`` it is a ``DTensor``,
    sharded over the mesh's last dimension (whose group is ``pg``) and replicated over the others.
    ``ValueError``: ``local_rows`` has another shape than the block.
    """
    expected = rows_shape(shape, pg.size(), pg.rank())
    if tuple(local_rows.shape) != expected:
        raise ValueError(
            f"local_rows of a value of shape {tuple(shape)} must have shape {expected} on rank "
            f"{pg.rank()}, got {tuple(local_rows.shape)}"
        )
    if mesh is None:
        ranges = [rows(shape, pg.size(), rank) for rank in range(pg.size())]
        rest = list(shape[1:])
        blocks = [([low] + [0] * len(rest), [high - low, *rest]) for low, high in ranges]
        return sharded_tensor(local_rows, shape, blocks, pg)
    size = torch.Size(shape)
    return DTensor.from_local(
        local_rows,
        mesh,
        placements(mesh),
        run_check=False,
        shape=size,
        stride=torch.empty(size, device="meta").stride(),
    )


def placements(mesh: DeviceMesh) -> list[Any]:
    """Return the DTensor placements on a mesh: sharded by rows over the last dimension, replicated
    over the others.
    """
    return [Replicate() for _ in range(mesh.ndim - 1)] + [Shard(0)]


def sharded_tensor(
    local: torch.Tensor,
    size: Sequence[int],
    blocks: Sequence[tuple[list[int], list[int]]],
    pg: dist.ProcessGroup,
) -> ShardedTensor:
    """Return the ``ShardedTensor`` of which rank r has block r of ``blocks`` (offsets, sizes). A
    block may be empty. ``local`` is this rank's block. Local.
    """
    shards, own = [], []
    for rank, (offsets, sizes) in enumerate(blocks):
        if 0 in sizes:
            continue
        where = device_of(dist.get_global_rank(pg, rank), local.device)
        shards.append(ShardMetadata(offsets, sizes, where))
        if rank == pg.rank():
            own.append(LocalShard(local, shards[-1]))
    properties = TensorProperties(
        dtype=local.dtype,
        layout=local.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=False,
    )
    metadata = ShardedTensorMetadata(shards, torch.Size(size), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, pg)


def device_of(rank: int, local: torch.device) -> str:
    """Return a global rank's device in the format of shard metadata. The device is exact for this
    rank. For other ranks the result assumes that the ranks of each host use the host's GPUs in
    order. Local.
    """
    if local.type == "cpu":
        return f"rank:{rank}/cpu"
    if rank == dist.get_rank():
        return f"rank:{rank}/{local}"
    per_host = torch.get_device_module(local).device_count()
    return f"rank:{rank}/{local.type}:{rank % per_host}"


def size_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole value. For a ShardedTensor, the shape is read from the
    metadata, because every call through torch's dispatch warns that the class is deprecated.
    """
    if isinstance(value, ShardedTensor):
        return tuple(value.metadata().size)
    return tuple(value.size())


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype of a tensor or a ShardedTensor, without torch's deprecation warning."""
    if isinstance(value, ShardedTensor):
        return value.metadata().tensor_properties.dtype
    return value.dtype


def is_distributed(value: Any) -> bool:
    """Return whether ``value`` is a ``ShardedTensor`` or ``DTensor``."""
    return isinstance(value, (ShardedTensor, DTensor))


def unwrap(
    value: Any,
    shape: Sequence[int],
    world: int,
    rank: int,
    name: str = "value",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return this rank's block of rows of a ``ShardedTensor``, ``DTensor`` or full tensor. Values
    that are not cut are returned whole.

    Local, except for a DTensor with other placements than those of ``wrap_rows``: gathering it is
    collective over its mesh. ``group``: the ranks that have the rows (default: any group of
    ``world`` ranks). ``ValueError``: the value has another shape than ``shape``, or is a
    ShardedTensor cut in another way. ``TypeError``: the value is not a tensor.
    """
    if not isinstance(value, (torch.Tensor, ShardedTensor)):
        raise TypeError(f"{name}: expected a tensor but got {type(value).__name__}")
    if size_of(value) != tuple(shape):
        raise ValueError(f"{name}: the value has shape {size_of(value)}, expected {tuple(shape)}")
    if isinstance(value, ShardedTensor):
        return _own_shard(value, shape, world, rank, name)
    if isinstance(value, DTensor):
        if is_cut(shape) and _lies_in_rows(value, world, rank, group):
            return value.to_local()
        value = value.full_tensor()
    if not is_cut(shape):
        return value
    start, stop = rows(shape, world, rank)
    return value[start:stop]


def _own_shard(
    value: ShardedTensor, shape: Sequence[int], world: int, rank: int, name: str
) -> torch.Tensor:
    start, stop = rows(shape, world, rank) if is_cut(shape) else (0, 0)
    expected = (stop - start, *shape[1:])
    shards = value.local_shards()
    if not shards and start == stop:
        return torch.empty(expected, dtype=dtype_of(value), device="cpu")
    held = [(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in shards]
    if held != [((start, *(0 for _ in shape[1:])), expected)]:
        raise ValueError(
            f"{name}: rank {rank} of {world} needs rows {start} to {stop} of a ShardedTensor of "
            f"shape {tuple(shape)}, but holds (offsets, sizes) {held}. Load the checkpoint with "
            "torch.distributed.checkpoint into this model's own state_dict(), which reshards it"
        )
    return shards[0].tensor


def _lies_in_rows(value: DTensor, world: int, rank: int, group: dist.ProcessGroup | None) -> bool:
    """Return whether ``to_local()`` is this rank's block. All ranks of the mesh must get the same
    answer, because they gather the value if the answer is False, and the gather is collective.
    """
    mesh = value.device_mesh
    last = mesh.ndim - 1
    if list(value.placements) != placements(mesh) or mesh.size(last) != world:
        return False
    if group is None:
        return mesh.get_local_rank(last) == rank
    ranks = dist.get_process_group_ranks
    return ranks(mesh.get_group(last)) == ranks(group)
