"""Tests of ranks on simulated GPUs whose collectives are staged through host memory:
values, training, errors.
"""

from __future__ import annotations

import os

import env
import numpy as np
import pytest
import simgpu
import torch
import torch.distributed as dist
from harness import die, ranks, run_ranks
from torch.distributed.fsdp import ShardingStrategy
from toys import PRECISIONS, compare_training, loss_of, tokens, toy, wrap_blocks

from fsdpc import _C
from fsdpc._comm import bootstrap as _bootstrap

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()
KINDS = pytest.mark.parametrize("kind", ["shm", "wire"])
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]


def named(kind: str) -> str:
    """Return the kind that the communicator reports."""
    return "c10d" if kind == "wire" else kind


def connect(kind: str, device: int | None = 0) -> _C.Comm:
    os.environ.update(FSDPC_COLLECTIVES=kind, FSDPC_TIMEOUT="20")
    return _bootstrap.comm_for_group(dist.group.WORLD, device=device)


@KINDS
@ranks(2, 3, env=GPU)
def test_values(rank, world, kind):
    comm = connect(kind)
    assert (comm.kind, comm.device, comm.rank, comm.world) == (named(kind), 0, rank, world)
    before = _C.cuda_waits(0)
    for n in (7, 70_000):  # the staging buffer in host memory grows
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            comm.all_reduce(values := torch.full((n,), rank + 1, dtype=dtype))
            assert bool((values == world * (world + 1) // 2).all())
        comm.all_reduce(values := torch.full((n,), float(rank)), op="max")
        assert bool((values == world - 1).all())
        comm.broadcast(values := torch.full((n, 3), rank, dtype=torch.int64), root=world - 1)
        assert bool((values == world - 1).all())
        comm.all_gather(values := torch.full((world * n,), rank, dtype=torch.uint8))
        assert values.tolist() == [r for r in range(world) for _ in range(n)]
        comm.reduce_scatter(values := torch.full((world * n,), float(rank + 1)))
        assert bool((values[rank * n : (rank + 1) * n] == world * (world + 1) / 2).all())
    assert _C.cuda_waits(0) > before
    comm.all_reduce(values := np.full(5, rank + 1, dtype=np.float32))  # host memory is not staged
    assert (values == world * (world + 1) / 2).all()
    comm.barrier()
    with pytest.raises(_C.MismatchError, match="units"):
        comm.agree(f"unit {rank}", what="units")
    assert simgpu.take_reports() == []


@KINDS
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("precision", PRECISIONS[:2], ids=lambda p: p.name)
@ranks(2, env=GPU)
def test_training(rank, world, kind, strategy, precision):
    os.environ["FSDPC_COLLECTIVES"] = kind

    def sharded(module):
        options = {"sharding_strategy": strategy, **precision.options()}
        return wrap_blocks("fsdpc", module, **options)

    groups = [[0], [1]] if strategy is ShardingStrategy.NO_SHARD else None
    model = compare_training(
        "fsdpc", toy(), sharded, lambda step: tokens(rank, step), precision=precision, groups=groups
    )
    comm = model._groups.replicate or model._groups.shard
    assert (comm.kind, comm.device) == (named(kind), 0)
    assert simgpu.take_reports() == []


@ranks(2, env=GPU)
def test_the_cpus_communicator_carries_it(rank, world):
    on_cpu = connect("shm", None)
    on_gpu = connect("shm")
    assert on_gpu is not on_cpu and (on_cpu.device, on_gpu.device) == (None, 0)
    with pytest.raises(ValueError, match="device must be a GPU"):
        on_gpu.staged(0)
    with pytest.raises(NotImplementedError, match="no CUDA device 9 here"):
        on_cpu.staged(9)
    with pytest.raises(TypeError):
        on_cpu.staged("cuda")
    again = on_cpu.staged(0)
    again.all_reduce(values := torch.ones(3))
    assert values.tolist() == [2, 2, 2]
    del again
    on_cpu.barrier()


def dies_in_training(rank, world):
    os.environ.update(FSDPC_COLLECTIVES="shm", FSDPC_TIMEOUT="20")
    model = wrap_blocks("fsdpc", toy())
    for step in range(3):
        if step == 2 and rank == 1:
            die()
        loss_of(model, tokens(rank, step)).backward()


def test_a_rank_that_dies_is_named():
    outcomes = run_ranks(dies_in_training, 2, env=GPU, faults=True)
    assert "PeerError" in outcomes[0].error and "rank 1" in outcomes[0].error, outcomes[0]
