"""no_sync, gradient accumulation and clip_grad_norm_."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from outcome import raises
from suite import BOTH, SHARDED, Cases, S
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toys import loss_of, toy

case = Cases(__name__, __file__)


# --- no_sync -------------------------------------------------------------------------------------


@case(over={"strategy": SHARDED, "orig": BOTH})
def accumulation_in_no_sync(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    return lib.gradients_after(model, "001")


@case(world=4, over={"strategy": [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2]})
def accumulation_with_replicas(lib, strategy):
    mesh = init_device_mesh("cpu", (2, 2))
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, device_mesh=mesh)
    return lib.gradients_after(model, "01")


@case()
def several_passes_in_one_context(lib):
    model = lib.wrap_blocks(toy())
    with model.no_sync():
        for micro in range(2):
            loss_of(model, lib.batch(0, micro)).backward()
    lib.backward(model, 0, 2)
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


@case()
def no_sync_inside_summon(lib):
    model = lib.wrap(toy())

    def enter():
        with model.no_sync():
            pass

    with lib.FSDP.summon_full_params(model):
        return lib.refuses(ValueError, enter, words="states")


@case()
def no_sync_before_the_first_forward(lib):
    model = lib.wrap_blocks(toy())
    with model.no_sync():
        loss_of(model, lib.batch(0, 0)).backward()
    lib.backward(model, 0, 1)
    return lib.gradients(model), model._is_root


@case()
def no_sync_left_by_an_exception(lib):
    model = lib.wrap_blocks(toy())
    try:
        with model.no_sync():
            raise KeyError("mine")
    except KeyError:
        pass
    lib.backward(model)
    return lib.gradients(model)


@case()
def discarding_what_was_accumulated(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    lib.backward(model, 0, 0, sync=False)
    for p in model.parameters():
        p.grad = None
    lib.backward(model, 0, 1)
    return lib.gradients(model)


@case()
def no_sync_and_nothing_else(lib):
    """An empty no_sync() context changes nothing."""
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
        lib.backward(model, 0, micro, sync=micro == 1)
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
    lib.backward(model)
    total = model.clip_grad_norm_(limit, norm_type=norm)
    return total.detach().reshape(()), lib.gradients(model)


@case(over={"strategy": SHARDED, "orig": BOTH})
def clipping_under_a_strategy(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    lib.backward(model)
    return model.clip_grad_norm_(0.1).reshape(()), lib.gradients(model)


@case()
def clipping_inside_summon(lib):
    model = lib.wrap(toy())
    lib.backward(model)
    with lib.FSDP.summon_full_params(model):
        return lib.refuses(ValueError, model.clip_grad_norm_, 1.0, words="states")


@case()
def clipping_without_gradients(lib):
    model = lib.wrap_blocks(toy())
    norm = model.clip_grad_norm_(1.0)
    return norm, lib.warned("no gradients")


@case()
def clipping_gradients_of_one_rank(lib):
    """Only the shard of rank 0 has elements of the parameter."""
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
    lib.backward(model)
    assert model.clip_grad_norm_(1.0).dtype == torch.float64


@case()
def the_dtype_of_a_bf16_norm(lib):
    model = lib.wrap(toy(dtype=torch.bfloat16))
    lib.backward(model)
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
    lib.backward(model)
    first = model.clip_grad_norm_(100.0, 2)
    return first, model.clip_grad_norm_(max_norm=torch.tensor(100.0), norm_type="inf")


@case(raises=TypeError)
def clipping_without_a_limit(lib):
    lib.wrap(toy()).clip_grad_norm_()


@case()
def clipping_after_accumulation(lib):
    model = lib.wrap_blocks(toy())
    for micro in range(3):
        lib.backward(model, 0, micro, sync=micro != 1)
    return model.clip_grad_norm_(0.1), lib.gradients(model)


test_torch, test_fsdpc = case.tests()
