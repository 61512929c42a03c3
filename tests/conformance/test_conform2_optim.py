"""Optimizers, clipping and scaling of sharded parameters."""

from __future__ import annotations

import math

import torch
from outcome import HANGS, any_of, raises, wrong
from rows_library import RowsLibrary, linear, whole
from suite import BOTH, Cases
from torch import nn
from torch.distributed.tensor import DTensor
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": dict(lr=0.1, momentum=0.9),
    "Adam": dict(lr=1e-2, eps=1e-3),
    "AdamW": dict(lr=1e-2, eps=1e-3, weight_decay=0.1),
    "Adagrad": dict(lr=1e-2, eps=1e-3),
    "RMSprop": dict(lr=1e-3, eps=1e-3),
    "NAdam": dict(lr=1e-2, eps=1e-3),
    "Adamax": dict(lr=1e-2, eps=1e-3),
    "Adadelta": dict(lr=1.0),
    "RAdam": dict(lr=1e-2, eps=1e-3),
    "ASGD": dict(lr=1e-2),
}


@case(over={"name": list(OPTIMIZERS), "foreach": BOTH}, rtol=1e-4)
def optimizers(lib, name, foreach):
    model = lib.shard_blocks(toy())
    kind = getattr(torch.optim, name)
    return lib.full_after(
        model, optimizer=kind(model.parameters(), foreach=foreach, **OPTIMIZERS[name])
    )


@case(
    torch=raises(NotImplementedError, "sharding strategy"),
    over={"name": ["SGD", "Adagrad"]},
    rtol=1e-4,
)
def fused_optimizers_that_dtensor_does_not_know(lib, name):
    """SGD and Adagrad with fused=True"""
    model = lib.shard_blocks(toy())
    kind = getattr(torch.optim, name)
    return lib.full_after(model, optimizer=kind(model.parameters(), fused=True, lr=1e-2))


@case()
def a_step_that_hooks_watch(lib):
    """Hooks of the optimizer see DTensors, before the step and after it."""
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def look(optimizer, args, kwargs):
        params = optimizer.param_groups[0]["params"]
        states = [value for state in optimizer.state.values() for value in state.values()]
        seen.append(
            (len(states), *(sum(isinstance(v, DTensor) for v in x) for x in (params, states)))
        )

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    lib.full_after(model, optimizer=optimizer, count=2)
    return seen


@case()
def gradients_and_states_of_other_objects(lib):
    """A step accepts assigned gradients, loaded states, and a parameter that has no gradient."""
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        lib.resharded(model)
        params = list(model.parameters())
        for number, param in enumerate(params):
            param.grad = None if number == 1 else param.grad * 2
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    return lib.full(model)


@case()
def an_optimizer_of_the_users_class(lib):
    """A subclass of AdamW sees DTensors in its step."""
    seen = []

    class Watching(torch.optim.AdamW):
        def _init_group(self, group, params, *rest):
            result = super()._init_group(group, params, *rest)
            seen.append(all(isinstance(p, DTensor) for p in params))
            return result

    model = lib.shard_blocks(toy())
    return lib.full_after(model, optimizer=Watching(model.parameters(), eps=1e-3), count=1), seen


@case(over={"name": ["Adam", "AdamW"]}, rtol=1e-4)
def fused_optimizers(lib, name):
    model = lib.shard_blocks(toy())
    kind = getattr(torch.optim, name)
    return lib.full_after(model, optimizer=kind(model.parameters(), fused=True, **OPTIMIZERS[name]))


@case(over={"amsgrad": BOTH, "maximize": BOTH})
def variants_of_adam(lib, amsgrad, maximize):
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-2, eps=1e-3, amsgrad=amsgrad, maximize=maximize
    )
    return lib.full_after(model, optimizer=optimizer)


@case(over={"fused": BOTH})
def states_of_an_optimizer(lib, fused):
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    loss_of(model, lib.batch()).backward()
    optimizer.step()
    return [
        {key: (type(v).__name__, tuple(v.shape), str(v.dtype)) for key, v in state.items()}
        for state in optimizer.state.values()
    ]


@case(over={"kind": ["LambdaLR", "OneCycleLR", "CosineAnnealingLR"]})
def schedules(lib, kind):
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lr = torch.optim.lr_scheduler
    made = {
        "LambdaLR": lambda: lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "OneCycleLR": lambda: lr.OneCycleLR(optimizer, 0.2, total_steps=10),
        "CosineAnnealingLR": lambda: lr.CosineAnnealingLR(optimizer, 5),
    }[kind]()
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        optimizer.step()
        made.step()
        optimizer.zero_grad()
    return lib.full(model)


@case()
def a_closure(lib):
    model = lib.shard_blocks(toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, lib.batch())
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(3)], lib.full(model)


@case()
def two_optimizers(lib):
    model = lib.shard_blocks(toy())
    blocks = {id(p) for p in model.blocks.parameters()}
    others = [p for p in model.parameters() if id(p) not in blocks]
    pair = [
        torch.optim.SGD(model.blocks.parameters(), lr=0.1),
        torch.optim.AdamW(others, lr=1e-2, eps=1e-3),
    ]
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    return lib.full(model)


@case()
def an_average_of_parameters(lib):
    """A program keeps an exponential moving average of the parameters in DTensors."""
    model = lib.shard_blocks(toy())
    average = [p.detach().clone() for p in model.parameters()]
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, p in zip(average, params, strict=True):
                old.lerp_(p, 0.1)
    return [whole(p) for p in average]


@case()
def parameters_swapped_with_their_average(lib):
    """Evaluation runs on other values; afterwards the parameters get their own values back."""
    model = lib.shard_blocks(toy())
    params = list(model.parameters())
    saved = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.mul_(0.5)
        low = model(lib.batch())
        lib.resharded(model)
        for p, value in zip(params, saved, strict=True):
            p.copy_(value)
        return low, model(lib.batch())


# --- optimizers in backward ----------------------------------------------------------------------


@case()
def hooks_after_accumulation(lib):
    model, seen = lib.shard_blocks(toy()), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, tuple(p.shape), isinstance(p.grad, DTensor)))
        )
    for step in range(2):
        loss_of(model, lib.batch(step)).backward()
    return sorted(seen)


@case()
def an_optimizer_in_backward(lib):
    model = lib.shard_blocks(toy())
    for p in model.parameters():
        optimizer = torch.optim.AdamW([p], lr=1e-2, eps=1e-3)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
    lib.resharded(model)
    return [p.grad is None for p in model.parameters()], lib.full(model)


@case()
def hooks_after_accumulation_without_sync(lib):
    model, seen = lib.shard_blocks(toy()), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    lib.backward(model, 0, 0, sync=False)
    first = len(seen)
    lib.backward(model, 0, 1)
    return first, len(seen), lib.gradients(model)


@case()
def hooks_on_the_tensor_never_fire(lib):
    model, seen = lib.shard_blocks(toy()), []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(1))
    loss_of(model, lib.batch()).backward()
    return len(seen)


@case(torch=wrong(), fsdpc_does="gives them")
def gradients_of_shards_by_autograd(lib):
    """torch.autograd.grad finds no path to torch's sharded parameters."""
    model = lib.shard_blocks(toy())
    params = list(model.parameters())
    found = torch.autograd.grad(loss_of(model, lib.batch()), params, allow_unused=True)
    assert all(grad is not None for grad in found)


# --- clipping ------------------------------------------------------------------------------------


@case(over={"norm": [1.0, 2.0, 3.0, math.inf], "limit": [0.1, 100.0], "foreach": [None, False]})
def clipping(lib, norm, limit, foreach):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    lib.resharded(model)
    total = nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=norm, foreach=foreach)
    return type(total).__name__, whole(total), lib.gradients(model)


@case(world=4)
def clipping_empty_shards(lib):
    model = lib.fully_shard(nn.Sequential(linear(1, 3), linear(2, 1)))
    model(torch.ones(1, 3) * (1 + lib.rank)).square().sum().backward()
    lib.resharded(model)
    return whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), lib.gradients(model)


@case(world=4, torch=any_of(HANGS, raises(RuntimeError)), alone=20, rtol=1e-5)
def the_largest_gradient_with_empty_shards(lib):
    """clip_grad_norm_(norm_type=inf) where a rank has no rows of a parameter"""
    model = lib.fully_shard(nn.Sequential(linear(1, 3), linear(5, 1)))
    for value in (1.0, math.nan):
        model(torch.ones(1, 3) * (value + lib.rank)).square().sum().backward()
        lib.resharded(model)
        largest = [grad.abs().max() for grad in lib.gradients(model).values()]
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=math.inf)
        assert isinstance(total, DTensor)
        if math.isnan(value):
            assert whole(total).isnan().all()
        else:
            torch.testing.assert_close(whole(total), torch.stack(largest).max())


@case()
def clipping_values(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    lib.resharded(model)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return lib.gradients(model)


@case()
def the_norm_without_clipping(lib):
    model = lib.shard_blocks(toy())
    loss_of(model, lib.batch()).backward()
    lib.resharded(model)
    return whole(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@case(raises=RuntimeError, words="non-finite", over={"value": [math.inf, math.nan]})
def a_norm_that_is_not_finite(lib, value):
    model = lib.fully_shard(linear())
    model(torch.full((1, 3), value if lib.rank else 1.0)).sum().backward()
    model.reshard()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# --- scaling -------------------------------------------------------------------------------------


@case(rtol=1e-4)
def a_scaler(lib):
    model = lib.shard_blocks(toy())
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(3):
        scaler.scale(loss_of(model, lib.batch(step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), lib.full(model)


@case(over={"where": ["all", "rank 1"]})
def a_scaler_that_finds_an_overflow(lib, where):
    """Every rank skips the step, even if only one rank's batch overflows."""
    model = lib.fully_shard(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bad = where == "all" or lib.rank == 1
    scaler.scale(model(torch.full((1, 3), math.inf if bad else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), lib.full(model)


@case(world=4)
def a_scaler_that_finds_an_overflow_in_one_shard(lib):
    """Only one rank's shard overflows; the other three ranks have finite elements or none."""
    model = lib.fully_shard(linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scale = torch.tensor([1.0, math.inf])
    scaler.scale((model(torch.ones(1, 3)) * scale).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), lib.full(model)


test_torch, test_fsdpc = case.tests()
