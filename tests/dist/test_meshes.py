"""fully_shard on several meshes: hooks that sum over replicas, replicated modules, units and
parameters with a mesh of their own.
"""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toys import Block, loss_of, tokens, toy

import fsdpc


def shard_blocks(model: nn.Module, **options) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, Block):
            fsdpc.fully_shard(module, **options)
    return fsdpc.fully_shard(model, **options)


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def unsharded(world: int, steps: int, factor: float = 1.0) -> nn.Module:
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        for rank in range(world):
            (loss_of(model, tokens(rank, number)) * (factor / world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_equal(model: nn.Module, reference: nn.Module, what: str = "") -> None:
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-5, msg=f"{what} {name}")


# --- all-reduce hooks ----------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("kind", ["flat", "replicas", "waiting"])
def test_an_all_reduce_hook_sums_over_replicas(rank, world, kind):
    """As torchft does: shards of two ranks, and a hook that averages over the two groups. With
    replicas of the engine's own the hook comes behind their sum.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = shard_blocks(toy(), mesh=mesh if kind == "replicas" else mesh["shard"])
    seen = []

    def hook(grads: torch.Tensor) -> None:
        seen.append(grads)
        if kind == "replicas":
            grads.mul_(2)
        else:
            dist.all_reduce(grads, group=mesh.get_group("replica"))
            grads.div_(2)

    model.apply(lambda m: isinstance(m, fsdpc.FSDPModule) and m.set_all_reduce_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        batch = tokens(rank, number)
        if kind == "waiting":
            model.set_requires_gradient_sync(False)
            loss_of(model, batch).div(2).backward()
            assert len(seen) == 3 * number  # three units, and none without a sum
            model.set_requires_gradient_sync(True)
            loss_of(model, batch).div(2).backward()
        else:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 6 and all(one.dim() == 1 and one.is_contiguous() for one in seen)
    assert_equal(model, unsharded(world, 2, 2.0 if kind == "replicas" else 1.0))
    model.apply(lambda m: isinstance(m, fsdpc.FSDPModule) and m.set_all_reduce_hook(None))
    loss_of(model, tokens(rank, 0)).backward()
    assert len(seen) == 6 and all(p.grad is not None for p in model.parameters())
    with pytest.raises((AssertionError, ValueError), match="hook itself is missing|native HSDP"):
        model.set_all_reduce_hook(None, stream=object())


# --- replicated modules --------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("home", ["replicate", "replicate_with_fsdp"])
def test_torchs_replicate_around_units_and_inside_one(rank, world, outer, home):
    replicate = importlib.import_module(f"torch.distributed._composable.{home}").replicate
    model = toy()
    inside, around = (fsdpc.fully_shard, replicate) if outer else (replicate, fsdpc.fully_shard)
    for block in model.blocks:
        inside(block)
    around(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        loss_of(model, tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, unsharded(world, 2))
