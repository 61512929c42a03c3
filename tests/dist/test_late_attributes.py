"""Attributes of released modules: their parameters are there, and their values are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import ranks
from late import FULL, GRAD_OP, POISON, Smooth, Stack, batch, both_ways, compare, squares
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import wrap, wrap_blocks

import fsdpc


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


NO_SHARD = ShardingStrategy.NO_SHARD
all_strategies = pytest.mark.parametrize(
    "strategy", [FULL, GRAD_OP, NO_SHARD], ids=lambda s: s.name
)


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
    """A momentum encoder that the training forward moves itself: BYOL, MoCo, DINO."""

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
    torch.manual_seed(0)
    compare(
        TiedByHand(),
        lambda m: wrap_blocks("fsdpc", m, nn.Linear, Smooth, sharding_strategy=GRAD_OP),
        lambda step: batch(rank, step),
        loss_of=squares,
    )


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
