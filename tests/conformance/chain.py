"""A module of layers, each of which is a unit. A case chooses the order of the layers."""

from __future__ import annotations

import torch
from torch import nn


def linear(rows=3, columns=3, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(columns, rows)


def inputs_of(rank, seed=0):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * seed + rank))


def inputs(lib, seed=0, requires_grad=False):
    return inputs_of(lib.rank, seed).requires_grad_(requires_grad)


class Chain(nn.Module):
    """A module that runs its layers in the order that the caller gives."""

    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(linear(seed=i) for i in range(count))

    def forward(self, x, order=(0, 1, 2)):
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


def chain(lib, **options):
    return lib.shard_blocks(Chain(), nn.Linear, **options)
