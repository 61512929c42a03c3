"""Communicators of GPUs, on simulated ones: values, errors, deaths, and the end of a process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ranks

from fsdpc import _C

sys.path.append(str(Path(__file__).parents[1] / "simgpu"))
import env

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()


def ids_of_rank_0(rank: int) -> tuple[bytes, bytes]:
    ids = [(_C.nccl_id(), _C.nccl_id()) if rank == 0 else None]
    dist.broadcast_object_list(ids)
    assert ids[0] is not None
    return ids[0]


@pytest.mark.parametrize("channel", [False, True])
@ranks(1, 3, env=GPU)
def test_host_arrays_travel_with_or_without_a_channel(rank, world, channel):
    said = []

    def exchange(memory, piece_bytes, what):
        said.append((len(memory) == world * piece_bytes, what))
        mine = memory[rank * piece_bytes : (rank + 1) * piece_bytes].tobytes()
        everyone = [b""] * world
        dist.all_gather_object(everyone, mine)
        memory[:] = np.frombuffer(b"".join(everyone), dtype=np.uint8)

    comm = _C.Comm.nccl(
        rank, world, *ids_of_rank_0(rank), 0, "pair", 20.0, exchange if channel else None
    )
    assert (comm.kind, comm.device, comm.rank, comm.world) == ("nccl", 0, rank, world)
    assert _C.nccl_version().startswith("NCCL 2.28.3 (/")
    total = world * (world + 1) / 2
    for n in (3, 300_001):
        where = np.full((world, n), rank, dtype=np.int64)
        comm.all_gather(where.reshape(-1))
        assert (where == np.arange(world)[:, None]).all()
        for dtype in (np.float16, np.float32, np.float64):
            values = np.full(n, rank + 1, dtype=dtype)
            comm.all_reduce(values)
            assert (values == total).all()
        comm.all_reduce(values := np.full(n, -rank, dtype=np.float32), op="max")
        assert (values == 0).all()
        comm.broadcast(values := np.full(n, rank, dtype=np.int16), root=world - 1)
        assert (values == world - 1).all()
        comm.reduce_scatter(values := np.full(n * world, rank + 1, dtype=np.float32))
        assert (values[rank * n : (rank + 1) * n] == total).all()
    comm.barrier("the end")
    assert not said or (channel and all(fits for fits, _ in said) and said[-1][1] == "the end")
    assert bool(said) == channel
    comm.agree("same")
    if world > 1:
        with pytest.raises(_C.MismatchError, match="line 2.*'b 0'.*'b 1'|b 0.*b 1"):
            comm.agree(f"a\nb {rank}", what="units")
        comm.agree("still good")
    comm.close()
    with pytest.raises(_C.StateError, match="closed"):
        comm.barrier()


@pytest.mark.parametrize("raised", ["CommTimeout", "PeerError"])
@ranks(2, env=GPU)
def test_what_the_channel_raises_keeps_its_kind_and_breaks_the_communicator(rank, world, raised):
    error = getattr(_C, raised)

    def exchange(memory, piece_bytes, what):
        raise error(f"{what}: rank 7 did not come")

    comm = _C.Comm.nccl(rank, world, *ids_of_rank_0(rank), 0, exchange=exchange)
    for _ in range(2):
        with pytest.raises(error, match=r"^units: rank 7 did not come$"):
            comm.agree("text", what="units")


@ranks(1, env=GPU)
def test_arguments_are_checked(rank, world):
    good = _C.nccl_id()
    with pytest.raises(ValueError, match="reduce_id must be the 128 bytes"):
        _C.Comm.nccl(0, 1, good, good[:5], 0)
    with pytest.raises(TypeError, match="exchange must be callable"):
        _C.Comm.nccl(0, 1, good, good, 0, exchange=3)
    with pytest.raises(NotImplementedError, match="no CUDA device 9 here"):
        _C.Comm.nccl(0, 1, good, good, 9)
    with pytest.raises(ValueError, match="rank 2 is not one of a group of 1"):
        _C.Comm.nccl(2, 1, good, good, 0)
    assert _C.Comm.self_(0).device == 0 and _C.Comm.self_().device is None
    with pytest.raises(NotImplementedError, match="no CUDA device 3 here"):
        _C.Comm.self_(3)


@ranks(2, 3, env=GPU)
def test_tensors_on_the_gpu_travel_by_nccl(rank, world):
    def exchange(memory, piece_bytes, what):
        raise AssertionError(f"{what} went by the host's channel")

    comm = _C.Comm.nccl(rank, world, *ids_of_rank_0(rank), 0, exchange=exchange)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        comm.all_reduce(values := torch.full((1000,), rank + 1, dtype=dtype))
        assert bool((values == world * (world + 1) // 2).all())
    comm.broadcast(values := torch.full((5, 3), rank, dtype=torch.int64), root=world - 1)
    assert bool((values == world - 1).all())
    comm.all_gather(values := torch.full((world * 7,), rank, dtype=torch.uint8))
    assert values.tolist() == [r for r in range(world) for _ in range(7)]
    comm.reduce_scatter(values := torch.full((world * 7,), float(rank + 1)))
    assert bool((values[rank * 7 : (rank + 1) * 7] == world * (world + 1) / 2).all())
    with pytest.raises(ValueError, match="not contiguous"):
        comm.all_reduce(torch.zeros(4, 4).t()[1:])
    with pytest.raises(_C.CommError, match="host's channel"):
        comm.all_reduce(np.zeros(3, dtype=np.float32))
