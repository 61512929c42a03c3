"""Tests of training against torch's own FSDP with the same seeds, against a second run, and over
torch's collectives.
"""

from __future__ import annotations

import itertools
import time

import env
import pytest
import torch
from combinations import subset
from harness import ranks, run_ranks
from test_features_experts import loss_of as mixture_loss
from test_features_experts import mixture, random_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from toys import (
    PRECISIONS,
    Block,
    Reference,
    check_equal,
    check_gradients,
    check_parameters,
    full_gradients,
    full_parameters,
    loss_of,
    no_sync_if,
    tokens,
    toy,
    wrap_blocks,
)

import fsdpc

STEPS = 3
TORCH = "torch.distributed.fsdp"
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
WIRE = {"FSDPC_COLLECTIVES": "wire"}


def train(engine, rank, **options):
    """Train, and return the loss, the full gradients and the full parameters of every step."""
    model = wrap_blocks(engine, toy(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    history = {}
    for step in range(STEPS):
        for micro in range(2):
            loss = loss_of(model, tokens(rank, step, micro))
            loss.backward()
            history[f"loss {step}.{micro}"] = loss.detach()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        for kind, values in (("gradient", gradients), ("parameter", full_parameters(model))):
            history.update({f"{kind} {name} of step {step}": v for name, v in values.items()})
    return history


@ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_like_torchs_fsdp(rank, world, use_orig_params):
    """fsdpc and torch add the same numbers, but torch's backend adds in its own order, so the bound
    is small, but not 0."""
    for precision, strategy in subset(itertools.product(PRECISIONS[:2], STRATEGIES)):
        options = dict(
            sharding_strategy=strategy, use_orig_params=use_orig_params, **precision.options()
        )
        bound = 1e-5 if precision.param is None else 3e-2
        check_equal(
            train("fsdpc", rank, **options),
            train(TORCH, rank, **options),
            f"{precision.name} {strategy.name}",
            rtol=bound,
            atol=bound / 10,
        )


def history_of_run(rank, world, name, use_orig_params):
    precision = {p.name: p for p in PRECISIONS}[name]
    return train("fsdpc", rank, use_orig_params=use_orig_params, **precision.options())


@pytest.mark.long
@pytest.mark.parametrize("precision", [p.name for p in PRECISIONS[:4]])
def test_two_runs_are_equal_to_the_bit(precision):
    """Two runs are bitwise equal, whatever the order in which the ranks reach a reduction. Sums in
    bf16 and fp16 are equal, too."""
    first, second = (
        run_ranks(history_of_run, 3, name=precision, use_orig_params=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        check_equal(one, other, "second run")


@ranks(4)
@pytest.mark.parametrize("reduce", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_of_fully_shard_do_not_depend_on_who_is_late(rank, world, reduce):
    """The results are bitwise equal, although the ranks arrive in the opposite order in the second
    run."""
    runs = []
    for turned in (False, True):
        place = world - 1 - rank if turned else rank
        model = toy()
        for module in (*model.blocks, model):
            fsdpc.fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        history = {}
        for step in range(3):
            loss = loss_of(model, tokens(rank, step, 0))
            time.sleep(0.02 * place)
            loss.backward()
            history[f"loss of step {step}"] = loss.detach()
            for name, p in model.named_parameters():
                history[f"gradient {name} of step {step}"] = p.grad.to_local().clone()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(history)
    check_equal(*runs, "the turned run")


@pytest.mark.long
@ranks(2, 3, env=WIRE)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_over_torchs_collectives(rank, world, use_orig_params):
    """Training without shared memory gives the same steps, except that torch's backend adds
    gradients in its own order."""
    chosen = subset(itertools.product(PRECISIONS[:3], STRATEGIES, (False, True)))
    for precision, strategy, no_sync in chosen:
        reference = Reference(toy(), precision)
        model = wrap_blocks(
            "fsdpc",
            toy(),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            **precision.options(),
        )
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, reference.master)
        ]
        for step in range(3):
            for micro in range(2):
                sync = micro == 1 or not no_sync
                with no_sync_if(model, not sync):
                    loss_of(model, tokens(rank, step, micro)).backward()
                reference.backward(tokens(rank, step, micro), sync=sync)
            what = f"{precision.name} {strategy.name} no_sync={no_sync}, step {step}"
            check_gradients("wire", model, reference, what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            check_parameters("wire", model, reference, what)


class Swapping(nn.Module):
    """A module in which each rank runs two blocks in its own order."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first, self.second = Block(6), Block(6)
        self.head = nn.Linear(6, 13)
        self.swapped = swapped

    def forward(self, batch):
        x = self.embed(batch)
        blocks = (self.first, self.second)
        for block in reversed(blocks) if self.swapped else blocks:
            x = block(x)
        return self.head(x)


@ranks(2, env=WIRE)
def test_swapped_units_are_named(rank, world):
    """Without shared memory, all ranks must gather the same units in the same order. If they do
    not, the error names the units and the function ``mark_data_dependent``."""
    torch.manual_seed(0)
    model = wrap_blocks("fsdpc", Swapping(rank == 1), use_orig_params=True)
    with pytest.raises(fsdpc.MismatchError) as caught:
        loss_of(model, tokens(rank, 0))
    text = str(caught.value)
    assert "first" in text and "second" in text and "mark_data_dependent" in text, text


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["wire", "nccl"])
def test_marked_experts(world, kind):
    if kind == "nccl" and env.missing() is not None:
        pytest.skip(str(env.missing()))
    given = WIRE if kind == "wire" else env.environment()
    run_ranks(train_marked_experts, world, env=given, kind=kind)


def train_marked_experts(rank, world, kind):
    """Mark a mixture of experts as data-dependent, and check that it trains like an unsharded
    mixture of experts."""
    model = mixture(count=3)
    reference = Reference(model, loss_of=mixture_loss)
    for layer in model.layers:
        fsdpc.mark_data_dependent(layer)
    sharded = wrap_blocks("fsdpc", model, use_orig_params=True)
    for step in range(4):
        batch = random_batch(rank, step, 1, 3)
        mixture_loss(sharded, batch).backward()
        reference.backward(batch)
        check_gradients(kind, sharded, reference, f"of step {step}")
