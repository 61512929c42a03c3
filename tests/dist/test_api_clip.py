"""clip_grad_norm_ gives the unsharded model's norm and gradients, for any p and mix of units."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from combinations import subset
from harness import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from toys import Block, check_equal, full_gradients, loss_of, tokens, toy, wrap, wrap_blocks

NORMS = [1, 2, 3, 1.5, float("inf")]
STRATEGIES = list(ShardingStrategy)


def averaged_reference(batch_of_rank):
    """Return the unsharded model with the average of all ranks' gradients."""
    model = toy()
    world = dist.get_world_size()
    for rank in range(world):
        (loss_of(model, batch_of_rank(rank)) / world).backward()
    return model


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def strategy_options(strategy, world):
    if "HYBRID" not in strategy.name:
        return {"sharding_strategy": strategy}
    mesh = init_device_mesh("cpu", (world // 2, 2))
    return {"sharding_strategy": strategy, "device_mesh": mesh}


@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_norm_and_gradients(rank, world, engine, strategy):
    options = strategy_options(strategy, world)
    for use_orig_params in (True, False):
        sharded = wrap_blocks(engine, toy(), use_orig_params=use_orig_params, **options)
        for norm_type, max_norm in subset(itertools.product(NORMS, [0.1, 1e6])):
            reference = averaged_reference(lambda r: tokens(r, 0))
            sharded.zero_grad()
            loss_of(sharded, tokens(rank, 0)).backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
            got = sharded.clip_grad_norm_(max_norm, norm_type)
            assert got.dtype == torch.float32 and got.dim() == 0
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            check_equal(full_gradients(sharded), gradients(reference), "clipped", rtol=1e-5)


@ranks(2)
def test_units_of_different_strategies_and_unmanaged_parameters(rank, world, engine):
    policy = CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.NO_SHARD}
        if isinstance(m, nn.Linear) and m.bias is not None
        else isinstance(m, Block)
    )
    model = toy()
    sharded = wrap(engine, model, auto_wrap_policy=policy, ignored_states=[model.norm.weight])
    loss_of(sharded, tokens(0, 0)).backward()
    expected = toy()
    loss_of(expected, tokens(0, 0)).backward()
    for norm_type in NORMS:
        got = sharded.clip_grad_norm_(0.3, norm_type)
        torch.testing.assert_close(
            got, nn.utils.clip_grad_norm_(expected.parameters(), 0.3, norm_type), rtol=1e-5, atol=0
        )
    torch.testing.assert_close(model.norm.weight.grad, expected.norm.weight.grad)


@ranks(2)
def test_a_gradient_that_is_not_finite(rank, world):
    """NaN or infinity on one rank shows in every rank's norm; only NaN fills every gradient."""
    for value, norm_type in [("nan", 2), ("nan", float("inf")), ("inf", 1), ("inf", 2)]:
        model = wrap_blocks("fsdpc", toy())
        loss_of(model, tokens(rank, 0)).backward()
        if rank == 1:
            model.params[0].grad[0] = float(value)
        norm = model.clip_grad_norm_(1.0, norm_type)
        assert norm.isnan() if value == "nan" else norm.isinf()
        for name, grad in full_gradients(model).items():
            assert bool(grad.isnan().all()) == (value == "nan"), name


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_kept_in_low_precision(rank, world, engine, use_orig_params):
    """With keep_low_precision_grads, gradients keep the compute dtype after backward and clipping.

    The gradient is the full-precision gradient, rounded. A further backward adds to it.
    """
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    low = wrap_blocks(
        engine,
        toy(),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(**mixed, keep_low_precision_grads=True),
    )
    full = wrap_blocks(
        engine, toy(), use_orig_params=use_orig_params, mixed_precision=MixedPrecision(**mixed)
    )
    for step in range(2):
        for model in (low, full):
            loss_of(model, tokens(rank, step)).backward()
        for a, b in zip(low.parameters(), full.parameters(), strict=True):
            assert a.grad is None or a.grad.dtype == torch.bfloat16
            assert (a.grad is None) == (b.grad is None)
            if a.grad is None:
                assert a.numel() == 0
            elif step == 0:
                check_equal({"grad": a.grad}, {"grad": b.grad.to(torch.bfloat16)}, "backward")
            else:
                torch.testing.assert_close(a.grad.float(), b.grad, rtol=0.02, atol=1e-4)
    if engine == "fsdpc":
        before = [p.grad.clone() for p in low.parameters() if p.grad is not None]
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="norm"):
                low.clip_grad_norm_(0.1, wrong)
        after = [p.grad for p in low.parameters() if p.grad is not None]
        check_equal(dict(enumerate(after)), dict(enumerate(before)), "a clip that raised")
    norms = [float(model.clip_grad_norm_(0.1)) for model in (low, full)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    assert all(p.grad.dtype == torch.bfloat16 for p in low.parameters() if p.grad is not None)
    low.zero_grad()
    assert all(p.grad is None for p in low.parameters())
