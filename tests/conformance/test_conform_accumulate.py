"""no_sync, gradient accumulation and clip_grad_norm_."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from outcome import raises
from suite import Cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import loss_of, toy

case = Cases(__name__, __file__)

S = ShardingStrategy
SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
BOTH = [True, False]


def backward(lib, model, micro=0, sync=True):
    with nullcontext() if sync else model.no_sync():
        loss_of(model, lib.batch(0, micro)).backward()


# --- no_sync -------------------------------------------------------------------------------------


@case(over={"strategy": SHARDED, "orig": BOTH})
def accumulation_in_no_sync(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    for micro in range(3):
        backward(lib, model, micro, sync=micro == 2)
    return lib.gradients(model)


@case(over={"pattern": ["0011", "1001", "0101", "1101"]})
def passes_with_and_without_sync(lib, pattern):
    model = lib.wrap_blocks(toy())
    for micro, sync in enumerate(pattern):
        backward(lib, model, micro, sync == "1")
    return lib.gradients(model)


@case(world=4, over={"strategy": [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2]})
def accumulation_with_replicas(lib, strategy):
    mesh = init_device_mesh("cpu", (2, 2))
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, device_mesh=mesh)
    for micro in range(2):
        backward(lib, model, micro, sync=micro == 1)
    return lib.gradients(model)


@case()
def several_passes_in_one_context(lib):
    model = lib.wrap_blocks(toy())
    with model.no_sync():
        for micro in range(2):
            loss_of(model, lib.batch(0, micro)).backward()
    backward(lib, model, 2)
    return lib.gradients(model)


@case()
def steps_after_accumulation(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(2):
        for micro in range(2):
            with nullcontext() if micro else model.no_sync():
                loss_of(model, lib.batch(step, micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model)


@case(rtol=2e-2)
def accumulation_under_mixed_precision(lib):
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = lib.wrap_blocks(toy(), mixed_precision=mixed)
    for micro in range(2):
        backward(lib, model, micro, sync=micro == 1)
    return lib.gradients(model)


@case()
def no_sync_of_an_inner_unit(lib):
    model = lib.wrap_blocks(toy())
    model(lib.batch())

    def enter():
        with model.blocks[0].no_sync():
            pass

    return lib.refuses(RuntimeError, enter, words="root")


@case()
def no_sync_inside_summon(lib):
    model = lib.wrap(toy())

    def enter():
        with model.no_sync():
            pass

    with lib.FSDP.summon_full_params(model):
        return lib.refuses(ValueError, enter)


@case()
def no_sync_before_the_first_forward(lib):
    model = lib.wrap_blocks(toy())
    with model.no_sync():
        loss_of(model, lib.batch(0, 0)).backward()
    backward(lib, model, 1)
    return lib.gradients(model), model._is_root


@case()
def no_sync_left_by_an_exception(lib):
    model = lib.wrap_blocks(toy())
    try:
        with model.no_sync():
            raise KeyError("mine")
    except KeyError:
        pass
    backward(lib, model)
    return lib.gradients(model)


@case()
def discarding_what_was_accumulated(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    backward(lib, model, 0, sync=False)
    for p in model.parameters():
        p.grad = None
    backward(lib, model, 1)
    return lib.gradients(model)


@case()
def no_sync_and_nothing_else(lib):
    """A context in which nothing happens."""
    model = lib.wrap_blocks(toy())
    with model.no_sync():
        pass
    return lib.train(model)


@case()
def frozen_parameters_in_no_sync(lib):
    model = toy()
    model.blocks[0].requires_grad_(False)
    model = lib.wrap_blocks(model, use_orig_params=True)
    for micro in range(2):
        backward(lib, model, micro, sync=micro == 1)
    return lib.gradients(model), [p.grad is None for p in model.blocks[0].parameters()]


@case()
def one_module_of_two_accumulates(lib):
    first, second = lib.wrap(nn.Linear(2, 1)), lib.wrap(nn.Linear(2, 1))
    x = torch.ones(1, 2) * (1 + lib.rank)
    with first.no_sync():
        (first(x) + second(x)).sum().backward()
    (first(x) + second(x)).sum().backward()
    return lib.gradients(first), lib.gradients(second)


# --- clip_grad_norm_ -----------------------------------------------------------------------------

NORMS = [1.0, 1.5, 2.0, 3.0, math.inf]


@case(over={"norm": NORMS, "limit": [0.1, 100.0]})
def norms_and_limits(lib, norm, limit):
    model = lib.wrap_blocks(toy())
    backward(lib, model)
    total = model.clip_grad_norm_(limit, norm_type=norm)
    return total.detach().reshape(()), lib.gradients(model)


@case(over={"strategy": SHARDED, "orig": BOTH})
def clipping_under_a_strategy(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    backward(lib, model)
    return model.clip_grad_norm_(0.1).reshape(()), lib.gradients(model)


@case(world=4)
def clipping_with_replicas(lib):
    mesh = init_device_mesh("cpu", (2, 2))
    model = lib.wrap_blocks(toy(), sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
    backward(lib, model)
    return model.clip_grad_norm_(0.1), lib.gradients(model)


@case()
def the_norm_of_the_unsharded_model(lib):
    model, reference = lib.wrap_blocks(toy()), toy()
    batch = torch.arange(10).reshape(2, 5)
    loss_of(model, batch).backward()
    loss_of(reference, batch).backward()
    norm = model.clip_grad_norm_(0.1)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert torch.allclose(norm, expected)
    return norm


@case()
def clipping_an_inner_unit(lib):
    model = lib.wrap_blocks(toy())
    backward(lib, model)
    return lib.refuses(RuntimeError, model.blocks[0].clip_grad_norm_, 1.0, words="root")


@case()
def clipping_inside_summon(lib):
    model = lib.wrap(toy())
    backward(lib, model)
    with lib.FSDP.summon_full_params(model):
        return lib.refuses(ValueError, model.clip_grad_norm_, 1.0)


@case()
def clipping_without_gradients(lib):
    model = lib.wrap_blocks(toy())
    norm = model.clip_grad_norm_(1.0)
    return norm, lib.warned("no gradients")


@case()
def clipping_gradients_of_one_rank(lib):
    """Only rank 0's shard holds the parameter."""
    model = lib.wrap(nn.Linear(1, 1, bias=False), use_orig_params=True)
    model(torch.full((1, 1), 3.0)).sum().backward()
    return model.clip_grad_norm_(1.0), lib.gradients(model)


@case()
def clipping_beside_ignored_parameters(lib):
    model = toy()
    model = lib.wrap(model, ignored_modules=[model.head])
    batch = torch.arange(10).reshape(2, 5)
    loss_of(model, batch).backward()
    return model.clip_grad_norm_(0.1), model.head.weight.grad, lib.gradients(model)


@case(torch=raises(RuntimeError, "dtype"), fsdpc_does="returns the norm in float64")
def clipping_float64_gradients(lib):
    model = lib.wrap(toy(dtype=torch.float64))
    backward(lib, model)
    assert model.clip_grad_norm_(1.0).dtype == torch.float64


@case()
def the_dtype_of_a_bf16_norm(lib):
    model = lib.wrap(toy(dtype=torch.bfloat16))
    backward(lib, model)
    return model.clip_grad_norm_(1.0).dtype


@case()
def norms_that_are_not_finite(lib):
    model = lib.wrap(nn.Linear(2, 1))
    model(torch.full((1, 2), math.inf)).sum().backward()
    norm = model.clip_grad_norm_(1.0)
    return norm, [bool(g.isfinite().all()) for g in lib.gradients(model).values()]


@case()
def norms_of_nan(lib):
    model = lib.wrap(nn.Linear(2, 1))
    model(torch.full((1, 2), math.nan if lib.rank == 1 else 1.0)).sum().backward()
    norm = model.clip_grad_norm_(1.0)
    return norm.dtype, bool(norm.isnan())


@case()
def clipping_as_positions_and_names(lib):
    model = lib.wrap(toy())
    backward(lib, model)
    first = model.clip_grad_norm_(100.0, 2)
    return first, model.clip_grad_norm_(max_norm=torch.tensor(100.0), norm_type="inf")


@case(raises=TypeError)
def clipping_without_a_limit(lib):
    lib.wrap(toy()).clip_grad_norm_()


@case()
def clipping_after_accumulation(lib):
    model = lib.wrap_blocks(toy())
    for micro in range(3):
        backward(lib, model, micro, sync=micro != 1)
    return model.clip_grad_norm_(0.1), lib.gradients(model)


@case()
def clipping_then_stepping(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        model.clip_grad_norm_(0.2)
        optimizer.step()
        optimizer.zero_grad()
    return lib.full(model)


test_torch, test_fsdpc = case.tests()
