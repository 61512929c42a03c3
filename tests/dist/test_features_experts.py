"""Tests of units that run only on some ranks: a mixture of experts that routes by data.

torch's FSDP trains such a model on silently wrong gradients or hangs. Here the result must equal
that of the unsharded model to the bit, whichever experts each rank runs and in whichever order.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from toys import (
    PRECISIONS,
    Block,
    Reference,
    check_equal,
    check_gradients,
    check_parameters,
    compare_training,
    full_parameters,
    sharding_groups,
    wrap_blocks,
)

import fsdpc
from fsdpc.wrap import ModuleWrapPolicy

WIDTH, ROWS = 6, 7


class Experts(nn.Module):
    """A layer of experts. ``forward(x, choice, order)`` runs the experts in the order ``order``;
    row i goes through expert ``choice[i]``, or through no expert if ``choice[i]`` is -1.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(WIDTH) for _ in range(count))

    def forward(self, x, choice, order):
        out = x * 0.5
        for e in order:
            rows = (choice == e).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, self.experts[e](x[rows]).to(out.dtype))
        return out


class Mixture(nn.Module):
    def __init__(self, count: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Experts(count) for _ in range(layers))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        x = self.enter(batch["x"].to(self.enter.weight.dtype))
        for layer, choice, order in zip(self.layers, batch["choice"], batch["order"], strict=True):
            x = layer(x, choice, order)
        return self.leave(x)


def mixture(**sizes):
    torch.manual_seed(0)
    return Mixture(**sizes)


def loss_of(model, batch):
    return model(batch).float().square().mean()


def batch_with(seed, choices, orders):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "order": orders,
        "choice": [torch.as_tensor(c) for c in choices],
    }


ROUTES = {  # (rank, step) -> expert of each row
    "each_rank_its_own": lambda rank, step: [rank] * ROWS,
    "only_rank_0": lambda rank, step: [0, 1, 2, 3, 0, 1, 2] if rank == 0 else [-1] * ROWS,
    "only_the_last_rank_alternates": lambda rank, step: [step % 4] * ROWS
    if rank == dist.get_world_size() - 1
    else [-1] * ROWS,
    "nobody": lambda rank, step: [-1] * ROWS,
    "everyone_overlapping": lambda rank, step: [(rank + i + step) % 3 for i in range(ROWS)],
}


@ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_routes(rank, world, engine, route, use_orig_params):
    for strategy in (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ):
        compare_training(
            engine,
            mixture(),
            lambda m, strategy=strategy: wrap_blocks(
                engine, m, sharding_strategy=strategy, use_orig_params=use_orig_params
            ),
            lambda step: batch_with(10 * step + rank, [ROUTES[route](rank, step)], [[0, 1, 2, 3]]),
            loss_of=loss_of,
            groups=sharding_groups(strategy, world),
        )


@ranks(2, 4)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
def test_ranks_run_experts_in_different_orders(rank, world, engine, prefetch):
    order = [0, 1, 2, 3]
    order = order[rank:] + order[:rank]
    if rank % 2:
        order = order[::-1]
    compare_training(
        engine,
        mixture(layers=2),
        lambda m: wrap_blocks(
            engine, m, backward_prefetch=prefetch, forward_prefetch=True, use_orig_params=True
        ),
        lambda step: batch_with(10 * step + rank, [[0, 1, 2, 3, 0, 1, 2]] * 2, [order] * 2),
        loss_of=loss_of,
    )


def random_batch(rank, step, layers, experts):
    generator = torch.Generator().manual_seed(7919 * step + rank)
    choices, orders = [], []
    for _ in range(layers):
        orders.append(torch.randperm(experts, generator=generator).tolist())
        allowed = orders[-1][: int(torch.randint(experts + 1, (), generator=generator))] + [-1]
        picks = torch.randint(len(allowed), (ROWS,), generator=generator)
        choices.append([allowed[p] for p in picks])
    return batch_with(step * 100 + rank, choices, orders)


@ranks(2, 3, 4)
@pytest.mark.parametrize("precision", PRECISIONS[:3], ids=lambda p: p.name)
@pytest.mark.parametrize("checkpoint", ["none", "inside", "outside"])
def test_random_routing(rank, world, engine, precision, checkpoint):
    """In many steps and two layers, each rank runs its own subset of experts in its own order."""

    def sharded(model):
        if checkpoint == "inside":
            for layer in model.layers:
                layer.experts = nn.ModuleList(checkpoint_wrapper(e) for e in layer.experts)
        model = wrap_blocks(engine, model, use_orig_params=True, **precision.options())
        if checkpoint == "outside":
            for layer in model.layers:
                layer.experts = nn.ModuleList(checkpoint_wrapper(e) for e in layer.experts)
        return model

    compare_training(
        engine,
        mixture(count=5, layers=2),
        sharded,
        lambda step: random_batch(rank, step, 2, 5),
        steps=8,
        loss_of=loss_of,
        precision=precision,
    )


@ranks(2, 3)
@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_with_other_experts_in_each_micro_batch(rank, world, engine, no_sync):
    model = mixture(count=4)
    reference = Reference(model, loss_of=loss_of)
    sharded = wrap_blocks(engine, model, use_orig_params=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, reference.master)]
    for step in range(4):
        for micro in range(3):
            batch = random_batch(rank, 10 * step + micro, 1, 4)
            sync = micro == 2 or not no_sync
            if sync:
                loss_of(sharded, batch).backward()
            else:
                with sharded.no_sync():
                    loss_of(sharded, batch).backward()
            reference.backward(batch, sync=sync)
        check_gradients(engine, sharded, reference, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_parameters(engine, sharded, reference, f"after step {step}")


@ranks(2, 3)
def test_evaluation_with_other_experts_on_each_rank(rank, world, engine):
    model = mixture()
    plain = copy.deepcopy(model)
    sharded = wrap_blocks(engine, model, use_orig_params=True)
    for step in range(3):
        batch = random_batch(rank, step, 1, 4)
        with torch.no_grad():
            check_equal(
                {"out": sharded(batch)},
                {"out": plain(batch)},
                f"output of step {step}",
                rtol=0.0 if engine == "fsdpc" else 1e-6,
            )


class Skipping(nn.Module):
    """A model with layer drop: each rank runs only the blocks that its batch lists."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, batch):
        x = self.enter(batch["x"])
        for i in batch["blocks"]:
            x = self.blocks[i](x)
        return x


@ranks(2, 3)
def test_ranks_drop_different_layers(rank, world, engine):
    """In each step, each rank leaves out a different block, and no rank runs the last block."""
    torch.manual_seed(1)
    sharded = compare_training(
        engine,
        Skipping(),
        lambda m: wrap_blocks(engine, m, use_orig_params=True),
        lambda step: {
            "x": batch_with(step * 10 + rank, [], [])["x"],
            "blocks": [i for i in range(3) if (i + step) % (world + 1) != rank],
        },
        steps=5,
        loss_of=loss_of,
    )
    torch.manual_seed(1)
    untouched = Skipping().blocks[3].state_dict()
    trained = full_parameters(sharded)
    for name, value in untouched.items():
        assert torch.equal(trained[f"blocks.3.{name}"], value), f"{name} moved though unused"


class Maybe(nn.Module):
    """A module that runs its block only if the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, x, runs):
        return self.block(x) if runs else x


class Beside(nn.Module):
    """A model with an optional block whose inputs need no gradient:
    a rank that leaves the block out has no graph for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.maybe = nn.Linear(WIDTH, WIDTH), Maybe()
        self.leave = Block(WIDTH)

    def forward(self, batch):
        return self.leave(self.enter(batch["x"]) + self.maybe(batch["x"], batch["runs"]))


def beside(collectives):
    """Return the model, with its optional module marked as data-dependent, and a plain copy."""
    fsdpc.set_collectives(collectives)
    torch.manual_seed(1)
    model = Beside()
    plain = copy.deepcopy(model)
    fsdpc.mark_data_dependent(model.maybe)
    return model, plain


def check_beside(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)


@ranks(2)
@pytest.mark.parametrize("collectives", ["shm", "wire"])
def test_a_marked_module_without_a_graph_on_one_rank(rank, world, collectives):
    """Two forwards are followed by their backwards in reverse order, so no unit is prefetched."""
    model, plain = beside(collectives)
    fsdpc.fully_shard(model.maybe)
    fsdpc.fully_shard(model)

    def losses(one, who):
        data = [batch_with(10 * step + who, [], [])["x"] for step in range(2)]
        return [one({"x": x, "runs": who == 0}).square().mean() for x in data]

    for loss in reversed(losses(model, rank)):
        loss.backward()
    for who in range(world):
        (sum(losses(plain, who)) / world).backward()
    check_beside(model, plain)


@ranks(2)
@pytest.mark.parametrize("collectives", ["shm", "wire"])
def test_a_marked_module_whose_recomputation_ends_early(rank, world, collectives):
    """torch's checkpoint ends the recomputed forward early by an exception,
    and the graph is used for two backwards.
    """
    model, plain = beside(collectives)
    fsdpc.fully_shard(model.maybe.block)
    model.maybe = checkpoint_wrapper(model.maybe)
    fsdpc.fully_shard(model)
    plain.maybe = checkpoint_wrapper(plain.maybe)

    def loss_of_rank(one, who):
        return one({"x": batch_with(who, [], [])["x"], "runs": who == 0}).square().mean()

    loss = loss_of_rank(model, rank)
    for _ in range(2):
        loss.backward(retain_graph=True)
    for who in range(world):
        (loss_of_rank(plain, who) * 2 / world).backward()
    check_beside(model, plain)


@ranks(2)
@pytest.mark.parametrize("collectives", ["shm", "wire"])
@pytest.mark.parametrize("front", ["fsdp", "fully_shard"])
def test_a_marked_root(rank, world, front, collectives):
    """The mark on a root also takes effect under no_sync, and in the root's first forward. The
    first forward sets up what the mark needs.
    """
    model, plain = beside(collectives)
    del model.maybe._fsdpc_data_dependent
    if front == "fsdp":
        model = fsdpc.FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, Block}), use_orig_params=True
        )
    else:
        for layer in (model.enter, model.maybe.block, model.leave, model):
            fsdpc.fully_shard(layer)
    fsdpc.mark_data_dependent(model)

    def loss(one, who, step):
        x = batch_with(10 * step + who, [], [])["x"]
        return one({"x": x, "runs": (who + step) % 2 == 0}).square().mean()

    for step in range(4):
        waits = step % 2 == 0
        if front == "fsdp":
            with model.no_sync() if waits else contextlib.nullcontext():
                loss(model, rank, step).backward()
        else:
            model.set_requires_gradient_sync(not waits)
            loss(model, rank, step).backward()
        for who in range(world):
            (loss(plain, who, step) / world).backward()
    if front == "fully_shard":
        return check_beside(model, plain)
    with model.summon_full_params(model, with_grads=True):
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
