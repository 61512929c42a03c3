"""Tests of attributes and outputs whose memory belongs to a unit. A module of a released unit still
has its parameters, but their values cannot be read. The outputs of a released unit can be read.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import ranks
from late import FULL, GRAD_OP, POISON, Smooth, Stack, batch, both_ways, compare, squares
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import Reference, check_equal, full_gradients, wrap, wrap_blocks

import fsdpc

all_strategies = pytest.mark.parametrize(
    "strategy", [FULL, GRAD_OP, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)


# --- attributes ----------------------------------------------------------------------------------


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(6, 6, bias=False)
        self.block = Smooth()

    def forward(self, x):
        return F.linear(self.block(self.emb(x)), self.emb.weight)


@ranks(2, env=POISON)
def test_the_weight_of_a_released_module_cannot_be_read(rank, world):
    model = wrap_blocks("fsdpc", TiedByHand(), nn.Linear, Smooth)
    with pytest.raises(fsdpc.StateError, match=r"parameter 'weight' of unit 'emb' is not gathered"):
        model(batch(rank, 0))
    weight = model.emb.weight
    assert weight.shape == (6, 6) and weight.dtype == torch.float32 and weight.requires_grad
    for read in (lambda: weight + 1, weight.tolist, weight.numpy, lambda: weight[0].sum()):
        with pytest.raises(fsdpc.StateError, match="summon_full_params"):
            read()
    with fsdpc.FullyShardedDataParallel.summon_full_params(model):
        assert model.emb.weight.sum() != 0
    with pytest.raises(fsdpc.StateError):
        model.emb.weight.sum()


@ranks(2, env=POISON)
@all_strategies
@pytest.mark.parametrize("read", ["linear", "view", "frozen", "no_grad", "reentrant"])
def test_the_sharded_weight_of_another_unit_is_not_computed_with(rank, world, strategy, read):
    class Tied(TiedByHand):
        def forward(self, x):
            x = self.block(self.emb(x))
            if read == "reentrant":
                return checkpoint(lambda y: y @ self.emb.weight.t(), x, use_reentrant=True)
            return x @ self.emb.weight.t() if read == "view" else F.linear(x, self.emb.weight)

    plain = Tied()
    plain.emb.weight.requires_grad_(read != "frozen")
    model = wrap_blocks(
        "fsdpc", plain, nn.Linear, Smooth, sharding_strategy=strategy, use_orig_params=True
    )
    own = model.emb.weight
    for _ in range(2):
        with pytest.raises(fsdpc.StateError, match=r"'weight' of unit 'emb' is not gathered here"):
            with torch.set_grad_enabled(read != "no_grad"):
                model(batch(rank, 0))
        assert model.emb.weight is own and own in set(model.parameters())


class Momentum(nn.Module):
    """A momentum encoder that the training forward itself updates, as in BYOL, MoCo and DINO."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.online, self.target = Smooth(), Smooth()
        self.target.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x):
        pairs = list(zip(self.online.parameters(), self.target.parameters(), strict=True))
        if self.how == "foreach":
            torch._foreach_lerp_([t for _, t in pairs], [o for o, _ in pairs], 0.1)
        for online, target in pairs:
            if self.how == "data":
                target.data = target.data * 0.9 + online.data * 0.1
            elif self.how == "copy":
                target.data.copy_(online.data)
            elif self.how == "in place":
                target.mul_(0.9).add_(online, alpha=0.1)
        return self.online(x) - self.target(x)


@ranks(2, env=POISON)
@all_strategies
@pytest.mark.parametrize("how", ["data", "copy", "in place", "foreach"])
def test_a_forward_cannot_change_the_weights_of_another_unit(rank, world, strategy, how):
    model = wrap_blocks(
        "fsdpc", Momentum(how), Smooth, sharding_strategy=strategy, use_orig_params=True
    )
    with pytest.raises(fsdpc.StateError, match="of unit '(online|target)' is not gathered here"):
        model(batch(rank, 0))


class Inspecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = Smooth(), Smooth()

    def forward(self, x):
        weight = self.head.linear.weight
        assert isinstance(weight, nn.Parameter) and weight.shape == (6, 6)
        assert [p.shape for p in self.head.parameters()] == [(6, 6), (6,)]
        assert next(self.head.parameters()).dtype == x.dtype
        assert weight.device == x.device and weight.is_leaf and weight.grad is None
        self.head.requires_grad_(False)
        assert not weight.requires_grad
        return self.head(self.net(x))


@ranks(2, env=POISON)
@all_strategies
def test_a_forward_inspects_and_freezes_another_unit(rank, world, strategy):
    torch.manual_seed(0)
    model = wrap_blocks(
        "fsdpc", Inspecting(), Smooth, sharding_strategy=strategy, use_orig_params=True
    )
    own = list(model.parameters())
    for step in range(2):
        squares(model, batch(rank, step)).backward()
        assert all(now is then for now, then in zip(model.parameters(), own, strict=True))
        frozen = set(model.head.parameters())
        assert all(p.requires_grad == (p not in frozen) for p in own)
    assert all(p.grad is None for p in frozen)


@ranks(2, env=POISON)
def test_a_weight_tied_by_hand_while_its_unit_stays_gathered(rank, world):
    compare(rank, TiedByHand, nn.Linear, Smooth, sharding_strategy=GRAD_OP)


@ranks(2, env=POISON)
@both_ways
def test_writing_a_gathered_parameter_is_refused(rank, world, use_orig_params):
    class Clamping(Smooth):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = wrap("fsdpc", Stack(Clamping()), use_orig_params=use_orig_params)
    with pytest.raises(fsdpc.StateError, match="changed in place during forward"):
        squares(model, batch(rank, 0))


# --- outputs -------------------------------------------------------------------------------------


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
    model = compare(
        rank, lambda: Positions(form, frozen), Smooth, Position, use_orig_params=use_orig_params
    )
    with torch.no_grad():
        assert not model(batch(rank, 9)).isnan().any()


class Temperature(nn.Module):
    """A contrastive model that returns a dict with its scale, which is a parameter of the model."""

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
@all_strategies
def test_a_returned_parameter_in_a_further_backward(rank, world, strategy, use_orig_params):
    """A second backward uses the same graph. In it, the gradient of the returned parameter is
    complete before all other gradients, even if the shard holds the whole parameter.
    """
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
@all_strategies
def test_a_root_that_returns_a_parameter(rank, world, strategy, use_orig_params):
    compare(
        rank,
        Temperature,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
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
