"""Tests of memory: the bytes that the engine reports are those of the layout, and they do not grow.

PSS (proportional set size) divides each shared page among the processes that map it. The sum of PSS
over the ranks is the memory that the host really uses: gathered weights must be in this sum once,
not once per rank.
"""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import PRECISIONS, loss_of, tokens, toy, wrap, wrap_blocks

import fsdpc
from fsdpc import _probe

PAGE = 4096
MIB = 1 << 20
BASE_SLOTS = 2  # gather slots per nesting level


def pss():
    """Return the bytes of this process, where each shared page is divided by
    the number of processes that map it.

    Pages of files are left out, because other processes that map the same libraries come and go.
    """
    with open("/proc/self/smaps_rollup") as file:
        rows = dict(line.split()[:2] for line in file if line.startswith("Pss_"))
    return (int(rows["Pss_Anon:"]) + int(rows["Pss_Shmem:"])) * 1024


def pss_of_all_ranks():
    gc.collect()
    dist.barrier()
    total = torch.tensor([float(pss())])
    dist.all_reduce(total)
    return int(total.item())


def layouts(model, world, precision):
    """Return the layout function's figures for each unit, computed from shapes and options."""
    result = []
    for unit in model._tree.units:
        specs = []
        for info, shape in zip(unit.infos, unit.shapes, strict=True):
            storage = str(precision.model).removeprefix("torch.")
            compute = str(precision.param or precision.model).removeprefix("torch.")
            reduce = str(precision.reduce or precision.param or precision.model)
            specs.append(
                (info.name, shape.numel(), storage, compute, reduce.removeprefix("torch."), True)
            )
        result.append(_probe.layout(specs, world, 64))
    return result


def pages(size):
    return -(-size // PAGE) * PAGE


@ranks(2, 3)
@pytest.mark.parametrize("precision", PRECISIONS[:2], ids=lambda p: p.name)
def test_figures_are_those_of_the_layout(rank, world, precision):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = wrap_blocks(
            "fsdpc",
            toy(blocks=5),
            sharding_strategy=strategy,
            use_orig_params=True,
            **precision.options(),
        )
        loss_of(model, tokens(rank, 0)).backward()
        stats = model._tree.memory_stats()
        root, *blocks = layouts(model, world, precision)
        assert stats["master_bytes"] == sum(part["shard_bytes"] for part in (root, *blocks))
        assert stats["grad_bytes"] == sum(part["grad_bytes"] for part in (root, *blocks))
        if strategy is ShardingStrategy.FULL_SHARD:
            slots = [root["full_bytes"], *(b["full_bytes"] for b in blocks[:BASE_SLOTS])]
        else:
            slots = [part["full_bytes"] for part in (root, *blocks)]
        assert stats["gather_slots"] == len(slots)
        assert stats["gather_bytes"] == sum(pages(size) for size in slots)
        assert stats["gather_slot_bytes"] == max(pages(size) for size in slots)
        assert stats["spare_bytes"] == 0


@ranks(2)
@pytest.mark.parametrize("no_sync", [False, True])
def test_nothing_grows_from_step_3_to_step_50(rank, world, no_sync):
    model = wrap_blocks("fsdpc", toy(blocks=4), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    figures, sizes = [], []
    for step in range(50):
        if no_sync:
            with model.no_sync():
                loss_of(model, tokens(rank, step, 1)).backward()
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            figures.append(model._tree.memory_stats())
        if step % 5 == 4:
            sizes.append(pss_of_all_ranks())
    assert all(figure == figures[0] for figure in figures), [f for f in figures if f != figures[0]][
        :2
    ]
    # Compare the smallest of several sizes, because the interpreter and the garbage collector
    # sometimes hold more memory for a moment.
    grown = (min(sizes[-4:]) - min(sizes[1:5])) / MIB
    assert grown < 4, f"grew by {grown:.2f} MiB in 25 steps"


class Large(nn.Module):
    """A module with a weight of 64 MiB and a forward that takes almost no time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, MIB))

    def forward(self, x):
        return x * self.weight[:, :4].sum()


@ranks(2)
def test_ranks_that_drift_apart_inside_no_sync_need_no_spare_memory(rank, world):
    """A rank that is one pass ahead must not take the slots of the ranks behind it."""
    model = wrap_blocks("fsdpc", toy(blocks=4), use_orig_params=True)
    for step in range(4):
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                loss = loss_of(model, tokens(rank, step, micro))
                if (step + micro) % world == rank:
                    time.sleep(0.03)
                loss.backward()
        model.zero_grad()
    assert fsdpc.memory_stats(model)["spare_count"] == 0


@ranks(2)
def test_gathered_weights_are_paid_once_per_host(rank, world):
    """An evaluation gathers 64 MiB on two ranks; together they grow by 64 MiB, not by 128."""
    torch.manual_seed(0)
    model = wrap("fsdpc", nn.Sequential(nn.Linear(2, 2), Large()), use_orig_params=True)
    seen = []
    handle = model.module[1].register_forward_hook(lambda *_: seen.append(pss_of_all_ranks()))
    before = pss_of_all_ranks()
    with torch.no_grad():
        model(torch.ones(2, 2))
    handle.remove()
    grown = (seen[0] - before) / MIB
    assert 60 < grown < 80, f"all ranks together grew by {grown:.1f} MiB for 64 MiB of weights"


@pytest.mark.long
@ranks(2)
def test_a_dropped_model_gives_its_memory_back(rank, world):
    before = pss_of_all_ranks()
    for _ in range(3):
        model = wrap("fsdpc", nn.Sequential(nn.Linear(2, 2), Large()), use_orig_params=True)
        model(torch.ones(2, 2)).sum().backward()
        del model
    left = (pss_of_all_ranks() - before) / MIB
    assert left < 32, f"{left:.1f} MiB are left of three models of 64 MiB"


@ranks(1)
def test_a_rank_alone_frees_low_precision_copies(rank, world):
    """torch uses NO_SHARD for a single rank, but the user's strategy still decides whether
    low-precision copies stay after forward.
    """
    slots = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
        options = {
            "sharding_strategy": strategy,
            "mixed_precision": fsdpc.MixedPrecision(param_dtype=torch.bfloat16),
        }
        for i in range(5):
            model[i] = fsdpc.FullyShardedDataParallel(model[i], **options)
        model = fsdpc.FullyShardedDataParallel(model, **options)
        for _ in range(2):
            model(torch.ones(2, 8)).float().sum().backward()
        slots[strategy] = fsdpc.memory_stats(model)["gather_slots"]
    assert slots == {ShardingStrategy.FULL_SHARD: BASE_SLOTS, ShardingStrategy.SHARD_GRAD_OP: 5}
