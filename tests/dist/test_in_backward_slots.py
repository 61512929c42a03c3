"""Tests of fsdpc.optim.in_backward on the simulated GPU:
the gradients of all units share the memory of a few units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import env
import pytest
import simgpu
import torch
from harness import ranks
from test_allocator import Cache
from test_in_backward_gpu import ALL, Partial
from test_optim_in_backward import same
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.tensor import DTensor
from toys import by_door, toy

import fsdpc
from fsdpc import _C, optim
from fsdpc._engine.writeback import owner_of
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import Model
from fsdpc.plan.sources.held import setup_of
from fsdpc.plan.sources.modules import units_of_tree

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()
LAYERS, WIDE = 8, 67  # WIDE is odd, so that shards are padded


def block(narrow: bool) -> nn.Module:
    if narrow:
        return nn.Sequential(nn.Linear(WIDE, 30), nn.Linear(30, WIDE))
    return nn.Linear(WIDE, WIDE)


class Even(nn.Module):
    """A model of equal blocks, which run in the order ``order``. With ``mixed``,
    every second block is of another kind.
    """

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(mixed and i % 2 == 1) for i in range(LAYERS))
        self.order = range(LAYERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.blocks[i](x))
        return x.square().sum()


def adamw(params: Any) -> Any:
    return optim.AdamW(params, lr=1e-2, eps=1e-3)


def units_of(model: nn.Module) -> list[Any]:
    return list({id(u): u for u in map(owner_of, model.parameters()) if u is not None}.values())


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    model(torch.full((2, WIDE), 0.1 * number) + rank).backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(1, 2, env=GPU)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("early", [True, False])
def test_gradients_take_the_memory_of_a_few_units(rank: int, world: int, door: str, early: bool):
    """On one rank, gradients take the memory of one unit; on several ranks, that of one unit per
    reduce slot. A step allocates no memory.
    """
    cache = Cache()
    _C.Comm.self_(0)
    cache.serve()
    model = by_door(door, Even())
    before = cache.out()
    plain = adamw(model.named_parameters())
    if not early:
        step(model, plain, rank, 0)
    optimizer = optim.in_backward(model, adamw)
    calls = 0
    for number in range(4):
        step(model, optimizer, rank, number)
        if number > 0:
            assert cache.calls.total() == calls, "an allocation in a step"
        calls = cache.calls.total()
    units = [unit for unit in units_of(model) if any(unit.trainable)]
    own = units[0].flat.grad.nbytes
    slots = 1 if world == 1 else 2
    stats = fsdpc.memory_stats(model)
    assert stats["grad_bytes"] == slots * own < LAYERS * own
    # Slots replace the gradients of the units; all other memory is as before.
    assert cache.out() <= before - (LAYERS - slots) * own + 2000
    report = fsdpc.memory_report(model)
    assert report.equal, str(report)
    anyhow = tuple(replace(unit, inside=None) for unit in units_of_tree(units[0].tree))
    setup = replace(setup_of(units[0].groups.shard, None, False), in_backward=True)
    planned = plan(Model("even", anyhow), setup)
    assert planned.row("gradient shards") == slots * own
    assert ("take in turn" in str(planned.rows)) and simgpu.take_reports() == []


@ranks(1, 2, env=GPU)
@pytest.mark.parametrize("low", [False, True])
def test_units_in_any_order(rank: int, world: int, low: bool):
    """Units run in a new order in each step. With `low`, the optimizer gets gradients in another
    dtype than that of the sums. Padding keeps its values.
    """

    def made() -> nn.Module:
        mixed = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
        if not low:
            return by_door("flat", Even(True))
        return by_door("orig", Even(True).bfloat16(), mixed_precision=mixed)

    expected, model = made(), made()
    outside, inside = adamw(expected.named_parameters()), optim.in_backward(model, adamw)
    held = 0
    for number in range(5):
        order = torch.randperm(LAYERS, generator=torch.Generator().manual_seed(number)).tolist()
        for each, its in ((expected, outside), (model, inside)):
            each.module.order = order
            step(each, its, rank, number)
        assert held in (0, fsdpc.memory_stats(model)["grad_bytes"])
        held = fsdpc.memory_stats(model)["grad_bytes"]
    assert fsdpc.memory_report(model).equal
    same(model, expected)
    for one, other in zip(units_of(model), units_of(expected), strict=True):
        assert torch.equal(*(torch.from_numpy(u.flat.shard) for u in (one, other)))  # with padding
    assert simgpu.take_reports() == []


@ranks(1, 2, env=GPU)
def test_gradients_that_wait_for_the_end_of_backward(rank: int, world: int):
    """A unit with parameters that a rank left unused keeps its gradient until backward ends."""
    first = ["01", "0", "01", "0", "01"]
    expected, model = by_door("fully_shard", Partial()), by_door("fully_shard", Partial())
    outside, inside = adamw(expected.named_parameters()), optim.in_backward(model, adamw)
    sizes = []
    for number, which in enumerate((ALL[0], first, first, ALL[0])):
        for each, its in ((expected, outside), (model, inside)):
            each(torch.full((2, 4), number + 1.0) + rank, which, ALL[1]).backward()
            its.step()
            its.zero_grad()
        sizes.append(fsdpc.memory_stats(model)["grad_bytes"])
    same(model, expected)
    own = units_of(model)[0].flat.grad.nbytes
    assert sizes == [own] * 4 if world == 1 else sizes == [2 * own, 3 * own, 3 * own, 3 * own]
    assert simgpu.take_reports() == []


def local_of(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


@ranks(1, 2, env=GPU)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("how", ["object", "view", "detached"])
def test_gradients_that_the_program_keeps(rank: int, world: int, door: str, how: str):
    """If a hook keeps the gradients of one unit, no other unit writes into these gradients."""
    take = {
        "object": lambda g: g,
        "view": lambda g: local_of(g).view(-1)[1:],
        "detached": lambda g: local_of(g).detach(),
    }[how]
    model = by_door(door, Even())
    optimizer = optim.in_backward(model, adamw)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(param: nn.Parameter) -> None:
        if param.grad is not None and local_of(param.grad).numel() > 1:
            taken = take(param.grad)
            kept.append((taken, local_of(taken).clone()))

    own = units_of(model)[0].flat.grad.nbytes
    for each in units_of(model)[5].shard_params:
        each.register_post_accumulate_grad_hook(keep)
    for number in range(3):
        step(model, optimizer, rank, number)
        assert kept or world > 1
        # A kept object keeps its values for ever. A view or a detached tensor keeps its values
        # until the unit's next backward.
        for taken, values in kept if how == "object" else kept[-1:]:
            assert torch.equal(local_of(taken), values), number
        if how != "object":
            del kept[:-1]
    slots = 1 if world == 1 else 2
    assert fsdpc.memory_stats(model)["grad_bytes"] <= (slots + 1) * own
    assert simgpu.take_reports() == []


@ranks(1, 2, env=GPU)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_a_gradient_that_the_program_keeps_outlives_an_unfreezing(rank: int, world: int, door: str):
    ends = []
    for within in (False, True):
        model = Even()
        model.blocks[6].bias.requires_grad_(False)
        model = by_door(door, model)
        optimizer = optim.in_backward(model, adamw) if within else adamw(model.named_parameters())
        weight, bias = units_of(model)[6].shard_params
        kept: list[Any] = []
        weight.register_post_accumulate_grad_hook(lambda p, kept=kept: kept.append(p.grad))
        for number in range(4):
            if number == 2:
                bias.requires_grad_(True)
            step(model, optimizer, rank, number)
        ends.append((model, [local_of(g).clone() for g in kept if g is not None]))
    same(ends[1][0], ends[0][0])
    for one, other in zip(*(grads for _, grads in ends), strict=True):
        assert torch.equal(one, other)
    assert simgpu.take_reports() == []


@ranks(1, 2, env=GPU)
def test_gradients_that_the_user_assigns(rank: int, world: int):
    """Assigned gradients are added to those of backward, also for modules that do not run."""
    expected, model = by_door("orig", Even()), by_door("orig", Even())
    outside, inside = adamw(expected.named_parameters()), optim.in_backward(model, adamw)
    for number in range(3):
        for each, its in ((expected, outside), (model, inside)):
            each.module.order = range(5) if number == 1 else range(LAYERS)
            for i, param in enumerate(each.parameters()):
                if number and param.numel():
                    param.grad = torch.full_like(param, 0.01 * i)
            step(each, its, rank, number)
    same(model, expected)
    assert simgpu.take_reports() == []


@ranks(1, env=GPU)
def test_a_unit_that_finds_no_memory_is_named(rank: int, world: int):
    """If there is no memory for the slots, the error names the slots.

    If the program keeps the gradient of a unit, the next unit in backward needs new memory. If
    there is none, the error names this next unit.
    """
    cache = Cache()
    _C.Comm.self_(0)
    cache.serve()
    model = by_door("fully_shard", Even())
    plain = adamw(model.parameters())
    step(model, plain, rank, 0)
    cache.full = True
    with pytest.raises(torch.OutOfMemoryError, match="gradients of units that step in backward"):
        optim.in_backward(model, adamw)
    cache.full = False
    step(model, plain, rank, 0)
    for unit in units_of(model):
        unit.stepper = None
    optimizer = optim.in_backward(model, adamw)
    step(model, optimizer, rank, 0)
    kept: list[Any] = []
    watched = next(model.blocks[6].parameters())
    watched.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    cache.full = True
    with pytest.raises(torch.OutOfMemoryError, match=r"gradients of unit blocks\.5: .*capacity"):
        model(torch.ones(2, WIDE)).backward()
    cache.full = False
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, rank, 2)
    assert len(kept) == 2


@ranks(1, 2, env=GPU)
def test_models_without_enough_units_keep_their_own(rank: int, world: int):
    model = by_door("orig", toy())
    before = sum(unit.flat.grad.nbytes for unit in units_of(model))
    optimizer = optim.in_backward(model, adamw)
    small = fsdpc.FullyShardedDataParallel(nn.Linear(64, 64), use_orig_params=True)
    alone = optim.in_backward(small, adamw)
    own = units_of(small)[0].flat.grad.nbytes
    small(torch.ones(2, 64)).sum().backward()
    alone.step()
    assert fsdpc.memory_stats(small)["grad_bytes"] == own
    assert optimizer is not None and before > 0
    assert fsdpc.memory_report(small).equal
