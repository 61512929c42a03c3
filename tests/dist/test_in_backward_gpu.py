"""Tests of fsdpc.optim.in_backward on the simulated GPU. Steps are queued during backward and need
no host synchronization. Their results equal those of steps after backward to the bit. If a test
leaves out a wait, the simulator reports a race.
"""

from __future__ import annotations

import os
from typing import Any

import env
import pytest
import torch
from harness import ranks, run_ranks
from test_device_waits import COUNTED, ON_GPU, Run, leave_out_each_wait, nccl_calls
from test_optim_in_backward import MAKERS, same, train
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from toys import Block, by_door, toy

import fsdpc
from fsdpc import optim
from fsdpc.activations import checkpoint as checkpoint_blocks

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))


class Inside(Run):
    """The training of test_device_waits.py, but with steps in backward unless ``library`` is
    "after".
    """

    def __init__(self, rank: int, precision: str, door: str = "FSDP", library: str = "") -> None:
        super().__init__(rank, precision, door, "fsdpc.optim")
        host = optim.Host(0.5, 1 << 20) if library == "host" else None
        if library != "after":
            self.optimizer = optim.in_backward(
                self.model, lambda p: optim.AdamW(p, lr=1e-2, offload=host)
            )

    @torch.no_grad()
    def write(self) -> None:
        for param in self.model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.mul_(1.0)


@ranks(1, 2, env=ON_GPU)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_equals_steps_after_backward(rank: int, world: int, door: str):
    import simgpu

    for policy, make in zip(("lazy", "eager", "random:1"), MAKERS.values(), strict=True):
        simgpu.policy(policy)
        expected = by_door(door, toy())
        outside = make(expected.named_parameters())
        model = by_door(door, toy())
        inside = optim.in_backward(model, make)
        train(expected, outside, rank)
        train(model, inside, rank)
        assert all(p.grad is None for p in model.parameters())
        same(model, expected)
    assert simgpu.take_reports() == []


@ranks(1, 2, env=ON_GPU)
def test_offloaded_units_beside_units_on_the_gpu(rank: int, world: int):
    import simgpu

    ends = []
    for within in (False, True):
        model = toy()
        for i, block in enumerate(model.blocks):
            policy = CPUOffloadPolicy() if i % 2 else OffloadPolicy()
            fsdpc.fully_shard(block, offload_policy=policy)
        model = fsdpc.fully_shard(model)
        make = MAKERS["AdamW"]
        optimizer = optim.in_backward(model, make) if within else make(model.named_parameters())
        train(model, optimizer, rank)
        ends.append(model)
    same(ends[1], ends[0])
    assert simgpu.take_reports() == []


ALL = (["01"] * 5, [0, 1, 2, 3, 4])


class Partial(nn.Module):
    """A model of blocks with two layers each. ``which`` has, for each block, the numbers of the
    layers that run.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(5)]
        self.blocks = nn.ModuleList(Pair(pair) for pair in pairs)

    def forward(self, x: torch.Tensor, which: list[str], order: list[int]) -> torch.Tensor:
        for i in order:
            x = self.blocks[i](x, which[i])
        return x.square().sum()


class Pair(nn.Module):
    def __init__(self, pair: nn.ModuleList) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        for i in which:
            x = torch.tanh(self.pair[int(i)](x))
        return x


@ranks(1, 2, env=ON_GPU)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_parameters_and_modules_that_are_not_used(rank: int, world: int, door: str):
    """A unit with parameters that a rank left unused steps when backward has ended; the other units
    step before the end. A parameter that no rank used keeps its value and its states.
    """
    import simgpu

    own = "01"[rank]
    programs = [
        ALL,
        (["01" if rank == 0 else "0"] + ["01"] * 4, [0, 1, 2, 3, 4]),
        (["01", "01", own, own, "01"], [0, 1, 2, 3, 4]),
        (["01", "0", "01", "01", "01"], [0, 1, 2, 4]),
        (["0"] * 5, [4, 2, 1, 0, 3]),
        (["01" if rank == 1 else "1", "01", "0", "01", own], [0, 1, 2, 3, 4]),
        ALL,
    ]
    ends = []
    for within in (False, True):
        model = by_door(door, Partial())
        optimizer = (
            optim.in_backward(model, MAKERS["AdamW"])
            if within
            else MAKERS["AdamW"](model.named_parameters())
        )
        for step, (which, order) in enumerate(programs):
            model(torch.full((2, 4), step + 1.0) + rank, which, order).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    same(ends[1][0], ends[0][0])
    steps = [sorted(float(s["step"]) for s in o.state.values()) for _, o in ends]
    assert steps[0] == steps[1] and len(set(steps[0])) > 1, steps
    assert simgpu.take_reports() == []


@ranks(2, env=ON_GPU)
@pytest.mark.parametrize("slots", [1, 3])
def test_other_numbers_of_reduce_slots(rank: int, world: int, slots: int):
    import simgpu

    os.environ["FSDPC_REDUCE_SLOTS"] = str(slots)
    expected, model = by_door("fully_shard", Partial()), by_door("fully_shard", Partial())
    outside = MAKERS["AdamW"](expected.named_parameters())
    inside = optim.in_backward(model, MAKERS["AdamW"])
    for each, its in ((expected, outside), (model, inside)):
        for step in range(3):
            each(torch.full((2, 4), step + 1.0) + rank, *ALL).backward()
            its.step()
            its.zero_grad()
    same(model, expected)
    assert simgpu.take_reports() == []


@ranks(1, 2, env=ON_GPU)
def test_after_a_backward_that_raised(rank: int, world: int):
    """The backward raises an error after some units have stepped. Later backwards step all units,
    and a hook of a parameter still sees the gradient.
    """
    import simgpu

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    model = by_door("fully_shard", Partial())
    inside = optim.in_backward(model, MAKERS["AdamW"])
    seen: list[bool] = []
    watched = model.blocks[3].pair[0].weight
    watched.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for step in range(3):
        x = torch.full((2, 4), step + 1.0) + rank
        if step == 1:
            hook = model.blocks[1].register_full_backward_pre_hook(fail)
            with pytest.raises(ValueError, match="planted"):
                model(x, *ALL).backward()
            hook.remove()
        else:
            model(x, *ALL).backward()
        inside.step()
        inside.zero_grad()
    steps = [inside.state[next(block.parameters())]["step"] for block in model.blocks]
    stepped = 3 if world == 1 else 1  # before the error: blocks 4, 3 and 2, or only block 4
    assert steps == [2] * (5 - stepped) + [3] * stepped
    assert len(seen) == (3 if world == 1 else 2) and all(seen)
    assert simgpu.take_reports() == []


@ranks(1, 2, env=ON_GPU)
def test_units_step_before_backward_ends(rank: int, world: int):
    """On several ranks, two units have not stepped when the first block's backward begins: their
    sums are still in reduce slots.
    """
    model = by_door("fully_shard", Partial())
    optimizer = optim.in_backward(model, MAKERS["AdamW"])
    seen: list[int] = []
    firsts = [next(block.parameters()) for block in model.blocks]
    model.blocks[0].register_full_backward_pre_hook(
        lambda *_: seen.append(sum(first in optimizer.state for first in firsts))
    )
    model(torch.ones(2, 4), *ALL).backward()
    assert seen == [4 if world == 1 else 2]


def cost(rank: int, world: int, library: str) -> dict[str, Any]:
    import simgpu

    run = Inside(rank, "bf16", "FSDP", library)
    for i in range(2):
        run.step(i)
    before = nccl_calls()
    with simgpu.counting() as found:
        loss = run.step(2)
    return {**found, "calls": nccl_calls() - before, "loss": loss}


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_neither_waits_nor_allocates(world: int):
    """Steps in backward need two kernel launches for each unit, instead of two for all units. They
    need as many stream waits as steps after backward.
    """
    after, inside, host = (
        run_ranks(cost, world, env=ON_GPU, library=each)[0] for each in ("after", "inside", "host")
    )
    for found in (after, inside, host):
        print({name: found[name] for name in COUNTED})
        for name in ("host_syncs", "allocations", "host_allocations", "maps", "events_created"):
            assert found[name] == 0, (name, found)
        assert found["loss"] == after["loss"]
    for name in ("calls", "waits"):
        assert inside[name] == after[name]
    units = 5
    assert inside["launches"] == after["launches"] + 2 * (units - 1)


@pytest.mark.parametrize(
    "world, precision, door", [(1, "bf16", "FSDP"), (2, "fp32", "fully_shard")]
)
def test_each_wait_that_is_left_out_is_found(world: int, precision: str, door: str):
    found = run_ranks(each_wait, world, env=ON_GPU, precision=precision, door=door)[0]
    print(found)
    assert found[0][1] == []
    assert [which for which, reports in found[1:] if not reports] == []
    assert len(found) > 6
    if world > 1:
        assert any("fsdpc_cuda_step" in text for _, reports in found for text in reports), found


def each_wait(rank: int, world: int, precision: str, door: str) -> Any:
    return leave_out_each_wait(rank, world, precision, door, made=Inside)


@ranks(1, 2, env=ON_GPU)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_frozen_and_checkpointed_blocks_with_states_in_host_memory(
    rank: int, world: int, door: str
):
    """One block is frozen and later trained; every second block is recomputed."""
    import simgpu

    ends = []
    host = optim.Host(0.5, 1 << 20)
    for within in (False, True):
        simgpu.policy("lazy" if within else "eager")
        model = toy()
        model.blocks[0].requires_grad_(False)
        checkpoint_blocks(model, ratio="1/2", blocks=Block)
        model = by_door(door, model)

        def make(p: Any) -> Any:
            return optim.AdamW(p, lr=1e-2, eps=1e-3, offload=host)

        optimizer = optim.in_backward(model, make) if within else make(model.named_parameters())
        for step in range(4):
            if step == 2:
                for param in model.parameters():
                    param.requires_grad_(True)
            train(model, optimizer, rank, range(step, step + 1))
        ends.append((model, optimizer))
    same(ends[1][0], ends[0][0])
    states = [o.state_dict()["state"] for _, o in ends]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        for name, value in state.items():
            local, theirs = (
                v.to_local() if isinstance(v, DTensor) else v
                for v in (value, states[1][number][name])
            )
            assert torch.equal(local, theirs), (number, name)
    assert simgpu.take_reports() == []
