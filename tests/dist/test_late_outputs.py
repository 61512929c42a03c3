"""Outputs that are the unit's own memory, read after its release."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import ranks
from late import FULL, GRAD_OP, POISON, Smooth, batch, both_ways, compare, squares
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import Reference, check_equal, full_gradients, wrap, wrap_blocks

import fsdpc


@dataclasses.dataclass
class Out:
    table: torch.Tensor
    ring: object = None


class Position(nn.Module):
    def __init__(self, form, frozen):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6), requires_grad=not frozen)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=not frozen)
        self.form = form

    def forward(self, n):
        if self.form == "view":
            return self.table[:n]
        if self.form == "parameter":
            return self.table, self.scale
        if self.form == "dict":
            return {"scale": self.scale, "more": [self.table.t()]}
        out = Out(self.table[:n])
        out.ring = [out]
        return out


class Positions(nn.Module):
    def __init__(self, form, frozen):
        super().__init__()
        self.position = Position(form, frozen)
        self.blocks = nn.ModuleList(Smooth() for _ in range(3))

    def forward(self, x):
        out = self.position(x.shape[0])
        for block in self.blocks:
            x = block(x)
        if isinstance(out, torch.Tensor):
            return x + out
        if isinstance(out, tuple):
            return x * out[1] + out[0][: x.shape[0]]
        if isinstance(out, dict):
            return x * out["scale"] + out["more"][0].t()[: x.shape[0]]
        assert out.ring[0] is out
        return x + out.table


@ranks(2, env=POISON)
@both_ways
@pytest.mark.parametrize("form", ["view", "parameter", "dict", "dataclass"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_unit_that_returns_its_parameters(rank, world, form, frozen, use_orig_params):
    torch.manual_seed(0)
    model = compare(
        Positions(form, frozen),
        lambda m: wrap_blocks("fsdpc", m, Smooth, Position, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )
    with torch.no_grad():
        assert not model(batch(rank, 9)).isnan().any()


class Temperature(nn.Module):
    """A contrastive model returns its scale, whole, in a dict."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return {"x": self.net(x), "scale": self.logit_scale}


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return {"x": x.tanh(), "scale": self.scale}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), Holder()

    def forward(self, x):
        out = self.inner(self.first(x))
        return out["x"] * out["scale"]


@ranks(1, 2)
@both_ways
@pytest.mark.parametrize(
    "strategy", [FULL, GRAD_OP, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
def test_a_returned_parameter_in_a_further_backward(rank, world, strategy, use_orig_params):
    """Its gradient is the first that is there, also where its values are the shard itself."""
    torch.manual_seed(0)
    plain = Scaled()
    reference = Reference(plain, loss_of=squares)
    model = wrap_blocks(
        "fsdpc", plain, Holder, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    loss = squares(model, batch(rank, 0))
    loss.backward(retain_graph=True)
    loss.backward()
    reference.backward(batch(rank, 0), times=2)
    check_equal(full_gradients(model), reference.gradients(), "gradients", rtol=1e-5, atol=1e-6)


@ranks(1, 2, env=POISON)
@both_ways
@pytest.mark.parametrize(
    "strategy", [FULL, GRAD_OP, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
def test_a_root_that_returns_a_parameter(rank, world, strategy, use_orig_params):
    torch.manual_seed(0)
    compare(
        Temperature(),
        lambda m: wrap("fsdpc", m, sharding_strategy=strategy, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=lambda m, x: (lambda out: (out["x"] * out["scale"].exp()).pow(2).mean())(m(x)),
    )


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
            yield x


@ranks(2, env=POISON)
@both_ways
def test_a_forward_that_is_a_generator_is_refused(rank, world, use_orig_params):
    model = wrap("fsdpc", Generator(), use_orig_params=use_orig_params)
    for _ in range(2):
        with pytest.raises(fsdpc.StateError, match="unit Generator returned a generator"):
            model(batch(rank, 0))
