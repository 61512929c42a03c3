"""Tests of activation checkpointing as frameworks apply it: to a plain model, to a wrapped model,
and with random numbers that a recomputation must draw again. The results must not depend on which
modules are units.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy
from torch.utils.checkpoint import checkpoint
from toys import (
    Block,
    Reference,
    check_equal,
    check_parameters,
    full_gradients,
    full_parameters,
    loss_of,
    tokens,
    wrap_blocks,
)

STEPS = 3
implementations = pytest.mark.parametrize("implementation", CheckpointImpl, ids=lambda i: i.name)
orders = pytest.mark.parametrize("order", ["checkpoint_then_shard", "shard_then_checkpoint"])
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])


class Dropping(nn.Module):
    """A model with dropout inside its blocks. The seed of a step determines the dropout masks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(6), nn.Dropout(0.3), nn.Linear(6, 6)) for _ in range(blocks)
        )
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> Dropping:
    torch.manual_seed(0)
    return Dropping()


def train(rank, model, reference, rtol=0.0, call=None):
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference.master)]
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        loss_of(call or model, tokens(rank, step)).backward()
        torch.manual_seed(100 * step + rank)
        reference.backward(tokens(rank, step))
        check_equal(full_gradients(model), reference.gradients(), f"step {step}", rtol=rtol)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_equal(full_parameters(model), reference.parameters(), "at the end", rtol=rtol)


def apply(model, implementation, by):
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=implementation)
    if by == "check_fn":
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, nn.Sequential)
        )
    else:
        policy = functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Sequential)
        )
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, auto_wrap_policy=policy
        )


@ranks(1, 2)
@both_ways
@implementations
@orders
@pytest.mark.parametrize("unit", [nn.Sequential, Block], ids=lambda u: u.__name__)
def test_apply_activation_checkpointing(rank, world, order, implementation, use_orig_params, unit):
    """Checkpointed modules may be units or contain units. The names in the state dict do not
    change. A recomputation needs no gather of its own: with two ranks, each unit is gathered once
    in forward and once in backward."""
    model = make()
    names = list(model.state_dict())
    reference = Reference(model)
    for by in ("check_fn", "policy"):
        model = make()
        if order == "checkpoint_then_shard":
            apply(model, implementation, by)
        model = wrap_blocks("fsdpc", model, unit, use_orig_params=use_orig_params)
        if order == "shard_then_checkpoint":
            apply(model, implementation, by)
        assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == 3
        train(rank, model, Reference(make()))
        assert list(model.state_dict()) == names
        done = Counter(e["op"] for e in model._tree.trace())
        gathers = (2 if world > 1 else 1) * STEPS * 4
        assert (done["gather"], done["reduce"]) == (gathers, STEPS * 4), done
        model.load_state_dict(reference.master.state_dict())
        check_parameters("fsdpc", model, reference, "loaded")
        reference = Reference(make())


@ranks(2)
@implementations
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
def test_other_strategies(rank, world, implementation, strategy):
    groups = [[0], [1]] if strategy is ShardingStrategy.NO_SHARD else None
    model = make()
    reference = Reference(model, groups=groups)
    apply(model, implementation, "check_fn")
    model = wrap_blocks(
        "fsdpc", model, nn.Sequential, use_orig_params=True, sharding_strategy=strategy
    )
    train(rank, model, reference)


class Whole(nn.Module):
    """A module that checkpoints a whole model. Reentrant checkpoints need an input that requires a
    gradient, so `zero` is passed as such an input."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, batch):
        zero = torch.zeros((), requires_grad=True)
        return checkpoint(lambda x, z: self.inner(x) + z, batch, zero, use_reentrant=self.reentrant)


@ranks(1, 2)
@orders
@both_ways
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_whole_model(rank, world, order, use_orig_params, reentrant):
    if order == "checkpoint_then_shard":
        model = Whole(make(), reentrant)
        reference = Reference(model)
        model = wrap_blocks("fsdpc", model, Block, use_orig_params=use_orig_params)
        train(rank, model, reference)
    else:
        model = make()
        reference = Reference(model)
        model = wrap_blocks("fsdpc", model, Block, use_orig_params=use_orig_params)
        train(rank, model, reference, call=Whole(model, reentrant))


class CallsCheckpoint(Dropping):
    """A model that calls torch.utils.checkpoint itself: on each unit, or with `span` on a function
    that calls several units."""

    def __init__(self, reentrant: bool, preserve: bool, span: bool) -> None:
        super().__init__(blocks=4)
        self.options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        self.span = span

    def forward(self, batch):
        x = self.embed(batch)
        for i in range(0, 4, 2):
            if self.span:
                x = checkpoint(
                    lambda x, i=i: self.blocks[i + 1](self.blocks[i](x)), x, **self.options
                )
            else:
                for block in self.blocks[i : i + 2]:
                    x = checkpoint(block, x, **self.options)
        return self.head(x)


@ranks(2)
@both_ways
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("span", [True, False])
def test_checkpoint_in_forward(rank, world, reentrant, use_orig_params, span):
    torch.manual_seed(0)
    model = CallsCheckpoint(reentrant, True, span)
    reference = Reference(model)
    model = wrap_blocks("fsdpc", model, nn.Sequential, use_orig_params=use_orig_params)
    train(rank, model, reference)


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_preserve_rng_state(rank, world, reentrant):
    """With preserve_rng_state=True, a recomputation draws the same dropout masks again; with False
    it does not. torch promises this, and gathering during a recomputation must not change it."""
    for preserve in (True, False):
        torch.manual_seed(0)
        model = CallsCheckpoint(reentrant, preserve, span=False)
        masks: list[torch.Tensor] = []
        for block in model.blocks:
            block[1].register_forward_hook(lambda m, a, y, to=masks: to.append((y == 0).clone()))
        model = wrap_blocks("fsdpc", model, nn.Sequential, use_orig_params=True)
        torch.manual_seed(7 + rank)
        loss_of(model, tokens(rank, 0)).backward()
        first, again = masks[:4], masks[4:][::-1]  # the last block is recomputed first
        assert len(again) == 4
        alike = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert alike is preserve


@ranks(2)
@both_ways
def test_activations_offloaded(rank, world, use_orig_params):
    """offload_wrapper keeps copies of the activations; the names and values of the model stay the
    same."""
    model = make()
    names = list(model.state_dict())
    reference = Reference(model)
    model.blocks = nn.ModuleList(offload_wrapper(block) for block in model.blocks)
    model = wrap_blocks("fsdpc", model, nn.Sequential, use_orig_params=use_orig_params)
    train(rank, model, reference, rtol=1e-5)  # the copies have other strides
    assert list(model.state_dict()) == names


@ranks(2)
@both_ways
def test_both_kinds_in_one_model(rank, world, use_orig_params):
    """One block has a reentrant checkpoint inside its unit, the next block a checkpoint without
    reentry around its unit, and one block has none."""
    model = make()
    reference = Reference(model)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], checkpoint_impl=CheckpointImpl.REENTRANT)
    policy = ModuleWrapPolicy({nn.Sequential})
    from fsdpc import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params
    )
    model.module.blocks[1] = checkpoint_wrapper(model.module.blocks[1])
    train(rank, model, reference)
