"""Tests of wrap policies: fsdpc makes units of the same modules as torch's own class."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from toys import Block, clean, compare_training, toy, wrap


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 9))])
        self.table = nn.ModuleDict({"a": nn.Linear(9, 3), "norm": nn.BatchNorm1d(3)})
        self.own = nn.Parameter(torch.zeros(5))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)),
        nn.Flatten(),
        nn.Linear(20, 2),
    )


MODELS = {"toy": toy, "attention": Attention, "conv": conv_net}
size = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
POLICIES = {
    "always": always_wrap_policy,
    "size": size,
    "size of leaves": functools.partial(
        size_based_auto_wrap_policy, min_num_params=10, force_leaf_modules={nn.Sequential}
    ),
    "transformer": functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.MultiheadAttention}
    ),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: hasattr(module, "bias")
    ),
    "classes": ModuleWrapPolicy({Block, nn.Linear, nn.Conv2d}),
    "custom": CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        if isinstance(m, nn.Linear)
        else isinstance(m, nn.Sequential)
    ),
    "or": functools.partial(
        _or_policy, policies=[size, ModuleWrapPolicy({nn.Linear, nn.LayerNorm})]
    ),
}


def units_of(engine, module, **options):
    """Return the clean name of each unit, the root's too, with its strategy and mixed precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap(engine, module, **options)
    cls = type(model)
    return {
        clean(name + ".").rstrip("."): (m.sharding_strategy, m.mixed_precision)
        for name, m in model.named_modules()
        if isinstance(m, cls)
    }


@ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_modules_are_wrapped(rank, world, policy):
    precisions = [None, MixedPrecision(param_dtype=torch.bfloat16)]
    for build, mixed in itertools.product(MODELS.values(), precisions):
        if mixed and (policy == "size of leaves" or (policy == "size" and build is Attention)):
            continue  # torch also wraps inside forced leaves here; another test checks fsdpc
        got, expected = (
            units_of(
                engine,
                build(),
                auto_wrap_policy=POLICIES[policy],
                mixed_precision=mixed,
                use_orig_params=True,
            )
            for engine in ("fsdpc", "torch.distributed.fsdp")
        )
        assert got == expected, build.__name__
        assert len(got) > 1 or build is not toy or policy == "custom"


@ranks(2)
def test_ignored_modules_are_not_wrapped(rank, world):
    for policy in (always_wrap_policy, ModuleWrapPolicy({nn.Linear, nn.LayerNorm})):
        got, expected = (
            units_of(engine, model, auto_wrap_policy=policy, ignored_modules=[model.blocks[0]])
            for engine in ("fsdpc", "torch.distributed.fsdp")
            for model in [toy()]
        )
        assert got == expected
        assert not any(name.startswith("blocks.0.") for name in got)


@ranks(2)
def test_a_full_precision_class_inside_a_forced_leaf_is_still_found(rank, world):
    """Inside of a forced leaf, only modules of the class that must stay in fp32 are wrapped."""
    policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=1, force_leaf_modules={nn.Sequential}
    )
    model = nn.ModuleDict({"leaf": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))})
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    units = units_of("fsdpc", model, auto_wrap_policy=policy, mixed_precision=mixed)
    assert set(units) == {"", "leaf.1"}
    assert units["leaf.1"][1] == MixedPrecision()


@ranks(2)
def test_a_module_at_two_places_is_one_unit_at_both(rank, world):
    for policy in (ModuleWrapPolicy({nn.Linear}), always_wrap_policy):
        shared = nn.Linear(3, 3)
        model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
        model = wrap("fsdpc", model, auto_wrap_policy=policy)
        first, second = model.module["a"], model.module["b"]
        first, second = (getattr(m, "module", m) for m in (first, second))
        assert first[0] is second[0] and type(first[0]) is type(model)


class Shared(nn.Module):
    """A model with one layer that is registered at three places, and one more layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), self.first)
        self.again = self.first

    def forward(self, x):
        return self.again(self.middle(torch.tanh(self.first(x))))


BY_LINEAR = {
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is nn.Linear),
    "transformer": functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}
    ),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=10),
    "classes": ModuleWrapPolicy({nn.Linear}),
}


@ranks(2)
@pytest.mark.parametrize("policy", list(BY_LINEAR))
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_module_at_several_places_is_one_unit(rank, world, policy, use_orig_params):
    """The shared layer is registered twice in the root and once in a child of the root."""
    torch.manual_seed(0)
    plain = Shared()

    def sharded(module):
        options = {"auto_wrap_policy": BY_LINEAR[policy], "use_orig_params": use_orig_params}
        return wrap("fsdpc", module, **options)

    def batch(step):
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step))

    model = compare_training(
        "fsdpc", plain, sharded, batch, loss_of=lambda m, x: m(x).square().mean()
    )
    inner = model.module
    assert inner.first is inner.again is inner.middle[1] and type(inner.first) is type(model)
    assert len(type(model).fsdp_modules(model)) == 3
