"""Operations that run once before ranks are forked, because torch and fsdpc are slow at the first
call. Nothing in this file starts a thread.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def up() -> None:
    """Step a plain layer and a layer of DTensors, in a process group that communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # torch caches the specs of DTensors by the ranks and dimension names of their meshes. The name
    # "warm" keeps other ranks from getting the cached specs of rank 0.
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("warm",))
    for make in (torch.optim.Adam, torch.optim.SGD):
        layer = torch.nn.Linear(4, 4)
        layer(torch.ones(2, 4)).sum().backward()
        shards = [DTensor.from_local(p.detach()[:2], mesh, [Shard(0)]) for p in layer.parameters()]
        step(make, list(layer.parameters()))
        step(make, [torch.nn.Parameter(shard) for shard in shards])
        for shard in shards:
            shard.full_tensor()
    dist.destroy_process_group()
    if "fsdpc._companions.runs" in sys.modules:
        sys.modules["fsdpc._companions.runs"]._rounds_alike()  # its result is cached


def step(make, parameters) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer = make(parameters)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
