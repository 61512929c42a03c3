"""torch's own layers inside units: parameters kept in unusual places, and groups of one rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.utils.parametrizations import weight_norm
from toys import check_equal, loss_of, summon, tokens, toy, wrap, wrap_blocks


class Lists(nn.Module):
    """A module with parameters in a ParameterList and a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.named = nn.ParameterDict({"scale": torch.randn(3)})

    def forward(self, x):
        return (x + self.several[0]) * self.named["scale"] + self.several[1]


class LastOutput(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


LAYERS = {
    "parameter list": Lists,
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
    "lstm": lambda: LastOutput(nn.LSTM(3, 4, 2)),
    "attention": lambda: nn.Sequential(
        nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    ),
    "convolution": lambda: nn.Conv1d(2, 4, 3, padding=1).to(memory_format=torch.contiguous_format),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)),
}


@ranks(2)
@pytest.mark.parametrize("name", LAYERS)
def test_training_evaluation_and_state_dict(rank, world, name):
    for use_orig_params in (True, False):
        torch.manual_seed(0)
        plain = LAYERS[name]()
        x = torch.randn(2, 2, 3)
        model = wrap("fsdpc", copy.deepcopy(plain), use_orig_params=use_orig_params)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert torch.equal(model(x), plain(x))
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        with summon(model, with_grads=True):
            got = {n: p.grad for n, p in model.named_parameters()}
        check_equal(got, {n: p.grad for n, p in plain.named_parameters()}, "grads", rtol=1e-6)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain.eval()(x))
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model(x), plain(x))


@ranks(2)
def test_hybrid_with_one_rank_a_host_still_replicates(rank, world):
    """The sharding group has one rank: parameters stay whole, and gradients are still averaged."""
    mesh = init_device_mesh("cpu", (world, 1))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = wrap_blocks("fsdpc", toy(), sharding_strategy=strategy, device_mesh=mesh)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    loss_of(model, tokens(rank, 0)).backward()
    reference = toy()
    for r in range(world):
        (loss_of(reference, tokens(r, 0)) / world).backward()
    with summon(model, with_grads=True):
        for name, p in model.named_parameters():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_group_of_its_own_keeps_a_rank_to_itself(rank, world):
    groups = [dist.new_group([r]) for r in range(world)]
    model = wrap("fsdpc", toy(), process_group=groups[rank])
    loss_of(model, tokens(rank, 0)).backward()
    reference = toy()
    loss_of(reference, tokens(rank, 0)).backward()
    with summon(model, with_grads=True):
        assert torch.equal(model.head.weight.grad, reference.head.weight.grad)
