"""Tests on the simulated GPU: a step makes every wait that it needs, and no needless wait.

The tests run a real step (operators, autograd, hooks, an optimizer) many times, each time without
one of its waits of one stream for another. The simulator must report a race for each missing wait,
and nothing if no wait is missing.
"""

from __future__ import annotations

import importlib

import env
import pytest
import torch
from harness import ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import MixedPrecision, fully_shard

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
ON_GPU = env.environment() | {"FSDPC_TEST_WATCH": "1", "FSDPC_POISON": "0"}  # poison waits, too
COUNTED = ("launches", "calls", "waits", "bytes_read", "bytes_written")
POLICIES = ["lazy", "eager", "random:1", "random:2", "order:1,host,0", "order:host,1,0"]


def model(precision: str, door: str = "FSDP") -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4)]
    whole = nn.Sequential(nn.Linear(16, 16), *layers, nn.Linear(16, 4))
    if door == "fully_shard":
        low = torch.bfloat16 if precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32)
        for layer in (*layers, whole):
            fully_shard(layer, mp_policy=policy)
        return whole
    mixed = MixedPrecision(torch.bfloat16, torch.float32) if precision == "bf16" else None
    for i, layer in enumerate(layers):
        whole[1 + i] = FSDP(layer, mixed_precision=mixed)
    return FSDP(whole, mixed_precision=mixed)


class Run:
    """Training on one rank."""

    def __init__(
        self, rank: int, precision: str, door: str = "FSDP", library: str = "torch.optim"
    ) -> None:
        self.rank = rank
        self.model = model(precision, door)
        self.optimizer = importlib.import_module(library).AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        torch.manual_seed(100 * number + self.rank)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def write(self) -> None:
        """Queue work that writes the shards."""
        self.optimizer.step()


def sync_host() -> None:
    """Wait until the GPU has done all queued work."""
    import simgpu

    assert simgpu.cuda().cuCtxSynchronize() == 0


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(1, 2, env=ON_GPU)
def test_every_policy_gives_the_same_losses(rank: int, world: int, precision: str):
    import simgpu

    losses = []
    for door, policy in [*(("FSDP", each) for each in POLICIES), ("fully_shard", "lazy")]:
        simgpu.policy(policy)
        run = Run(rank, precision, door)
        losses.append([run.step(i) for i in range(4)])
    assert all(each == losses[0] for each in losses)
    assert losses[0][-1] < losses[0][0]
    assert simgpu.count()["launches"] > 0


def losses(rank: int, world: int, precision: str, door: str) -> list[float]:
    run = Run(rank, precision, door)
    return [run.step(i) for i in range(4)]


@pytest.mark.parametrize("door", ["FSDP", "fully_shard"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gpu_without_virtual_memory_gives_the_same_losses(world: int, precision: str, door: str):
    """Each slot is then a plain allocation, whose address is known at the first forward."""
    with_, without = (
        run_ranks(losses, world, env=ON_GPU | more, precision=precision, door=door)
        for more in ({}, {"SIMGPU_NO_VMM": "1"})
    )
    assert with_ == without


def cost_of_a_step(rank: int, world: int, door: str) -> dict[str, int]:
    import simgpu

    run = Run(rank, "bf16", door)
    for i in range(2):
        run.step(i)
    before = nccl_calls()
    with simgpu.counting() as cost:
        run.step(2)
    return {**cost, "calls": nccl_calls() - before}


def nccl_calls() -> int:
    """Return the number of calls that NCCL got; a group of collectives counts as one call."""
    import simgpu

    count = simgpu.nccl_count()
    kinds = ("all_gathers", "reduce_scatters", "all_reduces", "broadcasts")
    return sum(count[kind] for kind in kinds) - count["joined"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_neither_allocates_nor_waits(world: int):
    """The test runs both interfaces; ``fully_shard`` costs no more than FSDP."""
    costs = {}
    for door in ("FSDP", "fully_shard"):
        cost = costs[door] = run_ranks(cost_of_a_step, world, env=ON_GPU, door=door)[0]
        counted = ", ".join(f"{cost[name] / 5:.1f} {name}" for name in COUNTED)
        print(f"{door}, {world} ranks, bf16, per unit and step: {counted}")
        for name in ("host_syncs", "allocations", "host_allocations", "maps", "events_created"):
            assert cost[name] == 0, (door, cost)
    flat, rows = costs["FSDP"], costs["fully_shard"]
    assert all(rows[name] <= flat[name] for name in ("launches", "calls", "waits")), costs
    for name in ("bytes_read", "bytes_written"):
        assert rows[name] <= 1.05 * flat[name], costs


def name_memory(model: nn.Module) -> None:
    import simgpu

    for name, parameter in model.named_parameters():
        for what, tensor in (("shard", parameter.detach()), ("gradient", parameter.grad)):
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if tensor is not None and tensor.numel():
                simgpu.label(tensor, f"{what} of {name}")


def leave_out_each_wait(
    rank: int,
    world: int,
    precision: str,
    door: str,
    library: str = "torch.optim",
    made: type[Run] = Run,
) -> list[tuple[str, list[str]]]:
    """Return the races that the simulator reports: first for a step with all its waits, then for
    steps that each lack one wait. Only rank 0 leaves waits out.
    """
    import simgpu

    simgpu.policy("lazy")  # the simulator runs work late if nothing waits for it
    simgpu.options().quiet = True
    run = made(rank, precision, door, library)
    for i in range(2):
        run.step(i)
    name_memory(run.model)
    sync_host()
    before = simgpu.calls("cuStreamWaitEvent")
    run.step(2)
    waits = simgpu.calls("cuStreamWaitEvent") - before
    found = [("none", simgpu.take_reports())]
    for k in range(1, waits + 1):
        sync_host()
        run.write()  # without new values of the shards, the first gather has nothing to wait for
        if rank == 0:
            simgpu.skip_wait(k)
        run.step(2 + k)
        assert simgpu.drain()
        found.append((f"{k} of {waits}", simgpu.take_reports()))
    return found


@pytest.mark.parametrize(
    "world, precision, door",
    [
        (1, "fp32", "FSDP"),
        (1, "bf16", "FSDP"),
        (2, "fp32", "FSDP"),
        (2, "bf16", "FSDP"),
        (2, "bf16", "fully_shard"),
    ],
)
def test_each_wait_that_is_left_out_is_found(world: int, precision: str, door: str):
    found = run_ranks(leave_out_each_wait, world, env=ON_GPU, precision=precision, door=door)[0]
    for which, reports in found:
        print(
            f"{door}, {world} ranks, {precision}, wait left out: {which}: {(reports or ['-'])[0]}"
        )
    assert found[0][1] == []
    # A single rank in fp32 casts no parameters, so that its step has few waits.
    assert (len(found) > 6) == (world > 1 or precision != "fp32")
    assert [which for which, reports in found[1:] if not reports] == []
