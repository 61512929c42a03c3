"""Communication hooks, ShardedGradScaler, and values that a user sets under use_orig_params."""

from __future__ import annotations

import torch
import torch.distributed as dist
from outcome import raises, wrong
from suite import BOTH, Cases, S
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision
from toys import Reference, difference, loss_of, toy

case = Cases(__name__, __file__)

SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP]


# --- communication hooks -------------------------------------------------------------------------


class Calls:
    """The state of a hook: the number of its calls, and the values of ``grad.dim()``."""

    def __init__(self):
        self.count = 0
        self.dims = set()


def summing(state, grad, output=None):
    """A hook that sums over the ranks without dividing."""
    state.count += 1
    state.dims.add(grad.dim())
    if output is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(output, grad)


@case(over={"strategy": [*SHARDED, S.NO_SHARD]})
def a_hook_of_the_user(lib, strategy):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy)
    state = Calls()
    model.register_comm_hook(state, summing)
    loss_of(model, lib.batch()).backward()
    return state.count, state.dims, lib.gradients(model)


@case(over={"strategy": SHARDED, "orig": BOTH})
def the_default_reduce_scatter_hook(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    state = default_hooks.DefaultState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    return lib.train(model)


@case()
def the_default_allreduce_hook(lib):
    model = lib.wrap_blocks(toy(), sharding_strategy=S.NO_SHARD)
    state = default_hooks.DefaultState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.allreduce_hook)
    return lib.train(model)


@case(
    torch=raises(RuntimeError),
    fsdpc_does="compresses on the CPU too",
    over={"name": ["fp16_compress_hook", "bf16_compress_hook"]},
)
def compressing_hooks(lib, name):
    """The default compressing hooks"""
    model, reference = lib.wrap_blocks(toy()), Reference(toy())
    state = default_hooks.LowPrecisionState(dist.group.WORLD)
    model.register_comm_hook(state, getattr(default_hooks, name))
    loss_of(model, lib.batch()).backward()
    reference.backward(lib.batch())
    text = difference(lib.gradients(model), reference.gradients(), rtol=2e-2)
    assert not text, text


@case()
def a_hook_and_accumulation(lib):
    model = lib.wrap_blocks(toy())
    state = Calls()
    model.register_comm_hook(state, summing)
    with model.no_sync():
        loss_of(model, lib.batch(0, 0)).backward()
    between = state.count
    loss_of(model, lib.batch(0, 1)).backward()
    return between, state.count, lib.gradients(model)


@case()
def a_hook_on_every_unit(lib):
    model, state = lib.wrap_blocks(toy()), Calls()
    model.register_comm_hook(state, summing)
    return [
        (m._comm_hook is summing, m._comm_hook_state is state) for m in lib.FSDP.fsdp_modules(model)
    ]


@case(raises=AssertionError, words="already")
def a_second_hook_after_one_inside(lib):
    model = toy()
    model.head = lib.wrap(model.head)
    model.head._comm_hook = summing
    lib.wrap(model).register_comm_hook(Calls(), summing)


@case(raises=AssertionError, world=4, words="hybrid")
def a_hook_with_replicas(lib):
    mesh = init_device_mesh("cpu", (2, 2))
    model = lib.wrap(toy(), sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
    model.register_comm_hook(Calls(), summing)


@case()
def a_hook_in_a_narrow_dtype(lib):
    """The hook gets gradients in reduce_dtype."""
    seen = []

    def hook(state, grad, output):
        seen.append((grad.dtype, output.dtype))
        dist.reduce_scatter_tensor(output, grad)

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = lib.wrap(toy(), mixed_precision=mixed)
    model.register_comm_hook(None, hook)
    loss_of(model, lib.batch()).backward()
    return seen, {g.dtype for g in lib.gradients(model).values()}


# --- the scaler ----------------------------------------------------------------------------------


def scaler(lib, **options):
    return lib.submodule("sharded_grad_scaler").ShardedGradScaler(
        device="cpu", init_scale=4.0, **options
    )


@case(over={"orig": BOTH})
def scaled_steps(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), scaler(lib, growth_interval=2)
    scales = []
    for step in range(3):
        scale.scale(loss_of(model, lib.batch(step))).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        scales.append(scale.get_scale())
    return scales, lib.full(model)


@case(over={"bad": [0, 1]})
def an_infinity_on_one_rank(lib, bad):
    """All ranks skip the step if the gradient of one rank is infinite."""
    model = lib.wrap(nn.Linear(8, 4), use_orig_params=True)
    before = lib.full(model)
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), scaler(lib)
    scale.scale(model(torch.ones(1, 8)).sum()).backward()
    for p in model.parameters():
        if p.grad is not None and p.numel() and lib.rank == bad:
            p.grad[0] = float("inf")
    scale.step(optimizer)
    scale.update()
    after = lib.full(model)
    assert all(torch.equal(after[n], before[n]) for n in before)
    return scale.get_scale()


@case()
def unscaling_before_clipping(lib):
    model = lib.wrap_blocks(toy())
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), scaler(lib)
    scale.scale(loss_of(model, lib.batch())).backward()
    scale.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.1)
    scale.step(optimizer)
    scale.update()
    return norm, lib.full(model)


@case()
def unscaling_twice(lib):
    model = lib.wrap(toy())
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), scaler(lib)
    scale.scale(loss_of(model, lib.batch())).backward()
    scale.unscale_(optimizer)
    return lib.refuses(RuntimeError, scale.unscale_, optimizer)


@case(over={"dtype": [torch.float16, torch.bfloat16, torch.float32]})
def a_scaled_loss_keeps_its_dtype(lib, dtype):
    return scaler(lib).scale(torch.ones((), dtype=dtype))


@case()
def several_losses_at_once(lib):
    scale = scaler(lib)
    several = scale.scale([torch.ones(()), (torch.ones(2), torch.ones(1, dtype=torch.float16))])
    return several, list(scale.scale(iter([torch.ones(2)])))


@case(raises=ValueError)
def scaling_something_else(lib):
    scaler(lib).scale(3)


@case()
def a_scaler_that_is_off(lib):
    model = lib.wrap_blocks(toy())
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), scaler(lib, enabled=False)
    scale.scale(loss_of(model, lib.batch())).backward()
    scale.step(optimizer)
    scale.update()
    return scale.is_enabled(), scale.get_scale(), lib.full(model)


@case()
def a_scalers_state(lib):
    first, second = scaler(lib), scaler(lib)
    second.load_state_dict({**first.state_dict(), "scale": 32.0})
    return first.state_dict(), second.get_scale()


@case(torch=wrong("cuda"), fsdpc_does="takes the CPU where there is no accelerator")
def a_scaler_without_a_device(lib):
    """ShardedGradScaler() without an accelerator"""
    scale = lib.submodule("sharded_grad_scaler").ShardedGradScaler(init_scale=4.0)
    assert scale.is_enabled(), "asks for cuda, and turns itself off"
    assert scale.scale(torch.ones(())) == 4.0


# --- values that a user sets ---------------------------------------------------------------------


@case()
def initialising_sharded_parameters(lib):
    """In-place writes to model.parameters() outside of a forward change the sharded values."""
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    return lib.full(model), model(lib.batch()).detach()


@case()
def other_data_for_a_parameter(lib):
    """p.data = tensor"""
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    for p in model.parameters():
        p.data = torch.full_like(p.data, 0.125)
    return model(lib.batch()).detach(), lib.full(model)


@case()
def no_gradient_before_the_step(lib):
    """A step skips the parameters whose .grad was set to None."""
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, lib.batch()).backward()
    for name, p in model.named_parameters():
        if "norm" in name:
            p.grad = None
    optimizer.step()
    return lib.full(model)


@case()
def another_gradient_before_the_step(lib):
    """p.grad = tensor"""
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, lib.batch()).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return lib.full(model)


@case()
def gradients_scaled_by_hand(lib):
    model = lib.wrap_blocks(toy())
    loss_of(model, lib.batch()).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    return lib.gradients(model)


@case()
def freezing_between_steps(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    first = lib.train(model, steps=1)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    return first, lib.train(model, steps=1)


@case(torch=wrong("own rank"), fsdpc_does="clips by the norm of the whole model")
def clipping_by_torchs_function(lib):
    """torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"""
    model, reference = lib.wrap_blocks(toy(), use_orig_params=True), Reference(toy())
    loss_of(model, lib.batch()).backward()
    reference.backward(lib.batch())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(reference.master.parameters(), 0.1)
    assert torch.allclose(norm, expected, rtol=1e-4), "the norm of the own rank's shard"


@case(over={"orig": BOTH, "strategy": [S.FULL_SHARD, S.NO_SHARD]})
def gradients_that_the_user_keeps(lib, orig, strategy):
    """Kept .grad tensors do not change in the next backward after zero_grad."""
    model = lib.wrap_blocks(toy(), use_orig_params=orig, sharding_strategy=strategy)
    lists, copies = [], []
    for step in range(3):
        loss_of(model, lib.batch(step)).backward()
        lists.append([p.grad for p in model.parameters() if p.grad is not None])
        copies.append([grad.clone() for grad in lists[-1]])
        model.zero_grad()
    for grads, values in zip(lists, copies, strict=True):
        assert all(map(torch.equal, grads, values)), "values changed"
    return lib.train(model)


test_torch, test_fsdpc = case.tests()
