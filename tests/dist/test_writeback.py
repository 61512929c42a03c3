"""Tests of what users do to sharded parameters and gradients outside of a step: they assign new
data and other parameters, clear, zero and replace gradients, change flags, and delete parameters.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import Replicate, distribute_tensor
from toys import (
    Reference,
    Toy,
    check_equal,
    check_gradients,
    check_parameters,
    full_gradients,
    full_parameters,
    loss_of,
    shard_blocks,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

import fsdpc

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
STRATEGIES = pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)
NO_SHARD = ShardingStrategy.NO_SHARD


def sharded(engine="fsdpc", **options):
    options.setdefault("use_orig_params", True)
    return wrap_blocks(engine, toy(), **options)


def by_name(model):
    strip = "_fsdp_wrapped_module."
    return {name.replace(strip, ""): p for name, p in model.named_parameters()}


def loss_equals(model, reference, rank, step, what):
    """Check that the next forward, and every way of reading full values, give the reference's
    values."""
    check_equal(
        {"loss": loss_of(model, tokens(rank, step)).detach()},
        {"loss": loss_of(reference, tokens(rank, step)).detach()},
        what,
        rtol=1e-6,
    )
    check_equal(
        full_parameters(model), {n: p.detach() for n, p in reference.named_parameters()}, what
    )


# --- parameters ----------------------------------------------------------------------------------


@ranks(1, 2, 3)
@BOTH
@STRATEGIES
def test_data_of_the_same_shape(rank, world, engine, use_orig_params, strategy):
    if engine != "fsdpc" and not use_orig_params:
        pytest.skip("torch looks for it with use_orig_params only")
    model = sharded(engine, use_orig_params=use_orig_params, sharding_strategy=strategy)
    plain = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for p in model.parameters():
            p.data = p.data * 1.5
        for p in plain.parameters():
            p.data *= 1.5
        loss_equals(model, plain, rank, step, f"step {step}")
        optimizer.step()  # without gradients, no parameter changes
        optimizer.zero_grad()


@ranks(2)
@STRATEGIES
def test_an_optimizer_steps_new_data(rank, world, strategy):
    """If new data is assigned between backward and step, the optimizer changes the new data, and
    the next forward uses it."""
    model = sharded(sharding_strategy=strategy)
    reference = Reference(toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.master.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        for p in model.parameters():
            p.data = p.data.clone()  # between backward and step
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        check_parameters("fsdpc", model, reference, f"step {step}")


@ranks(2, 3)
@STRATEGIES
def test_whole_values_on_every_rank(rank, world, strategy):
    """A program cannot know how a parameter is sharded, so full values may be assigned too."""
    model = sharded(sharding_strategy=strategy)
    other = toy(seed=5)
    for name, p in by_name(model).items():
        p.data = other.get_parameter(name).detach().clone()
    loss_equals(model, other, rank, 0, "whole values")
    shapes = {name: p.shape for name, p in by_name(model).items()}
    expected = {name: p.shape for name, p in by_name(sharded(sharding_strategy=strategy)).items()}
    assert shapes == expected, "sharded again"


@ranks(2, 3)
def test_data_of_another_dtype_is_cast(rank, world):
    model, plain = sharded(), toy()
    for p in model.parameters():
        p.data = p.data.bfloat16()
    for p in plain.parameters():
        p.data = p.data.bfloat16().float()
    loss_equals(model, plain, rank, 0, "cast")
    assert all(p.dtype == torch.float32 for p in model.parameters())


@ranks(2)
@BOTH
def test_another_shape_is_refused_by_name(rank, world, use_orig_params):
    model = sharded(use_orig_params=use_orig_params)
    name, param = list(by_name(model).items())[-1]
    param.data = torch.zeros(4, 5)
    what = name if use_orig_params else "norm.weight"  # the first parameter in the flat parameter
    text = r"(?s)Cannot writeback when the parameter shape changes"
    text += rf".*\[4, 5\].*'{what}' of unit .*rank"
    with pytest.raises(RuntimeError, match=text):
        model(tokens(rank, 0))
    with pytest.raises(RuntimeError, match=text):
        full_parameters(model)


@ranks(2)
@BOTH
def test_initialising_shards_in_place(rank, world, engine, use_orig_params):
    model, plain = sharded(engine, use_orig_params=use_orig_params), toy()
    for m in (model, plain):
        for p in m.parameters():
            nn.init.constant_(p, 0.25)
    loss_equals(model, plain, rank, 0, "initialised")


@ranks(2, 3)
@STRATEGIES
def test_another_parameter_in_its_place(rank, world, engine, strategy):
    """After the assignment, the unit uses the new parameter object: the new parameter is sharded
    and gets gradients, and a new optimizer can step it."""
    model = sharded(engine, sharding_strategy=strategy)
    old = model.head.weight
    loss_of(model, tokens(rank, 0)).backward()
    model.zero_grad()
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2.0)
    new = model.head.weight
    plain = toy()
    plain.head.weight.data *= 2.0
    reference = Reference(plain)
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
    assert model.head.weight is new and any(p is new for p in model.parameters())
    assert not any(p is old for p in model.parameters())
    check_gradients(engine, model, reference, "of the new parameter")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.master.parameters(), lr=0.1).step()
    check_equal(full_parameters(model), reference.parameters(), "stepped", rtol=1e-6)


@ranks(2, 3)
def test_a_whole_parameter_in_its_place_and_frozen(rank, world):
    model, plain = sharded(), toy()
    for m in (model, plain):
        m.norm.weight = nn.Parameter(torch.arange(6.0), requires_grad=False)
    reference = Reference(plain)
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, "one frozen")
    assert model.norm.weight.grad is None
    check_parameters("fsdpc", model, reference, "replaced")


class Tied(Toy):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


@ranks(2)
def test_tied_parameters_change_together(rank, world):
    model = wrap("fsdpc", Tied(), use_orig_params=True)
    replacement = nn.Parameter(torch.ones(13, 6))
    model.embed.weight = replacement
    with pytest.raises(NotImplementedError, match=r"(?s)shared parameters.*'embed\.weight'"):
        model(tokens(rank, 0))
    model.head.weight = replacement
    loss_of(model, tokens(rank, 0)).backward()
    assert model.head.weight is replacement and model.embed.weight is replacement
    assert torch.equal(full_parameters(model)["embed.weight"], torch.ones(13, 6))


@ranks(2)
def test_tying_after_wrapping_is_refused(rank, world):
    model = sharded()
    model.head.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"'head\.weight'.*tie parameters before wrapping"):
        model(tokens(rank, 0))


@ranks(2)
@pytest.mark.parametrize("how", ["delete", "none"])
def test_a_deleted_parameter_is_named(rank, world, how):
    from fsdpc import StateError

    model = sharded()
    loss_of(model, tokens(rank, 0)).backward()
    if how == "delete":
        del model.blocks[0].module.up.bias
    else:
        model.blocks[0].module.up.bias = None
    with pytest.raises(StateError, match=r"'up\.bias' of unit 'blocks\.0' is no longer registered"):
        model(tokens(rank, 0))


@ranks(2)
@pytest.mark.parametrize("how", ["parametrize", "prune"])
def test_a_parametrization_after_wrapping_says_the_way_out(rank, world, how):
    from torch.nn.utils import parametrize, prune

    from fsdpc import StateError

    model = sharded()
    up = model.blocks[0].module.up
    if how == "parametrize":
        parametrize.register_parametrization(up, "weight", torch.nn.Tanh())
    else:
        prune.identity(up, "weight")
    with pytest.raises(StateError, match=r"'up\.weight' of unit .*apply them before wrapping"):
        loss_of(model, tokens(rank, 0)).backward()


# --- gradients -----------------------------------------------------------------------------------


@ranks(2, 3)
@BOTH
@STRATEGIES
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_between_no_sync_passes(rank, world, use_orig_params, strategy, mixed, set_to_none):
    """zero_grad discards the gradients that no_sync has accumulated, whether it sets gradients to
    None or to zeros."""
    options = {}
    if mixed:
        options["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    one, two = (
        sharded(use_orig_params=use_orig_params, sharding_strategy=strategy, **options)
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for round_ in range(2):
        with one.no_sync():
            loss_of(one, tokens(rank, 9)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        for model in (one, two):
            with model.no_sync():
                loss_of(model, tokens(rank, round_, 0)).backward()
            loss_of(model, tokens(rank, round_, 1)).backward()
        check_equal(full_gradients(one), full_gradients(two), f"round {round_}")
        optimizer.zero_grad(set_to_none=set_to_none)
        two.zero_grad(set_to_none=True)


@ranks(2, 3)
@BOTH
def test_what_waits_stays_when_zeros_are_scaled(rank, world, use_orig_params):
    """Clipping and scaling ``grad`` between no_sync passes do not change the gradients that no_sync
    has accumulated."""
    one, two = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    for model in (one, two):
        with model.no_sync():
            loss_of(model, tokens(rank, 0, 0)).backward()
    for p in one.parameters():
        assert p.grad is not None and not p.grad.any()
        if p.grad.numel():
            p.grad.mul_(0.5).clamp_(-1.0, 1.0)
    for model in (one, two):
        loss_of(model, tokens(rank, 0, 1)).backward()
    check_equal(full_gradients(one), full_gradients(two), "scaled")


@ranks(2)
def test_one_parameter_zeroed_between_no_sync_passes(rank, world):
    model = sharded(sharding_strategy=NO_SHARD)
    reference = Reference(toy(), groups=[[0], [1]])
    with model.no_sync():
        loss_of(model, tokens(rank, 0, 0)).backward()
    reference.backward(tokens(rank, 0, 0), sync=False)
    by_name(model)["head.weight"].grad.zero_()
    index = [n for n, _ in reference.master.named_parameters()].index("head.weight")
    reference.pending[index] = None
    loss_of(model, tokens(rank, 0, 1)).backward()
    reference.backward(tokens(rank, 0, 1))
    check_gradients("fsdpc", model, reference, "one zeroed")


@ranks(2)
@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
def test_sums_then_waiting_then_zeroed(rank, world, use_orig_params, set_to_none):
    """zero_grad discards the gradients of a synchronized pass and of a pass under no_sync: a
    further pass of each kind gives the gradients of a fresh model."""
    one, two = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    loss_of(one, tokens(rank, 7)).backward()
    with one.no_sync():
        loss_of(one, tokens(rank, 8)).backward()
    one.zero_grad(set_to_none=set_to_none)
    for model in (one, two):
        with model.no_sync():
            loss_of(model, tokens(rank, 0, 0)).backward()
        loss_of(model, tokens(rank, 0, 1)).backward()
    check_equal(full_gradients(one), full_gradients(two), "after both")


@ranks(2, 3)
@pytest.mark.parametrize("sync", [True, False])
def test_some_gradients_dropped_between_micro_batches(rank, world, sync):
    model, reference = sharded(), Reference(toy())
    for micro in range(3):
        with contextlib.nullcontext() if sync or micro == 2 else model.no_sync():
            loss_of(model, tokens(rank, 0, micro)).backward()
        reference.backward(tokens(rank, 0, micro), sync=sync or micro == 2)
        if micro == 1:
            by_name(model)["head.weight"].grad = None
            master = reference.master
            master.get_parameter("head.weight").grad = None
            index = [n for n, _ in master.named_parameters()].index("head.weight")
            reference.pending[index] = None
    check_gradients("fsdpc", model, reference, "one dropped")


@ranks(2, 3)
@BOTH
def test_a_gradient_dropped_before_the_step_stays_where_it_is(rank, world, engine, use_orig_params):
    """A parameter without a gradient is not stepped, and weight decay does not change it."""
    model = sharded(engine, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    loss_of(model, tokens(rank, 0)).backward()
    before = full_parameters(model)
    for p in model.parameters():
        p.grad = None
    optimizer.step()
    check_equal(full_parameters(model), before, "not stepped")
    loss_of(model, tokens(rank, 1)).backward()
    reference = Reference(toy())
    reference.backward(tokens(rank, 1))
    check_gradients(engine, model, reference, "next step")


@ranks(2)
@STRATEGIES
def test_a_gradient_before_the_first_backward(rank, world, strategy):
    """Backward adds to a gradient that the user put there."""
    model, reference = sharded(sharding_strategy=strategy), Reference(toy())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for p in reference.master.parameters():
        p.grad = torch.ones_like(p)
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, "added to ones")


@ranks(1)
def test_attributes_that_the_user_replaces_on_the_type(rank, world):
    """The engine calls torch's C functions for an attribute only as long as nobody has replaced
    this attribute on the parameter's type."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    plain = toy()
    field, read = torch.Tensor.grad, []

    def get(self):
        read.append(self)
        return field.__get__(self)

    def reads(step):
        del read[:]
        for each in (model, plain):
            loss_of(each, tokens(rank, step)).backward()
        return [sum(p is q for q in read) for p in model.parameters()]

    assert not any(reads(0))
    nn.Parameter.grad = property(get, field.__set__)
    try:
        assert all(reads(1))
    finally:
        del nn.Parameter.grad
    assert not any(reads(2))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    check_equal(full_gradients(model), expected, "sums of three backwards")


def rows():
    return shard_blocks(toy())


def halve(params):
    for param in params:
        param.data.mul_(0.5)


@ranks(2)
def test_weights_changed_between_forward_and_backward(rank, world):
    """Backward raises an error, because the units that were released would be gathered with other
    values than the forward used."""
    wrong = "was changed on rank . between its forward and this backward"
    makes = {"original": sharded, "flat": lambda: sharded(use_orig_params=False), "rows": rows}
    for kind, make in makes.items():
        model = make()
        params = list(model.parameters())
        loss = loss_of(model, tokens(rank, 0))
        dist.barrier()  # a rank that is late in its forward must not see the change
        halve(params)
        with pytest.raises(fsdpc.StateError, match=wrong):
            loss.backward()
        if kind == "rows":  # every rank has a shard of each parameter
            block = list(model.blocks[1].parameters())
            for change in (lambda p: p.data.mul_(2), torch.no_grad()(lambda p: p.mul_(2))):
                loss = loss_of(model, tokens(rank, 0))
                dist.barrier()
                change(block[2])
                with pytest.raises(fsdpc.StateError, match=wrong):
                    loss.backward()
            loss = loss_of(model, tokens(rank, 0))
            dist.barrier()
            local = block[4]._local_tensor.data.view(-1)
            local[len(local) // 3] += 1  # FSDPC_POISON=1 compares a digest of all elements
            with pytest.raises(fsdpc.StateError, match=wrong):
                loss.backward()
            y = model.blocks[0](torch.ones(2, 6)).sum()  # does not use block 1
            dist.barrier()
            halve(block)
            y.backward()
        loss = loss_of(model, tokens(rank, 1))
        dist.barrier()
        halve(params)
        for param in params:  # restore the weights, as after an evaluation with other weights
            param.data.mul_(2)
        loss.backward()
        assert all(p.grad is not None for p in params if p.numel() > 0), kind


@ranks(2)
def test_data_assigned_to_a_dtensor(rank, world):
    model, average = rows(), rows()
    plain = toy()
    with torch.no_grad():
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.mul_(3), other.mul_(3)
    pairs = zip(toy().parameters(), plain.parameters(), strict=True)
    expected = [0.9 * a + 0.1 * b for a, b in pairs]
    for one, other in zip(average.parameters(), model.parameters(), strict=True):
        one.data = 0.9 * one.data + 0.1 * other.data
    for value, one in zip(expected, average.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), value.detach())
    with torch.no_grad():
        for one, value in zip(plain.parameters(), expected, strict=True):
            one.copy_(value)
    assert torch.equal(loss_of(average, tokens(0, 0)), loss_of(plain, tokens(0, 0)))
    param = next(average.parameters())
    whole = param.full_tensor().detach()
    param.data = distribute_tensor(whole * 2, param.device_mesh, [Replicate()])
    assert torch.equal(param.full_tensor(), whole * 2)
    with pytest.raises(ValueError, match="set to a Tensor of shape .*assign a DTensor"):
        param.data = whole
    loss_of(average, tokens(rank, 0)).backward()
    param.grad.data = param.grad.data * 0
    assert not param.grad.full_tensor().any()
    loss_of(average, tokens(rank, 0)).backward()
    assert param.grad.full_tensor().any()
