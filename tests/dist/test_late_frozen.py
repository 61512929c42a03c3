"""Tests of frozen parameters that backward reads late:
a unit is released only when no node of its graph can run any more.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import ranks
from late import (
    POISON,
    Stack,
    batch,
    both_ways,
    both_wires,
    compare,
    every_strategy,
    slow_backward,
    squares,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from toys import wrap, wrap_blocks

import fsdpc


class LoRA(nn.Module):
    def __init__(self, width=6, rank=None, inner=2):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)
        self.rank = rank

    def forward(self, x):
        frozen = self.base(torch.tanh(x))
        if frozen.requires_grad and self.rank is not None:
            frozen.register_hook(slow_backward(self.rank, 0.05))
        return frozen + self.up(self.down(x))


@ranks(2, 3, env=POISON)
@both_ways
@every_strategy
@both_wires
def test_frozen_linear_beside_low_rank_ones(rank, world, strategy, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    compare(
        rank,
        lambda: Stack(*[LoRA(rank=rank) for _ in range(4)]),
        LoRA,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        steps=2,
    )


class Cross(nn.Module):
    """A module with a trainable adapter and two frozen layers. The frozen layers mix ``x`` with
    ``memory``, roughly as cross-attention does. Every block gets the same ``memory``.
    """

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(6, 6).requires_grad_(False)
        self.query = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = nn.Linear(6, 6)

    def forward(self, x, memory):
        return torch.sigmoid(self.query(x)) * self.key(memory) + self.adapter(x.detach())


@ranks(2, env=POISON)
@both_ways
def test_a_frozen_unit_with_an_input_that_all_units_share(rank, world, use_orig_params):
    model = compare(
        rank,
        lambda: Stack(*[Cross() for _ in range(4)], memory=True),
        Cross,
        use_orig_params=use_orig_params,
    )
    # The gradient of the shared input is the last one to be complete: no unit may wait for it.
    assert fsdpc.memory_stats(model)["spare_count"] == 0


class Nested(nn.Module):
    """A unit with frozen parameters that contains a trainable unit,
    which runs before the frozen parameters.
    """

    def __init__(self, rank):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 6)
        self.rank = rank

    def forward(self, x):
        hidden = torch.tanh(self.frozen(torch.tanh(self.inner(x))))
        if hidden.requires_grad:
            hidden.register_hook(slow_backward(self.rank, 0.05))
        return self.head(hidden)


@ranks(2, env=POISON)
@both_ways
@every_strategy
def test_frozen_parameters_around_a_nested_unit(rank, world, strategy, use_orig_params):
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}

    def sharded(model):
        for i, nested in enumerate(model.blocks):
            nested.inner = wrap("fsdpc", nested.inner, **options)
            model.blocks[i] = wrap("fsdpc", nested, **options)
        return wrap("fsdpc", model, **options)

    compare(rank, lambda: Stack(*[Nested(rank) for _ in range(3)]), sharded=sharded, steps=2)


class Passing(nn.Module):
    """A frozen module that takes several inputs and returns one of them unchanged."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 6).requires_grad_(False)
        self.right = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, *, other):
        return self.left(x) * torch.tanh(self.right(other)), other


class PassingStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x):
        left, right = self.first(x), self.second(x)
        for block in self.blocks:
            left, right = block(left, other=right)
            right = torch.tanh(right)
        return left + right


@ranks(2, env=POISON)
@both_ways
def test_frozen_units_between_trainable_ones(rank, world, use_orig_params):
    compare(rank, PassingStack, Passing, use_orig_params=use_orig_params)


@ranks(2, env=POISON)
@both_ways
@pytest.mark.parametrize("kind", list(CheckpointImpl), ids=lambda k: k.name)
def test_frozen_parameters_under_checkpointing(rank, world, kind, use_orig_params):
    def sharded(model):
        for i, block in enumerate(model.blocks):
            block = wrap("fsdpc", block, use_orig_params=use_orig_params)
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=kind)
        return wrap("fsdpc", model, use_orig_params=use_orig_params)

    compare(rank, lambda: Stack(*[LoRA(rank=rank) for _ in range(3)]), sharded=sharded, steps=2)


class Detached(nn.Module):
    """A trainable module whose weight is also used detached, so that this use gives no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        straight = F.linear(torch.tanh(x), self.linear.weight.detach())
        return torch.tanh(straight) + self.linear(x.detach())


@ranks(2, env=POISON)
def test_a_detached_use_is_refused_when_it_comes_late(rank, world):
    model = wrap_blocks("fsdpc", Stack(*[Detached() for _ in range(4)]), Detached)
    try:
        squares(model, batch(rank, 0)).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
    else:
        for p in model.parameters():
            assert p.grad is None or not p.grad.isnan().any()


class Index(nn.Module):
    """A module with an integer parameter that the backward needs."""

    def __init__(self):
        super().__init__()
        self.index = nn.Parameter(torch.tensor([5, 0, 3, 3, 1, 2]), requires_grad=False)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(torch.tanh(x[:, self.index]))


@ranks(2, env=POISON)
@both_ways
def test_integer_parameters_that_a_backward_needs(rank, world, use_orig_params):
    compare(
        rank, lambda: Stack(*[Index() for _ in range(4)]), Index, use_orig_params=use_orig_params
    )
