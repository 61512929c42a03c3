"""Tests of one unit that runs in several forwards before its backward, of units that run in
threads, and of inputs and outputs in containers that hold themselves.
"""

from __future__ import annotations

import threading

import pytest
import torch
from harness import ranks
from late import POISON, Smooth, batch, both_ways, both_wires, compare, smooth_stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdpc


class Rollout(nn.Module):
    """A model that is applied to its own output; some calls leave out one of its parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x, extra=False):
        x = torch.tanh(self.linear(x))
        return x + self.sometimes(x) if extra else x


class Rolling(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.cell = Rollout()

    def forward(self, x):
        x = self.first(x)
        for k in range(4):
            x = self.cell(x, extra=k == 2)
        return x + self.cell(torch.ones_like(x))


@ranks(2, 3, env=POISON)
@both_ways
@both_wires
def test_a_unit_applied_to_its_own_output(rank, world, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    compare(rank, Rolling, Rollout, use_orig_params=use_orig_params, steps=4)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x), self.b(x)


def in_thread(function, *args):
    result = []
    grad = torch.is_grad_enabled()

    def run():
        with torch.set_grad_enabled(grad):
            result.append(function(*args))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


class Threaded(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(3))
        self.reentrant = reentrant

    def one(self, block, x):
        return in_thread(block, x)[0]

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = self.one(block, x)
            else:
                x = checkpoint(self.one, block, x, use_reentrant=self.reentrant)
        return x


@ranks(2, env=POISON)
@both_ways
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_units_called_in_threads(rank, world, reentrant, use_orig_params):
    compare(rank, lambda: Threaded(reentrant), TwoOutputs, use_orig_params=use_orig_params, steps=4)


class Straight(nn.Module):
    """A unit of three layers that run in another thread; the last one runs only with `also`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.also = True

    def all(self, x):
        for layer in self.layers[: 3 if self.also else 2]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        return in_thread(self.all, x)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), Straight()

    def forward(self, x):
        return self.inner(self.first(x))


@ranks(2, env=POISON)
def test_a_unit_whose_layers_run_in_a_thread(rank, world):
    """All parameters get gradients in a step that follows a step with frozen parameters. If a layer
    is unused, fsdpc can detect the end of the unit's backward only at the inputs of the unit.
    Autograd reaches these inputs too early, so an error is raised.
    """
    torch.manual_seed(0)
    reference, model = Around(), Around()
    model.load_state_dict(reference.state_dict())
    fsdpc.fully_shard(model.inner)
    fsdpc.fully_shard(model)
    for step in range(2):
        for one in (model, reference):
            one.inner.requires_grad_(step == 1)
            one.inner.layers[1].bias.requires_grad_(True)
            one.zero_grad()
            one(batch(0, step)).sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
    model.inner.also = False
    model(batch(0, 2)).sum().backward()
    with pytest.raises(fsdpc.StateError, match="ran in a thread that forward had started"):
        model(batch(0, 3)).sum().backward()


class Again(nn.Module):
    """A model that runs one unit twice in a forward by reentrant checkpoints,
    each time before another unit.
    """

    def __init__(self):
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(6, 6), TwoOutputs(), TwoOutputs()

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = self.last(sum(checkpoint(self.unit, x, use_reentrant=True)))[0] + x
        return x


@ranks(2, 3, env=POISON)
@both_ways
@both_wires
def test_a_unit_that_is_done_again_before_its_sum_is_due(rank, world, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    compare(
        rank,
        Again,
        TwoOutputs,
        use_orig_params=use_orig_params,
        batch_of=lambda step: batch(rank, step).requires_grad_(),
    )


class Ring(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, ring):
        out = [self.linear(ring[0])]
        out.append(out)
        deep = leaf = []
        for _ in range(2000):
            leaf.append([])
            leaf = leaf[0]
        leaf.append(out)
        return {"deep": deep, "out": out}


class Rings(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.rings = nn.ModuleList(Ring() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for ring in self.rings:
            holder = [x]
            holder.append(holder)
            x = torch.tanh(ring(holder)["out"][0])
        return x


# Jitter is off, because its own search for tensors recurses.
@ranks(2, env={**POISON, "FSDPC_TEST_JITTER": ""})
@both_ways
def test_containers_that_hold_themselves(rank, world, use_orig_params):
    compare(rank, Rings, Ring, use_orig_params=use_orig_params)


@ranks(2, env=POISON)
def test_a_backward_that_broke_off_inside_a_forward(rank, world):
    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth_stack()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x):
            probe = x.detach().requires_grad_()
            out = self.net(probe)
            out.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                torch.autograd.grad(out.sum(), probe)
            return self.net(x) * self.scale

    def fail(grad):
        raise ZeroDivisionError

    compare(rank, Trying, Smooth)
