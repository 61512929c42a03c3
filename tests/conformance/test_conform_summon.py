"""summon_full_params in its combinations, and what it refuses."""

from __future__ import annotations

import torch
from outcome import OFFLOADS_ON_THE_CPU, any_of, raises, wrong
from suite import BOTH, SHARDED, Cases, S
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from toys import Reference, difference, loss_of, toy

case = Cases(__name__, __file__)


def shapes(module):
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def fill(model, value):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


@case(over={"strategy": SHARDED, "orig": BOTH})
def whole_parameters_inside(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    with lib.FSDP.summon_full_params(model):
        inside = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert all(torch.equal(inside[n], p) for n, p in toy().named_parameters())
    return list(inside)


@case(over={"strategy": [S.FULL_SHARD, S.SHARD_GRAD_OP], "writeback": BOTH, "orig": BOTH})
def changes_inside(lib, strategy, writeback, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    with lib.FSDP.summon_full_params(model, writeback=writeback):
        fill(model, 0.5)
    return lib.full(model)


@case(over={"orig": BOTH})
def changes_without_writeback_and_sharding(lib, orig):
    """With NO_SHARD the context shows the parameters themselves, not copies."""
    model = lib.wrap(toy(), sharding_strategy=S.NO_SHARD, use_orig_params=orig)
    with lib.FSDP.summon_full_params(model, writeback=False):
        fill(model, 0.5)
    return lib.full(model)


@case()
def only_this_unit(lib):
    """recurse=False"""
    model = lib.wrap_blocks(toy())
    with lib.FSDP.summon_full_params(model, recurse=False):
        return [(n, tuple(p.shape)) for n, p in model.named_parameters() if "blocks" not in n]


@case(over={"orig": BOTH})
def a_child_alone(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    model(lib.batch())
    with lib.FSDP.summon_full_params(model.blocks[1]):
        return shapes(model.blocks[1]), lib.FSDP.fsdp_modules(model)[1].training_state


@case()
def units_below_a_plain_module(lib):
    model = nn.Sequential(lib.wrap(nn.Linear(3, 2)), nn.Linear(2, 2))
    with lib.FSDP.summon_full_params(model):
        return shapes(model)


@case()
def a_module_without_units(lib):
    model = nn.Linear(2, 2)
    with lib.FSDP.summon_full_params(model):
        return shapes(model)


@case(over={"orig": BOTH})
def rank0_only(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    with lib.FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        whole = [p.dim() for p in model.parameters()] == [p.dim() for p in toy().parameters()]
        assert whole == (lib.rank == 0)
        names = [n for n, _ in model.named_parameters()]
    return (names if lib.rank == 0 else None), lib.full(model)


@case(torch=raises(NotImplementedError), fsdpc_does="shows whole gradients")
def gradients_of_flat_parameters(lib):
    """with_grads=True and use_orig_params=False"""
    model, reference = lib.wrap_blocks(toy(), use_orig_params=False), Reference(toy())
    loss_of(model, lib.batch()).backward()
    reference.backward(lib.batch())
    with lib.FSDP.summon_full_params(model, with_grads=True):
        got = {n: p.grad.clone() for n, p in model.named_parameters()}
    text = difference(got, reference.gradients(), rtol=1e-5)
    assert not text, text


@case(over={"strategy": SHARDED})
def gradients_of_original_parameters(lib, strategy):
    model = lib.wrap_blocks(toy(), use_orig_params=True, sharding_strategy=strategy)
    loss_of(model, lib.batch()).backward()
    with lib.FSDP.summon_full_params(model, with_grads=True):
        return {n: p.grad.clone() for n, p in model.named_parameters()}


@case(over={"writeback": BOTH})
def changed_gradients(lib, writeback):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    loss_of(model, lib.batch()).backward()
    with lib.FSDP.summon_full_params(model, with_grads=True, writeback=writeback):
        for p in model.parameters():
            p.grad.mul_(3)
    return lib.gradients(model)


@case()
def gradients_that_are_not_there(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    with lib.FSDP.summon_full_params(model, with_grads=True):
        return [p.grad is None for p in model.parameters()]


@case(torch=raises(NotImplementedError), fsdpc_does="shows whole gradients")
def gradients_with_offload(lib):
    """with_grads=True and offload_to_cpu=True"""
    model = lib.wrap(toy(), use_orig_params=True)
    loss_of(model, lib.batch()).backward()
    with lib.FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True):
        assert all(p.grad.shape == p.shape for p in model.parameters())


@case(torch=raises(NotImplementedError), fsdpc_does="works")
def offload_without_sharding(lib):
    """offload_to_cpu=True under NO_SHARD"""
    model = lib.wrap(toy(), sharding_strategy=S.NO_SHARD)
    with lib.FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False):
        assert torch.equal(model.head.weight, toy().head.weight)


@case(
    torch=OFFLOADS_ON_THE_CPU,
    fsdpc_does="shows valid copies",
    over={"rank0": BOTH},
)
def offload_to_cpu(lib, rank0):
    """summon_full_params(offload_to_cpu=True)"""
    model = lib.wrap_blocks(toy())
    with lib.FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False, rank0_only=rank0):
        if lib.rank == 0 or not rank0:
            assert torch.equal(model.head.weight.detach(), toy().head.weight.detach())


@case()
def offload_everywhere_is_warned_of(lib):
    model = lib.wrap(nn.ReLU())
    with lib.FSDP.summon_full_params(model, offload_to_cpu=True):
        pass
    return lib.warned("offload_to_cpu=True and rank0_only=False")


@case()
def inside_a_forward_of_the_same_unit(lib):
    model, kinds = lib.wrap(toy()), []

    def summon(module, args):
        with lib.FSDP.summon_full_params(model):
            pass

    model.head.register_forward_pre_hook(
        lambda m, a: kinds.append(lib.refuses(AssertionError, summon, m, a))
    )
    model(lib.batch())
    return kinds


@case()
def between_forward_and_backward(lib):
    model = lib.wrap_blocks(toy())
    loss = loss_of(model, lib.batch())
    values = lib.full(model)
    loss.backward()
    return values, lib.gradients(model)


@case()
def between_backward_and_step(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, lib.batch()).backward()
    lib.full(model)
    optimizer.step()
    return lib.full(model)


@case()
def whole_values_in_functions(lib):
    model = lib.wrap_blocks(toy())
    with lib.FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        return nn.functional.linear(torch.ones(6), model.head.weight)


@case(
    torch=any_of(raises(AssertionError), wrong("losses")),
    over={"orig": BOTH},
    fsdpc_does="runs on the whole parameters, and trains on",
)
def a_forward_inside(lib, orig):
    """model(x) inside summon_full_params, then training"""
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    with lib.FSDP.summon_full_params(model), torch.no_grad():
        inside = model(lib.batch())
    assert torch.allclose(inside, toy()(lib.batch())), "another output"
    got = lib.train(model)["losses"]
    expected = lib.train(lib.wrap_blocks(toy(), use_orig_params=orig))["losses"]
    pairs = zip(got, expected, strict=True)
    assert all(torch.allclose(a, b) for a, b in pairs), f"losses {got}, not {expected}"


@case()
def a_method_of_the_wrapped_module_inside(lib):
    class Coder(nn.Linear):
        def encode(self, x):
            return x @ self.weight

    model = lib.wrap(Coder(3, 3))
    with lib.FSDP.summon_full_params(model), torch.no_grad():
        return model.encode(torch.ones(1, 3))


@case(over={"orig": BOTH})
def training_goes_on_after_changes(lib, orig):
    model = lib.wrap_blocks(toy(), use_orig_params=orig)
    first = lib.train(model, steps=1)
    with lib.FSDP.summon_full_params(model), torch.no_grad():
        model.head.weight.add_(0.25)
    return first, lib.train(model, steps=1)


@case()
def initialising_inside(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    with lib.FSDP.summon_full_params(model):
        torch.manual_seed(5)
        for p in model.parameters():
            nn.init.normal_(p)
    return lib.full(model)


@case()
def an_exception_inside(lib):
    model = lib.wrap_blocks(toy())
    try:
        with lib.FSDP.summon_full_params(model, writeback=False):
            raise KeyError("mine")
    except KeyError:
        pass
    return lib.train(model)


@case()
def storage_precision_inside(lib):
    """With mixed precision the context shows unrounded values in the dtype of the shards."""
    model = lib.wrap_blocks(toy(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model(lib.batch())
    values = lib.full(model)
    assert all(torch.equal(values[n], p) for n, p in toy().named_parameters())
    return {v.dtype for v in values.values()}


@case()
def buffers_stay_as_they_are(lib):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = lib.wrap(
        model,
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16, _module_classes_to_ignore=()),
    )
    model.check_is_root()
    with lib.FSDP.summon_full_params(model):
        return [(n, b.dtype) for n, b in model.named_buffers()]


@case()
def requires_grad_inside(lib):
    model = toy()
    model.blocks[0].requires_grad_(False)
    model = lib.wrap_blocks(model)
    with lib.FSDP.summon_full_params(model):
        return [(n, p.requires_grad) for n, p in model.named_parameters()]


@case(over={"orig": BOTH})
def kinds_of_parameters_inside(lib, orig):
    model = lib.wrap(toy(), use_orig_params=orig)
    with lib.FSDP.summon_full_params(model):
        return [type(p).__name__ for p in model.parameters()]


@case()
def twice_in_a_row(lib):
    model = lib.wrap_blocks(toy())
    for value in (0.5, 0.25):
        with lib.FSDP.summon_full_params(model):
            fill(model, value)
    return lib.full(model)


@case()
def the_state_inside_and_after(lib):
    model = lib.wrap_blocks(toy())
    with lib.FSDP.summon_full_params(model):
        inside = [m.training_state for m in lib.FSDP.fsdp_modules(model)]
    return inside, [m.training_state for m in lib.FSDP.fsdp_modules(model)]


test_torch, test_fsdpc = case.tests()
