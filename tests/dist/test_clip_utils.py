"""Tests of torch.nn.utils' gradient clipping on sharded parameters:
every rank gets the norm over all shards.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks, shorten_deadlines
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import (  # imported before fsdpc replaces these functions
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from toys import Block, check_equal, full_gradients, loss_of, tokens, toy, wrap, wrap_blocks

from fsdpc import fully_shard

NORMS = [1, 2, 3.5, float("inf")]
BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
STRATEGIES = pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)


def trained(module, batch=None):
    loss_of(module, tokens(0, 0) if batch is None else batch).backward()
    return module


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


@ranks(1, 2, 3)
@BOTH
@STRATEGIES
def test_the_norm_of_a_whole_model(rank, world, use_orig_params, strategy):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, sharding_strategy=strategy)
    for norm_type, max_norm in itertools.product(NORMS, [0.1, 1e6]):
        model.zero_grad()
        plain = trained(toy())
        trained(model)
        expected = clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        close(clip_grad_norm_(model.parameters(), max_norm, norm_type), expected)
        check_equal(full_gradients(model), gradients(plain), f"{norm_type}", rtol=1e-5)


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
def test_over_a_wire(rank, world):
    model, plain = trained(wrap_blocks("fsdpc", toy())), trained(toy())
    close(clip_grad_norm_(model.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1))


@ranks(2)
@BOTH
def test_norm_and_clip_apart(rank, world, use_orig_params):
    model = trained(wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params))
    plain = trained(toy())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = get_total_norm(grads)
    close(total, get_total_norm([p.grad for p in plain.parameters()]))
    clip_grads_with_norm_(model.parameters(), 0.1, total)
    clip_grads_with_norm_(plain.parameters(), 0.1, total)
    check_equal(full_gradients(model), gradients(plain), "clipped", rtol=1e-6)
    shown = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(a is b for a, b in zip(grads, shown, strict=True))


@ranks(2)
@BOTH
def test_clipping_by_value(rank, world, use_orig_params):
    model = trained(wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params))
    plain = trained(toy())
    clip_grad_value_(model.parameters(), 0.01)
    clip_grad_value_(plain.parameters(), 0.01)
    check_equal(full_gradients(model), gradients(plain), "clamped", rtol=1e-6)


@ranks(2)
def test_a_subset_one_parameter_and_weights(rank, world):
    model = trained(wrap_blocks("fsdpc", toy(), use_orig_params=True))
    plain = trained(toy())
    for pick in (lambda m: m.blocks.parameters(), lambda m: m.head.bias, lambda m: [m.norm.weight]):
        for norm_type in NORMS:
            close(
                clip_grad_norm_(pick(model), 1e6, norm_type),
                clip_grad_norm_(pick(plain), 1e6, norm_type),
            )
    close(get_total_norm(model.parameters()), get_total_norm(plain.parameters()).detach())
    close(
        get_total_norm(
            [p.grad.detach().view(-1) for p in model.parameters() if p.grad is not None]
        ),
        get_total_norm([p.grad for p in plain.parameters()]),
    )


@ranks(2)
def test_sharded_beside_plain_and_two_models(rank, world):
    first, second = toy(), toy(seed=1)
    models = [wrap_blocks("fsdpc", m, use_orig_params=True) for m in (toy(), toy(seed=1))]
    loose, plain_loose = nn.Linear(3, 2), nn.Linear(3, 2)
    plain_loose.load_state_dict(loose.state_dict())
    for module in (loose, plain_loose):
        module(torch.ones(1, 3)).sum().backward()
    for m in (first, second, *models):
        trained(m)
    mixed = [*loose.parameters(), *models[0].parameters(), *models[1].parameters()]
    whole = [*plain_loose.parameters(), *first.parameters(), *second.parameters()]
    for norm_type in NORMS:
        close(clip_grad_norm_(iter(mixed), 1.0, norm_type), clip_grad_norm_(whole, 1.0, norm_type))
    check_equal(full_gradients(models[1]), gradients(second), "clipped", rtol=1e-5)
    close(loose.weight.grad, plain_loose.weight.grad)


def small(seed):
    """Return a model whose parameters are so small that most ranks hold no elements of them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False))


def small_models(seeds, use_orig_params, groups=(None, None, None)):
    """Return sharded and unsharded models after a backward. ``fully_shard`` shards the model of the
    last seed, and FullyShardedDataParallel shards the other models.
    """
    plain = [small(seed) for seed in seeds]
    policy = ModuleWrapPolicy({nn.Linear})
    models = [
        wrap(
            "fsdpc",
            small(seed),
            auto_wrap_policy=policy,
            use_orig_params=use_orig_params,
            process_group=group,
        )
        for seed, group in zip(seeds[:-1], groups, strict=False)
    ]
    models.append(fully_shard(small(seeds[-1])))
    for model in (*models, *plain):
        model(torch.ones(1, 2)).sum().backward()
    return models, plain


def with_gradients(params):
    return [p for p in params if p.grad is not None]


def grads_of(params):
    return [p.grad for p in with_gradients(params)]


PICKS = [
    lambda a, b, c: a.parameters(),
    lambda a, b, c: [*b.parameters()][1],
    lambda a, b, c: [*a.parameters(), *b.parameters(), *c.parameters()],
    lambda a, b, c: with_gradients([*a.parameters(), *b.parameters()]),
    lambda a, b, c: (p for p in with_gradients(b[2].parameters())),
]


@ranks(3, 4)
def test_ranks_without_gradients_beside_other_models(rank, world):
    """One or several of three models are clipped, as for a GAN, while models of an earlier
    cross-validation fold still exist.
    """
    for use_orig_params in (True, False):
        earlier = small_models([5, 6], use_orig_params)
        (a, b, c), plain = small_models([1, 2, 3], use_orig_params)
        for (number, pick), foreach in itertools.product(enumerate(PICKS), (None, False)):
            norm_type, limit = NORMS[-1 if foreach is None else 1], 0.5 / (number + 1)
            got = clip_grad_norm_(pick(a, b, c), limit, norm_type, foreach=foreach)
            expected = clip_grad_norm_(pick(*plain), limit, norm_type, foreach=foreach)
            assert got.dtype == expected.dtype
            close(got, expected)
        total = get_total_norm(grads_of(a[2].parameters()))
        close(total, get_total_norm(grads_of(plain[0][2].parameters())))
        everything = [[p for m in models for p in m.parameters()] for models in ((a, b, c), plain)]
        for own in everything:
            clip_grads_with_norm_(own, 1e-2, torch.tensor(0.1))
            clip_grad_value_(own, 1e-4)
            clip_grad_value_(own[1], 5e-5)
        for model, reference in zip((a, b), plain, strict=False):
            check_equal(full_gradients(model), gradients(reference), "clipped", rtol=1e-5)
        for p, q in zip(c.parameters(), plain[2].parameters(), strict=True):
            close(p.grad.full_tensor(), q.grad)
        del earlier


def gradients_alone(rank, world, kind):
    group = dist.new_group(list(range(world))) if kind == "groups" else None
    (a, _, c), _ = small_models([1, 2, 3], True, (None, group))
    beside = [] if kind == "groups" else [nn.Parameter(torch.ones(2))]
    for p in beside:
        p.grad = torch.ones(2)
    get_total_norm(grads_of([*a[2].parameters(), *beside]))
    a(torch.ones(1, 2))


@pytest.mark.parametrize("kind", ["groups", "beside"])
def test_gradients_alone_of_which_a_rank_has_none(kind):
    outcomes = run_ranks(gradients_alone, 3, faults=True, kind=kind)
    for outcome in outcomes:
        assert outcome.error_types[0] in ("RuntimeError", "PeerError"), outcome.error
        assert "of which rank" in outcome.error and "with all parameters" in outcome.error


@ranks(2)
def test_plain_models_are_torchs_business(rank, world):
    """Clipping of plain models runs no collective: only rank 0 calls the functions."""
    wrapped = wrap_blocks("fsdpc", toy())
    if rank == 0:
        plain = trained(toy())
        expected = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
        close(clip_grad_norm_(plain.parameters(), 1.0), expected)
        assert float(get_total_norm([])) == 0.0
    del wrapped


@ranks(4)
def test_replicas_count_once(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = wrap_blocks(
        "fsdpc",
        toy(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        process_group=(pairs[rank // 2], across[rank % 2]),
    )
    plain = trained(toy())
    trained(model)
    for norm_type in NORMS:
        close(
            clip_grad_norm_(model.parameters(), 0.5, norm_type),
            clip_grad_norm_(plain.parameters(), 0.5, norm_type),
        )


@ranks(2)
def test_units_of_different_strategies_and_dtensors_beside(rank, world):
    policy = CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.NO_SHARD}
        if isinstance(m, nn.Linear) and m.bias is not None
        else isinstance(m, Block)
    )
    model = trained(wrap("fsdpc", toy(), auto_wrap_policy=policy))
    plain = trained(toy())
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(8.0)
    shards = [distribute_tensor(values, mesh, [place]) for place in (Shard(0), Replicate())]
    assert all(isinstance(shard, DTensor) for shard in shards)
    for norm_type in NORMS:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        close(
            get_total_norm([*shards, *grads], norm_type),
            get_total_norm([values, values, *(p.grad for p in plain.parameters())], norm_type),
        )


@ranks(2)
@BOTH
def test_gradients_that_the_user_put_there(rank, world, use_orig_params):
    model = trained(wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params))
    plain = trained(toy())
    for p in model.parameters():
        if p.grad is None:
            assert p.numel() == 0
        elif rank == 0:
            p.grad = p.grad * 3.0
        else:
            p.grad.data = p.grad.data * 3.0
    for p in plain.parameters():
        p.grad *= 3.0
    close(clip_grad_norm_(model.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1))
    check_equal(full_gradients(model), gradients(plain), "replaced", rtol=1e-5)


@ranks(2)
@BOTH
def test_gradients_in_low_precision(rank, world, use_orig_params):
    model = wrap_blocks(
        "fsdpc",
        toy(),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True),
    )
    plain = trained(toy().bfloat16())
    trained(model)
    got = clip_grad_norm_(model.parameters(), 0.1)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, clip_grad_norm_(plain.parameters(), 0.1), rtol=0.02, atol=0)


@ranks(2)
def test_what_is_not_finite(rank, world):
    for value in ("nan", "inf"):
        model = trained(wrap_blocks("fsdpc", toy()))
        if rank == 1:
            model.params[0].grad[0] = float(value)
        for norm_type in NORMS:
            with pytest.raises(RuntimeError, match="is non-finite"):
                clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
            total = get_total_norm([p.grad for p in model.parameters()], norm_type)
            assert total.isnan() if value == "nan" else total.isinf()


@ranks(2)
def test_orders_below_zero_are_refused(rank, world):
    model = trained(wrap_blocks("fsdpc", toy()))
    with pytest.raises(ValueError, match="norm_type of sharded tensors must be >= 0"):
        clip_grad_norm_(model.parameters(), 1.0, -1.0)


@ranks(2)
def test_the_norm_of_one_ranks_shards_is_smaller(rank, world):
    model = trained(wrap_blocks("fsdpc", toy()))
    grads = [p.grad for p in model.parameters()]
    whole = get_total_norm(grads)
    local = torch.stack([grad.norm() for grad in grads]).norm()
    assert float(local) < float(whole)
    other = wrap_blocks("fsdpc", toy())
    close(get_total_norm(grads), whole)
    del other


def only_one_clips(rank, world):
    model = trained(wrap_blocks("fsdpc", toy()))
    shorten_deadlines(here=rank == 0)
    if rank == 0:
        clip_grad_norm_(model.parameters(), 1.0)
    else:
        dist.barrier()  # rank 1 waits here, and does not clip


def test_a_rank_that_does_not_come_is_named():
    outcomes = run_ranks(only_one_clips, 2, faults=True)
    assert not outcomes[0].returned
    assert "norm of sharded tensors" in outcomes[0].error and "rank 1" in outcomes[0].error


@ranks(2)
def test_models_without_the_expected_structure(rank, world):
    """fsdpc usually replaces the function inside the no_grad wrapper of torch's norm function. If
    there is no such wrapper, fsdpc replaces the function's names in torch's modules.
    """
    from torch.nn.utils import clip_grad

    inner = clip_grad._get_total_norm.__closure__[0].cell_contents

    def flat(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        with torch.no_grad():
            return inner(tensors, norm_type, error_if_nonfinite, foreach)

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = flat
    model, plain = trained(wrap_blocks("fsdpc", toy())), trained(toy())
    expected = clip_grad_norm_(plain.parameters(), 0.1)
    close(clip_grad_norm_(model.parameters(), 0.1), expected)
    close(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]), torch.tensor(0.1))
