"""Tests of groups of several hosts whose ranks share memory inside each host. All ranks run on one
host; the other hosts exist in name only.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable

import on_hosts
import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from toys import Reference, by_door, full_gradients, loss_of, shard_blocks, summon, tokens, toy

import fsdpc

STEPS = 3


def sent_per_step(model: torch.nn.Module, before: int) -> float:
    """Return the bytes that one host sends to the other in a step,
    as a multiple of the bytes of all padded parameters.
    """
    mine = torch.tensor([fsdpc.memory_stats(model)["sent_bytes"] - before], dtype=torch.float64)
    dist.all_reduce(mine)
    pieces = sum(unit.flat.shard.nbytes for unit in model._get_fsdp_state()._tree.units)
    return mine.item() / 2 / (pieces * dist.get_world_size())


@pytest.mark.long
@ranks(4, env=on_hosts.counted_as("aabb"))
@pytest.mark.parametrize("reshard, most", [(True, 1.5), (2, 1.0), (4, 1.5), (False, 1.0)])
def test_bytes_between_hosts_and_a_second_shard(rank, world, reshard, most):
    """No gather or reduction sends a byte to a host twice. With reshard_after_forward=2, forward
    leaves all values on the ranks of each host, and backward gathers inside the host.
    """
    model = toy(blocks=8, width=64, vocabulary=64)
    reference = Reference(model)
    shard_blocks(model, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference.master)]
    for step in range(STEPS):
        before = fsdpc.memory_stats(model).get("sent_bytes", 0)
        loss = loss_of(model, tokens(rank, step))
        weight = model.blocks[0].up.weight
        assert isinstance(weight, torch.distributed.tensor.DTensor) == bool(reshard)
        loss.backward()
        sent = sent_per_step(model, before)
        least = 0.95 if most == 1.0 else 1.1
        assert least < sent < most + 1e-9, sent
        reference.backward(tokens(rank, step))
        for (name, p), q in zip(
            model.named_parameters(), reference.master.parameters(), strict=True
        ):
            assert torch.equal(p.grad.full_tensor(), q.grad), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.master.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name
    kept = [unit.flat.keeps for unit in model._get_fsdp_state()._tree.units]
    assert any(kept) == (reshard == 2 and type(reshard) is int), kept
    report = fsdpc.memory_report(model)
    assert "gather slots" in str(report) and report.equal, str(report)


@ranks(4, env=on_hosts.counted_as("abba"))
def test_one_set_of_slots_per_host(rank, world):
    """The ranks of a host map the same memory, and the planned bytes equal the allocated bytes."""
    model = shard_blocks(toy(blocks=3))
    loss_of(model, tokens(rank, 0)).backward()
    stats, report = fsdpc.memory_stats(model), fsdpc.memory_report(model)
    reduce = next(line for line in report.lines if line.role == "reduce slots")
    assert report.equal and reduce.planned == stats["reduce_bytes"], str(report)
    found: list[list[str]] = [[]] * world
    dist.all_gather_object(found, segments())
    assert found[0] == found[3] and found[1] == found[2] and found[0] != found[1], found


class Ways(torch.nn.Module):
    """A model that runs the blocks that its input lists. If a block runs twice,
    one of its gradients arrives late.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = toy(blocks=4, width=64).blocks

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for step in way:
            if step == "!":
                x.register_hook(fails)
            else:
                x = self.blocks[int(step)](x)
        return x.pow(2).mean()


def fails(grad):
    raise ZeroDivisionError("planned")


# Each text has one word per rank: the blocks that the rank runs, in their order. In some texts, all
# ranks, the ranks of one host or single ranks leave out blocks. In some texts, one rank or all
# ranks run a block twice. With "!", backward fails while gradients of the last blocks are being
# sent.
WAYS = ["0123 0123 0123 0123", "0123 0123 01 01", "0123 01 23 3210", "0!123 0!123 0!123 0!123"]
WAYS += ["0120 0123 0123 0123", "0123 0123 0123 0123", "01230 01230 01230 01230"]
WAYS += ["3 3 3 3", "012!3 012!3 012!3 012!3", "03 03 30 30", "0123 0123 0123 0123"]


def gradients_of(model: torch.nn.Module, door: str) -> dict[str, torch.Tensor]:
    if door != "fully_shard":
        return full_gradients(model)
    found = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        found[name] = grad.full_tensor().detach()
    return found


def sends_before_the_end(model: torch.nn.Module) -> int:
    """Return how often the last backward sent sums to other hosts before it packed or reduced its
    last unit. Clear the trace.
    """
    state = model._get_fsdp_state() if hasattr(model, "_get_fsdp_state") else model
    tree = state._tree
    ops = [event["op"] for event in tree.trace()]
    tree.clear_trace()
    last = len(ops) - 1 - ops[::-1].index("pack" if "pack" in ops else "reduce")
    return ops[:last].count("send")


def sums_in_order(plain: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the sums of all ranks' gradients, added in rank order."""
    found = {}
    for name, p in plain.named_parameters():
        own = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, own)
        found[name] = functools.reduce(torch.add, grads)
    return found


def sums_over_hosts(rank: int, world: int, door: str, shards: int, pause: float) -> int:
    """Train with HYBRID sharding, where each rank runs its own blocks and is late by up to `pause`
    seconds. With one rank on each host, the sums must be equal to the bit. Return how often parts
    of sums were sent before the gradients of the last unit were complete.
    """
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("copies", "shards"))
    options = {"mesh": mesh}
    if door != "fully_shard":
        options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    plain = Ways()
    model = by_door(door, copy.deepcopy(plain), **options)
    early = 0
    for step, ways in enumerate(WAYS):
        torch.manual_seed(10 * step + rank)
        x, way = torch.randn(3, 64), ways.split()[rank]
        time.sleep(pause * torch.rand(()).item())
        if "!" in way:
            with pytest.raises(ZeroDivisionError):
                model(x, way).backward()
            model.zero_grad()
            continue
        model(x, way).backward()
        plain.zero_grad(set_to_none=False)
        plain(x, way).backward()
        wanted, found = sums_in_order(plain), gradients_of(model, door)
        early += sends_before_the_end(model)
        bits = {"rtol": 0, "atol": 0} if shards == 1 else {}
        for name, total in wanted.items():
            text = f"{name} of step {step}"
            torch.testing.assert_close(found[name], total * (1 / world), msg=text, **bits)
        if step % 3 != 1:
            model.zero_grad()
        else:
            model.zero_grad(set_to_none=False)
    report = fsdpc.memory_report(model)
    assert report.equal, str(report)
    return early


@ranks(4, env=on_hosts.counted_as("aabb"))
@pytest.mark.parametrize("door", ["flat", "original", "fully_shard"])
def test_sums_over_hosts_travel_during_backward(rank, world, door):
    """With HYBRID sharding, a host sends a unit's sum as soon as the sum is complete on this host,
    whichever blocks the ranks of each host run.
    """
    early = sums_over_hosts(rank, world, door, 2, 0.0)
    assert early > 0  # the exact number depends on how late the other rank is


@ranks(3, env=on_hosts.counted_as("abc"))
@pytest.mark.parametrize("door", ["original", "fully_shard"])
def test_sums_over_three_hosts(rank, world, door):
    """With HYBRID sharding, sums are added in the order of hosts, even if hosts are late. The sums
    equal the expected ones to the bit.
    """
    early = sums_over_hosts(rank, world, door, 1, 0.03)
    assert early > 0


class Student(Ways):
    """A model that adds the value of `other()` to its output when its own blocks have run."""

    def forward(self, x: torch.Tensor, way: str, other: Callable[[], torch.Tensor]) -> torch.Tensor:
        return super().forward(x, way) + other()


def first_weight(model: torch.nn.Module) -> torch.Tensor:
    with summon(model, writeback=False):
        return next(model.parameters()).detach().flatten()[0].clone()


@ranks(3, env={**on_hosts.counted_as("abb"), "FSDPC_TIMEOUT": "8"})
def test_a_rank_that_leaves_out_a_unit_does_not_stop_the_others_of_its_host(rank, world):
    """Rank 2 leaves out the last block. The values of this block are still being sent to its host
    when the ranks need values of the teacher, in a forward or in summon_full_params.
    """
    plain, plain_teacher = Student(), Ways()
    student = by_door("original", copy.deepcopy(plain))
    teacher = by_door("original", copy.deepcopy(plain_teacher))
    torch.manual_seed(rank)
    x = torch.randn(3, 64)
    student(x, "0123", lambda: teacher(x, "0123")).backward()
    way = "012" if rank == 2 else "0123"
    with torch.no_grad():
        found = student(x, way, lambda: teacher(x, "0123"))
        assert torch.equal(found, plain(x, way, lambda: plain_teacher(x, "0123")))
        found = student(x, way, lambda: first_weight(teacher))
        assert torch.equal(found, plain(x, way, lambda: first_of(plain_teacher)))


@ranks(2, env=on_hosts.counted_as("ab"))
def test_evaluations_of_different_lengths_raise(rank, world):
    model = by_door("original", Ways())
    x = torch.randn(3, 64)
    model(x, "0123").backward()
    with pytest.raises(fsdpc.MismatchError, match="equally many batches, also in an evaluation"):
        with torch.no_grad():
            for _ in range(2 + rank):
                model(x, "0123")
        model(x, "0123").backward()


def first_of(model: torch.nn.Module) -> torch.Tensor:
    return next(model.parameters()).flatten()[0]


def segments() -> list[str]:
    """Return the inodes of the shared memory segments that this process maps."""
    with open("/proc/self/maps", encoding="ascii") as file:
        fields = [line.split() for line in file]
    return sorted({f[4] for f in fields if f[5:6] == ["/memfd:fsdpc"]})


def refused(*arguments):
    raise OSError("no memory files here")


@ranks(3, env=on_hosts.counted_as("abb"))
def test_a_host_whose_ranks_cannot_share_memory(rank, world):
    """If the ranks of one host cannot share memory, no ranks of any host share memory, and all of
    them train by sends and receives.
    """
    from fsdpc._comm import bootstrap

    if rank == 2:
        bootstrap._try_segment = refused
    model = shard_blocks(toy())
    reference = Reference(toy())
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    assert bootstrap.comm_for_group(dist.group.WORLD).ranks_per_host == 0
    for p, q in zip(model.parameters(), reference.master.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
def test_gathers_begin_as_many_units_ahead_as_have_slots(rank, world):
    """A wire has three slots, so that gathers begin two units ahead.
    Units that are still in slots need no gather.
    """
    model = shard_blocks(toy(blocks=6))
    for step in range(2):
        if step == 1:
            model._get_fsdp_state()._tree.clear_trace()
        loss_of(model, tokens(rank, step)).backward()
    found = [
        ("begin " if event["op"] == "prefetch" else "") + event["unit"].removeprefix("blocks.")
        for event in model._get_fsdp_state()._tree.trace()
        if event["op"] == "gather" or (event["op"] == "prefetch" and event["bytes"])
    ]
    forth = "begin Toy, begin 0, begin 1, Toy, begin 2, 0, begin 3, 1, begin 4, 2, begin 5, 3, 4, 5"
    back = "5, begin 2, 4, begin 1, 3, begin 0, 2, 1, 0"
    assert ", ".join(found) == f"{forth}, {back}", found
