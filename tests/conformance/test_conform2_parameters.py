"""Sharded parameters: rows, gradients, writes, and parameters that are frozen or unfrozen later."""

from __future__ import annotations

import torch
from outcome import wrong
from rows_library import RowsLibrary, linear, whole
from suite import BOTH, Cases
from torch import nn
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- rows ----------------------------------------------------------------------------------------


def described(p):
    local = p.to_local()
    spec = p._spec.tensor_meta
    return {
        "shape": tuple(p.shape),
        "stride": p.stride(),
        "dtype": str(p.dtype),
        "spec": (tuple(spec.shape), spec.stride, str(spec.dtype)),
        "placements": str(p.placements),
        "local": local.detach().clone(),
        "contiguous": local.is_contiguous(),
        "requires_grad": (p.requires_grad, p.is_leaf, isinstance(p, nn.Parameter)),
    }


@case(world=4, over={"rows": [1, 2, 4, 5, 7, 8]})
def rows_on_four_ranks(lib, rows):
    model = lib.fully_shard(linear(rows))
    chunks = torch.chunk(linear(rows).weight.detach(), lib.world, 0)
    local = model.weight.to_local()
    assert torch.equal(local, chunks[lib.rank]) if lib.rank < len(chunks) else local.numel() == 0
    return [described(p) for p in model.parameters()]


@case(over={"shape": [(3, 2, 2), (2, 1, 5), (5,), (9, 1)]})
def rows_of_several_dimensions(lib, shape):
    model = nn.Module()
    model.p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    lib.fully_shard(model)
    return described(model.p)


@case(world=3)
def rows_on_three_ranks(lib):
    return {n: described(p) for n, p in lib.shard_blocks(toy()).named_parameters()}


@case(world=4)
def training_on_four_ranks_with_empty_shards(lib):
    """Three of the four ranks have no elements of some parameters."""
    model = nn.Sequential(linear(1, 3), nn.Tanh(), linear(2, 1))
    lib.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(torch.ones(2, 3) * (lib.rank + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model), [tuple(p.to_local().shape) for p in model.parameters()]


@case(world=1)
def one_rank(lib):
    model = lib.shard_blocks(toy())
    return [str(p.placements) for p in model.parameters()], lib.train(model)


@case(over={"wide": BOTH})
def gradients_are_distributed_like_parameters(lib, wide):
    model = toy(width=8) if wide else toy()
    lib.shard_blocks(model)
    loss_of(model, lib.batch()).backward()
    lib.resharded(model)
    return [
        (str(p.grad.placements), p.grad.device_mesh == p.device_mesh, p.grad.to_local().shape)
        for p in model.parameters()
    ]


@case()
def a_gradient_that_the_user_assigns(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    lib.resharded(model)
    for p in model.parameters():
        p.grad = p.grad * 2
    loss_of(model, lib.batch(1)).backward()
    return lib.gradients(model)


@case()
def gradients_that_the_user_scales_in_place(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    lib.resharded(model)
    for p in model.parameters():
        p.grad.mul_(0.5)
    loss_of(model, lib.batch(1)).backward()
    return lib.gradients(model)


@case(over={"replace": BOTH})
def gradients_that_the_user_keeps(lib, replace):
    """A program can keep the .grad tensors of several losses, and later combine these gradients."""
    model = lib.shard_blocks(toy())
    params = list(model.parameters())
    lists, copies = [], []
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        lists.append([p.grad for p in params])
        copies.append([whole(grad) for grad in lists[-1]])
        if replace:
            for p in params:
                p.grad = torch.zeros_like(p.grad)
        else:
            model.zero_grad()
    for grads, values in zip(lists, copies, strict=True):
        assert all(map(torch.equal, map(whole, grads), values)), "values changed"
    for p, *grads in zip(params, *lists, strict=True):
        p.grad = sum(grads) / 3
    torch.optim.SGD(params, lr=0.1).step()
    return lib.full(model)


@case(over={"how": ["data", "no_grad", "local", "init", "set_"]})
def writes_to_sharded_parameters(lib, how):
    model = lib.shard_blocks(toy())
    model(lib.batch())
    lib.resharded(model)
    with torch.no_grad():
        for p in model.parameters():
            if how == "data":
                p.data.mul_(0.5)
            elif how == "no_grad":
                p.mul_(0.5)
            elif how == "local":
                p.to_local().mul_(0.5)
            elif how == "init":
                nn.init.constant_(p, 0.25)
            else:
                p.copy_(p * 0.5)
    return model(lib.batch()), lib.full(model)


@case(torch=wrong("still"), fsdpc_does="shows sharded parameters after forward")
def an_optimizer_made_after_a_forward(lib):
    """an optimizer made from parameters() after a forward"""
    model = lib.shard_blocks(toy())
    before = {k: v.clone() for k, v in lib.full(model).items()}
    model(lib.batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, lib.batch()).backward()
    optimizer.step()
    still = [k for k, v in lib.full(model).items() if torch.equal(v, before[k])]
    assert not still, f"still as before: {still}"


@case()
def arithmetic_on_parameters(lib):
    model = lib.shard_blocks(toy())
    with torch.no_grad():
        squares = sum(p.square().sum() for p in model.parameters())
        return whole(squares), whole(torch.stack([p.norm() for p in model.parameters()]).norm())


@case()
def requires_grad_between_steps(lib):
    model = lib.shard_blocks(toy())
    found = []
    for step in range(3):
        model.zero_grad()
        lib.resharded(model)
        model.blocks[0].requires_grad_(step != 1)
        loss_of(model, lib.batch(step)).backward()
        found.append(lib.gradients(model))
    return found


@case(over={"evaluated": [None, torch.no_grad, torch.inference_mode]})
def a_parameter_unfrozen_later(lib, evaluated):
    """A parameter may be unfrozen between steps, with or without an evaluation before a step."""
    model = toy()
    model.blocks[0].requires_grad_(False)
    lib.shard_blocks(model)
    loss_of(model, lib.batch()).backward()
    model.zero_grad()
    lib.resharded(model)
    model.blocks[0].requires_grad_(True)
    if evaluated is not None:
        with evaluated():
            model(lib.batch())
    lib.backward(model, 1, 0, sync=False)
    lib.backward(model, 1, 1)
    return lib.gradients(model)


@case()
def attributes_that_the_user_set(lib):
    """Sharding may keep or drop an attribute that the user set on the plain parameter."""
    model = linear()
    model.weight.tag = "mine"
    lib.fully_shard(model)
    return getattr(model.weight, "tag", None) in (None, "mine")


test_torch, test_fsdpc = case.tests()
