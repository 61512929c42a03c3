"""Tests of second backwards: either the values that a second backward reads are gathered,
or the backward is refused.
"""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from late import (
    POISON,
    Smooth,
    batch,
    both_ways,
    both_wires,
    compare,
    every_strategy,
    smooth_stack,
    squares,
)
from torch import nn
from toys import wrap, wrap_blocks

import fsdpc


def penalty(model, x):
    """Return the loss of WGAN-GP: the gradient penalty and two ordinary terms."""
    real, fake = model(x).mean(), model(x + 1).mean()
    between = (x + 0.5).requires_grad_()
    (grad,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return real - fake + ((grad.norm(2, dim=1) - 1) ** 2).mean()


@ranks(2, 3, env=POISON)
@both_ways
@every_strategy
@both_wires
def test_gradient_penalty(rank, world, strategy, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    compare(
        rank,
        smooth_stack,
        Smooth,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        loss_of=penalty,
    )


class Force(nn.Module):
    """A model that returns an energy and its gradient with respect to the positions,
    like an interatomic potential.
    """

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.net = smooth_stack()

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.net(x * self.scale).sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy * self.scale, force * self.scale


@ranks(2, env=POISON)
@both_ways
@both_wires
def test_autograd_grad_inside_forward(rank, world, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    model = compare(rank, Force, Smooth, use_orig_params=use_orig_params)
    model.eval()
    with torch.no_grad():
        energy, force = model(batch(rank, 9))
    assert not energy.isnan().any() and not force.isnan().any()


class Pushed(nn.Module):
    """A module that moves hidden values along the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x):
        energy = torch.tanh(x @ self.weight).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.3 * force


class PushedSometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.push, self.last = nn.Linear(6, 6), Pushed(), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(self.push(hidden) if x[0, 0] > 0 else hidden)


@ranks(2, 3, env=POISON)
@pytest.mark.parametrize("in_place", [True, False])
def test_autograd_grad_inside_the_forward_of_some_ranks(rank, world, in_place):
    """Some ranks call autograd.grad, which runs a backward of its own. The other ranks run no such
    backward and go on to later collectives.
    """

    def batch_of(step):
        x = batch(rank, step)
        x[0, 0] = x[0, 0].abs() * (1 if (rank + step) % 2 else -1)
        return x

    def sharded(model):
        if not in_place:
            return wrap_blocks("fsdpc", model, nn.Linear, Pushed, use_orig_params=True)
        for module in (model.first, model.push, model.last, model):
            fsdpc.fully_shard(module)
        return model

    model = sharded(PushedSometimes())
    for step in range(3):
        squares(model, batch_of(step)).backward()
        torch.distributed.barrier()
        model.zero_grad()


@ranks(2, env=POISON)
def test_a_second_backward_after_another_pass_is_refused(rank, world):
    model = wrap_blocks("fsdpc", smooth_stack(), Smooth)
    x = batch(rank, 0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(batch(rank, 1))  # releases the parameters that the second backward needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.pow(2).sum().backward()
    for p in model.parameters():
        p.grad = None
    compare(rank, smooth_stack, Smooth)
    squares(model, batch(rank, 2)).backward()
    assert all(not p.grad.isnan().any() for p in model.parameters() if p.grad is not None)


@ranks(2, env=POISON)
@both_ways
def test_a_graph_from_before_the_optimizer_step_is_refused(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", smooth_stack(), Smooth, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        first = squares(model, batch(rank, 0))
        first.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        optimizer.zero_grad()


@ranks(2, env=POISON)
def test_a_step_of_one_part_leaves_the_graph_of_another(rank, world):
    """Two heads are one unit, and each head has its own optimizer and loss."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x).pow(2).mean(), self.b(x).pow(2).mean()

    torch.manual_seed(0)
    model = wrap("fsdpc", Heads(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)
    for step in range(3):
        one, two = model(batch(rank, step))
        one.backward()
        optimizer.step()
        two.backward()
        model.zero_grad()
