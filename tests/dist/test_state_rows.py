"""Tests of the form that one value has in a SHARDED_STATE_DICT: blocks of rows in a ShardedTensor
or a DTensor. They equal the blocks of rows that torch makes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdpc._spans.rows import is_cut, is_distributed, rows, rows_shape, unwrap, wrap_rows

SHAPES = [(1,), (2,), (3,), (5, 2), (7, 1, 3), (16, 3), (4, 4)]


def full(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1


def own(tensor, world, rank):
    start, stop = rows(tensor.shape, world, rank)
    return tensor[start:stop].clone()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13])
def test_rows_are_those_of_chunk(world, length):
    chunks = torch.arange(length).chunk(world)
    for rank in range(world):
        start, stop = rows((length, 2), world, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected
        assert rows_shape((length, 2), world, rank) == (len(expected), 2)


def test_what_is_not_cut():
    assert [is_cut(s) for s in ((), (0,), (3, 0), (1,), (2, 2))] == [0, 0, 0, 1, 1]


@ranks(2, 3)
@pytest.mark.parametrize("shape", SHAPES)
def test_sharded_tensor_is_torchs(rank, world, shape):
    pg = dist.group.WORLD
    value = full(shape)
    got = wrap_rows(own(value, world, rank), shape, pg)
    expected = _create_chunk_sharded_tensor(value, rank, world, 1, pg)
    assert isinstance(got, ShardedTensor) and is_distributed(got)
    assert got.metadata() == expected.metadata()
    assert len(got.local_shards()) == len(expected.local_shards())
    for a, b in zip(got.local_shards(), expected.local_shards(), strict=True):
        assert a.metadata == b.metadata and torch.equal(a.tensor, b.tensor)
    assert torch.equal(unwrap(got, shape, world, rank), own(value, world, rank))


@ranks(2, 3)
@pytest.mark.parametrize("shape", SHAPES)
def test_dtensor_is_torchs(rank, world, shape):
    mesh = init_device_mesh("cpu", (world,))
    value = full(shape)
    got = wrap_rows(own(value, world, rank), shape, mesh.get_group(), mesh)
    expected = _create_chunk_dtensor(value, rank, mesh)
    assert isinstance(got, DTensor) and is_distributed(got)
    assert got._spec == expected._spec and got.shape == expected.shape
    assert torch.equal(got.to_local(), expected.to_local())
    assert torch.equal(got.full_tensor(), value)
    assert torch.equal(unwrap(got, shape, world, rank), own(value, world, rank))


@ranks(4)
def test_hybrid_mesh(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    value = full((5, 2))
    pg = mesh.get_group(1)
    got = wrap_rows(own(value, 2, pg.rank()), value.shape, pg, mesh)
    expected = _create_chunk_dtensor(value, rank, mesh)
    assert got.placements == expected.placements == (Replicate(), Shard(0))
    assert torch.equal(got.to_local(), expected.to_local())
    assert torch.equal(unwrap(got, value.shape, 2, pg.rank()), own(value, 2, pg.rank()))


@ranks(3)
def test_other_placements_are_gathered(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    value = full((5, 4))
    for placement in (Replicate(), Shard(1)):
        other = distribute_tensor(value, mesh, [placement])
        assert torch.equal(unwrap(other, value.shape, world, rank), own(value, world, rank))
    assert torch.equal(unwrap(value, value.shape, world, rank), own(value, world, rank))
    scalar = torch.tensor(3.0)
    assert unwrap(scalar, (), world, rank) is scalar


@ranks(2)
def test_what_does_not_fit_is_refused(rank, world):
    value = full((5, 2))
    sharded = wrap_rows(own(value, world, rank), value.shape, dist.group.WORLD)
    with pytest.raises(ValueError, match=r"up\.weight.*\(5, 2\).*\(5, 3\)"):
        unwrap(sharded, (5, 3), world, rank, "up.weight")
    with pytest.raises(ValueError, match="needs rows"):
        unwrap(sharded, (5, 2), 3, 1, "up.weight")
    with pytest.raises(TypeError, match="up.weight"):
        unwrap([1.0], (1,), world, rank, "up.weight")
    with pytest.raises(ValueError, match="rows of a value.* on rank"):
        wrap_rows(value, value.shape, dist.group.WORLD)
