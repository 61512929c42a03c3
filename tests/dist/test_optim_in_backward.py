"""Tests of fsdpc.optim.in_backward: units step in backward,
with results equal to steps after backward to the bit.
"""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import (
    Block,
    by_door,
    full_parameters,
    loss_of,
    no_sync_if,
    shard_blocks,
    tokens,
    toy,
    wrap_blocks,
)

import fsdpc
from fsdpc import _C, optim
from fsdpc._engine.writeback import owner_of
from fsdpc.activations import checkpoint as checkpoint_blocks

STEPS = 3
REFUSED = r"clipping of unit .*, whose optimizer steps in backward and leaves no gradient"
MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "AdamWBF16": lambda p: optim.AdamWBF16(p, lr=1e-2, eps=1e-3),
}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, fsdpc.FullyShardedDataParallel):
        return full_parameters(model)
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def train(model: nn.Module, optimizer: Any, rank: int, steps: range = range(STEPS)) -> None:
    for step in steps:
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = values_of(found), values_of(expected)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@ranks(1, 2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("collectives", ["shm", "wire"])
def test_equals_steps_after_backward(rank, world, door, collectives):
    os.environ["FSDPC_COLLECTIVES"] = collectives
    for make in MAKERS.values():
        expected = by_door(door, toy())
        outside = make(expected.named_parameters())
        model = by_door(door, toy())
        optimizer = optim.in_backward(model, make)
        train(expected, outside, rank)
        train(model, optimizer, rank)
        assert all(p.grad is None for p in model.parameters())
        same(model, expected)
        resumed = by_door(door, toy())
        with torch.no_grad():
            for mine, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        again = optim.in_backward(resumed, make)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its in ((expected, outside), (resumed, again)):
            train(each, its, rank, range(STEPS, STEPS + 1))
        same(resumed, expected)


@ranks(2)
def test_checkpoint_on_disk(rank, world, tmp_path):
    """An optimizer that steps in backward saves; another, which steps after backward, loads."""
    folder = str(tmp_path / "saved")
    model = by_door("fully_shard", toy())
    optimizer = optim.in_backward(model, MAKERS["AdamW"])
    train(model, optimizer, rank)
    fsdpc.checkpoint.save(folder, model, optimizer)
    loaded = by_door("fully_shard", toy())
    other = MAKERS["AdamW"](loaded.parameters())
    fsdpc.checkpoint.load(folder, loaded, other)
    for each, its in ((model, optimizer), (loaded, other)):
        train(each, its, rank, range(STEPS, STEPS + 1))
    same(loaded, model)


@ranks(1)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_a_unit_steps_before_backward_ends(rank, world, door):
    model = by_door(door, toy())
    optimizer = optim.in_backward(model, MAKERS["AdamW"])
    seen: list[int] = []
    last, first = model.blocks[-1], model.blocks[0]
    theirs = list(last.parameters())
    first.register_full_backward_pre_hook(
        lambda *_: seen.append(sum(p in optimizer.state for p in theirs))
    )
    loss_of(model, tokens(rank, 0)).backward()
    assert seen == [len(theirs)]


class Wide(nn.Module):
    """A model of four units with 8 MiB of float32 parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)[:, :1024]
        return x.sum()


def resident(tensor: torch.Tensor) -> int:
    """Return how many bytes of the tensor's memory have physical pages."""
    begin, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(begin // mmap.PAGESIZE * 8)
        entries = memoryview(file.read(length // mmap.PAGESIZE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


@pytest.mark.long
@ranks(1, 2)
def test_memory_of_gradients_is_given_up(rank, world):
    for inside in (False, True):
        model = by_door("fully_shard", Wide())
        make = MAKERS["SGD"]
        optimizer = optim.in_backward(model, make) if inside else make(model.parameters())
        units = [owner_of(param) for param in model.parameters()]
        for _ in range(2):
            model(torch.ones(2, 1024)).backward()
            found = [resident(torch.from_numpy(unit.flat.grad)) for unit in units]
            size = units[0].flat.grad.nbytes
            assert size == (8 << 20) // world
            assert found == [0 if inside else size] * 4
            optimizer.step()
            optimizer.zero_grad()


@ranks(1, 2)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_memory_of_gradients_that_the_program_views_stays(rank, world, door):
    model = by_door(door, toy())
    optim.in_backward(model, MAKERS["AdamW"])
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(param: torch.Tensor) -> None:
        grad = param.grad.to_local() if door == "fully_shard" else param.grad
        kept.append((grad.view(-1), grad.flatten().clone()))

    for param in model.blocks[-1].parameters():
        param.register_post_accumulate_grad_hook(keep)
    loss_of(model, tokens(rank, 0)).backward()
    assert any(values.count_nonzero() for _, values in kept)
    assert all(torch.equal(view, values) for view, values in kept)


@ranks(2)
def test_what_is_refused(rank, world):
    model = by_door("orig", toy())
    with pytest.raises(TypeError, match=r"needs an optimizer of fsdpc\.optim, got AdamW"):
        optim.in_backward(model, lambda p: torch.optim.AdamW(p))
    with pytest.raises(NotImplementedError, match="AdamMini communicates"):
        optim.in_backward(model, lambda p: optim.AdamMini(p, block=lambda *_: 3))
    with pytest.raises(NotImplementedError, match="parameter of shape .* belongs to no unit"):
        optim.in_backward(model, lambda p: optim.SGD([nn.Parameter(torch.ones(2))]))
    optimizer = optim.in_backward(model, MAKERS["AdamW"])
    with pytest.raises(NotImplementedError, match="already has an optimizer"):
        optim.in_backward(model, MAKERS["AdamW"])
    with pytest.raises(RuntimeError, match="clipping by the norm"):
        optimizer.step_and_clip(1.0)
    loss_of(model, tokens(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"second backward before optimizer\.step"):
        loss_of(model, tokens(rank, 1)).backward()
    replicas = by_door("orig", toy())
    optim.in_backward(replicas, MAKERS["AdamW"])
    with (
        no_sync_if(replicas, True),
        pytest.raises(RuntimeError, match="runs under no_sync"),
    ):
        loss_of(replicas, tokens(rank, 0)).backward()
    low = wrap_blocks(
        "fsdpc",
        toy(),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        process_group=(dist.new_subgroups(1)[0], dist.group.WORLD),
    )
    with pytest.raises(NotImplementedError, match="has replicas"):
        optim.in_backward(low, MAKERS["AdamW"])


@ranks(1, 2, alone=True)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_clipping_after_backward_is_refused(rank, world, door):
    """No gradient is left after backward, so torch's functions would clip nothing and report a norm
    of 0.
    """
    model, plain = by_door(door, toy()), toy()
    before = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = optim.in_backward(model, MAKERS["AdamW"])
    loss_of(model, tokens(rank, 0)).backward()
    loss_of(plain, tokens(rank, 0)).backward()
    names = torch.nn.utils
    with pytest.raises(RuntimeError, match=REFUSED):
        names.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=REFUSED):
        names.clip_grads_with_norm_((p for p in model.parameters()), 1.0, before)
    with pytest.raises(RuntimeError, match=REFUSED):
        names.clip_grad_value_(model.parameters(), 1.0)
    if door != "fully_shard":
        with pytest.raises(RuntimeError, match=REFUSED):
            model.clip_grad_norm_(1.0)
    optimizer.step()
    assert names.clip_grad_norm_(plain.parameters(), 1e-3) > 1e-3
    assert names.get_total_norm([p.grad for p in plain.parameters()]) < 1.1e-3
    names.clip_grad_value_((p for p in plain.parameters()), 1e-6)
    assert all((p.grad.abs() <= 1e-6).all() for p in plain.parameters())


class Again(nn.Module):
    """A model whose second block runs twice in one graph. With ``pick``, only the block of this
    number runs, and only once. With ``reentrant``, each run has a separate backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.pick: int | None = None
        self.reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pick is not None:
            return self.blocks[self.pick](x).sum()
        if self.reentrant:
            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(self.blocks[1], x, use_reentrant=True)
            return x.sum()
        kept = self.blocks[1](self.blocks[0](x))
        return kept.sum() + self.blocks[1](kept.detach()).sum()


def again() -> nn.Module:
    torch.manual_seed(0)
    return shard_blocks(Again())


@ranks(1, 2)
def test_low_precision_and_modules_that_run_twice_or_on_some_ranks(rank, world):
    def low() -> nn.Module:
        torch.manual_seed(0)
        mixed = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
        return wrap_blocks("fsdpc", toy(), use_orig_params=True, mixed_precision=mixed)

    for built in (low, again):
        expected, model = built(), built()
        outside = MAKERS["AdamW"](expected.parameters())
        inside = optim.in_backward(model, MAKERS["AdamW"])
        for each, its in ((expected, outside), (model, inside)):
            for step in range(STEPS):
                each.pick = rank if step == 1 else None
                batch = tokens(rank, step) if built is low else torch.full((2, 4), step + 1.0)
                (loss_of(each, batch) if built is low else each(batch)).backward()
                its.step()
                its.zero_grad()
        same(model, expected)


@ranks(1, 2)
def test_a_unit_that_is_needed_again_after_its_step(rank, world):
    """If backward needs a unit whose step has run, backward raises an error. A unit that has not
    stepped yet gets correct gradients.
    """
    expected, model = again(), again()
    outside = MAKERS["AdamW"](expected.parameters())
    optim.in_backward(model, MAKERS["AdamW"])
    expected.reentrant = model.reentrant = True
    expected(torch.ones(2, 4)).backward()
    outside.step()
    with pytest.raises(_C.StateError, match="unit blocks.1 is needed again in a backward"):
        model(torch.ones(2, 4)).backward()


@ranks(1, 2)
def test_a_forward_in_backward_of_a_unit_that_has_stepped(rank, world):
    """A forward inside backward raises an error if its unit has stepped: it would read the new
    values of the unit, but with a step after backward it would read the old values.
    """
    model = again()
    optim.in_backward(model, MAKERS["AdamW"])
    x = torch.ones(2, 4, requires_grad=True)
    x.register_hook(lambda grad: model.blocks[1](x.detach()).sum())
    with pytest.raises(_C.StateError, match="unit blocks.1 is needed again in a backward"):
        model(x).backward()


@ranks(2)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_frozen_and_checkpointed_blocks_with_states_on_a_disk(rank, world, door, tmp_path):
    """One block is frozen and later trained; every second block is recomputed."""
    ends = []
    for make in (
        lambda model: MAKERS["AdamW"](model.named_parameters()),
        lambda model: optim.in_backward(
            model,
            lambda p: optim.AdamW(p, lr=1e-2, eps=1e-3, offload=optim.Disk(tmp_path, 400_000)),
        ),
    ):
        model = toy()
        model.blocks[0].requires_grad_(False)
        checkpoint_blocks(model, ratio="1/2", blocks=Block)
        model = by_door(door, model)
        optimizer = make(model)
        for step in range(4):
            if step == 2:
                for param in model.parameters():
                    param.requires_grad_(True)
            train(model, optimizer, rank, range(step, step + 1))
        ends.append(model)
    same(*ends)
