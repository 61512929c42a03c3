"""Models and comparisons for `test_late_*.py`.

These files test late reads: reads of a unit's gathered parameters at a time when the unit could
already be released.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import Reference, check_equal, full_gradients, full_parameters, wrap, wrap_blocks

POISON = {"FSDPC_POISON": "1"}
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
every_strategy = pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda s: s.name)
both_wires = pytest.mark.parametrize("collectives", ["shm", "wire"])


def batch(rank, step, width=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator)


def compare(rank, make, *units, sharded=None, batch_of=None, loss_of=None, steps=3, **options):
    """Train the model that `make` makes and an unsharded copy, and compare them in each step.

    The steps are SGD steps. Gradients and parameters must agree except for rounding: the gradients
    of an input are first added up inside each unit, so the order of the sum differs. The function
    `sharded` wraps the model. Without it, each module of the classes `units` is a unit with these
    `options`. A NaN fails the comparison. Collective.
    """
    torch.manual_seed(0)
    model, loss_of = make(), loss_of or squares
    batch_of = batch_of or functools.partial(batch, rank)
    reference = Reference(model, loss_of=loss_of)
    if sharded:
        model = sharded(model)
    else:
        model = (wrap_blocks if units else wrap)("fsdpc", model, *units, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference.master)]
    for step in range(steps):
        loss_of(model, batch_of(step)).backward()
        reference.backward(batch_of(step))
        near(full_gradients(model), reference.gradients(), f"gradients of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        near(full_parameters(model), reference.parameters(), f"parameters of step {step}")
    return model


def near(got, expected, what):
    check_equal(got, expected, what, rtol=1e-5, atol=1e-6)


def squares(model, x):
    out = model(x)
    return sum(t.pow(2).mean() for t in _tensors(out) if t.requires_grad)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    items = value.values() if isinstance(value, dict) else value
    return (
        [t for item in items for t in _tensors(item)]
        if isinstance(items, (list, tuple)) or (isinstance(value, dict))
        else []
    )


def slow_backward(rank, seconds):
    """Return a hook that delays the rest of a backward on rank 1."""

    def wait(grad):
        time.sleep(seconds if rank == 1 else 0)

    return wait


class Stack(nn.Module):
    def __init__(self, *blocks, memory=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(blocks)
        self.memory = memory

    def forward(self, x):
        x = memory = self.first(x)
        for block in self.blocks:
            x = x + (block(x, memory) if self.memory else block(x))
        return x


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def smooth_stack():
    torch.manual_seed(0)
    return Stack(*[Smooth() for _ in range(4)])
