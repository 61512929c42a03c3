"""Tests of how often units are gathered and reduced, counted in the engine's own trace.

A step gathers every unit twice if parameters are released after forward, and once if they are
kept. A step reduces every unit once, even if backward recomputes activations.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from combinations import subset
from harness import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from toys import Block, loss_of, no_sync_if, tokens, toy, wrap_blocks

STEPS = 3
GATHERS = {ShardingStrategy.FULL_SHARD: 2, ShardingStrategy.SHARD_GRAD_OP: 1}
CHECKPOINTS = [
    None,
    *(
        (where, implementation)
        for where in ("inside", "outside")
        for implementation in CheckpointImpl
    ),
]


def checkpointed(model, checkpoint, **options):
    def around(blocks):
        return nn.ModuleList(checkpoint_wrapper(b, checkpoint_impl=checkpoint[1]) for b in blocks)

    if checkpoint and checkpoint[0] == "inside":
        model.blocks = around(model.blocks)
    model = wrap_blocks("fsdpc", model, Block, **options)
    if checkpoint and checkpoint[0] == "outside":
        model.module.blocks = around(model.module.blocks)
    return model


def counts(model, op):
    return Counter((e["step"], e["unit"]) for e in model._tree.trace() if e["op"] == op)


def expected(model, times, skip=()):
    units = [u.name for u in model._tree.units if u.name not in skip]
    return {(step, unit): times for step in range(STEPS) for unit in units}


@ranks(2, 3)
@pytest.mark.parametrize("strategy", GATHERS, ids=lambda s: s.name)
def test_gathers_and_reduces_of_a_step(rank, world, strategy):
    options = itertools.product((*BackwardPrefetch, None), (True, False), CHECKPOINTS)
    for prefetch, use_orig_params, checkpoint in subset(options):
        what = f"{prefetch} {use_orig_params} {checkpoint}"
        model = checkpointed(
            toy(blocks=4),
            checkpoint,
            sharding_strategy=strategy,
            backward_prefetch=prefetch,
            forward_prefetch=True,
            use_orig_params=use_orig_params,
        )
        for step in range(STEPS):
            loss_of(model, tokens(rank, step)).backward()
        assert counts(model, "gather") == expected(model, GATHERS[strategy]), what
        assert counts(model, "reduce") == expected(model, 1), what
        assert not counts(model, "spare"), f"{what}: a slot was not free"


@ranks(2)
def test_accumulation(rank, world):
    """Each of two micro-batches is reduced. If the first micro-batch is not synchronized, both
    micro-batches are reduced together.
    """
    for no_sync in (False, True):
        model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
        for step in range(STEPS):
            for micro in range(2):
                with no_sync_if(model, no_sync and micro == 0):
                    loss_of(model, tokens(rank, step, micro)).backward()
        total = Counter(e["unit"] for e in model._tree.trace() if e["op"] == "reduce")
        each = STEPS * (1 if no_sync else 2)
        assert total == {unit.name: each for unit in model._tree.units}, total


@ranks(2)
def test_evaluation_gathers_once_and_reduces_nothing(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    with torch.no_grad():
        for step in range(STEPS):
            model(tokens(rank, step))
    total = Counter(e["unit"] for e in model._tree.trace() if e["op"] == "gather")
    assert total == {unit.name: STEPS for unit in model._tree.units}, total
    assert not counts(model, "reduce")


@ranks(2)
def test_frozen_units_are_not_reduced(rank, world):
    model = toy()
    model.blocks[0].requires_grad_(False)
    model = wrap_blocks("fsdpc", model, use_orig_params=True)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
    assert counts(model, "reduce") == expected(model, 1, skip=("blocks.0",))
