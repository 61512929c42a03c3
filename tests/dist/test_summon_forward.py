"""summon_full_params around a forward, in its hooks, nested, between forward and backward."""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import (
    Reference,
    Toy,
    check_equal,
    check_gradients,
    full_parameters,
    loss_of,
    summon,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
STRATEGIES = pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def trains(model, rank, what):
    """The model works as before: one step's gradients."""
    model.zero_grad()
    reference = Reference(toy())
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, what)


@ranks(1, 2, 3)
@BOTH
@STRATEGIES
@pytest.mark.parametrize("recurse", [True, False])
def test_forward_on_what_is_shown(rank, world, use_orig_params, strategy, recurse):
    """Evaluation on values that the user changed for a while, as with averaged weights."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, sharding_strategy=strategy)
    plain = toy()
    with torch.no_grad():
        if world > 1 and strategy is not ShardingStrategy.NO_SHARD:
            with summon(model, writeback=False, recurse=recurse):
                model.head.weight.mul_(2.0)
                plain.head.weight.mul_(2.0)
                for _ in range(2):
                    got = model(tokens(rank, 0))
                    check_equal({"": got}, {"": plain(tokens(rank, 0))}, "changed", rtol=1e-6)
                    assert model.head.weight.shape == (13, 6), "still shown"
            plain.head.weight.div_(2.0)
        with summon(model, recurse=recurse):
            got = model(tokens(rank, 0))
        check_equal({"": got}, {"": plain(tokens(rank, 0))}, "as it was", rtol=1e-6)
    trains(model, rank, "after evaluation")


@ranks(2)
@BOTH
def test_forward_of_the_inner_module(rank, world, use_orig_params):
    """generate() of a wrapped model: the root's own parameters shown, the inner module called."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    for _ in range(2):
        with torch.no_grad(), summon(model, recurse=False, writeback=False):
            for step in range(3):
                got = model.module(tokens(rank, step))
                check_equal({"": got}, {"": toy()(tokens(rank, step))}, "inner", rtol=1e-6)
        trains(model, rank, "after generating")


@ranks(2)
@BOTH
def test_on_one_rank_only(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    with torch.no_grad(), summon(model, rank0_only=True, writeback=False):
        if rank == 0:
            check_equal({"": model(tokens(0, 3))}, {"": toy()(tokens(0, 3))}, "alone", rtol=1e-6)
    trains(model, rank, "after one rank's evaluation")


@ranks(2)
@BOTH
@pytest.mark.parametrize("recurse", [True, False])
def test_in_mixed_precision(rank, world, use_orig_params, recurse):
    """Full values are shown in storage dtype and computed with in the low one."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, mixed_precision=BF16)
    with torch.no_grad():
        expected = model(tokens(rank, 0))
        with summon(model, recurse=recurse, writeback=False):
            got = model(tokens(rank, 0))
            assert model.head.weight.dtype == torch.float32
    assert got.dtype == torch.bfloat16
    check_equal({"": got}, {"": expected}, "mixed")


@ranks(2)
@BOTH
@STRATEGIES
def test_between_forward_and_backward(rank, world, use_orig_params, strategy):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, sharding_strategy=strategy)
    reference = Reference(toy())
    for step in range(2):
        loss = loss_of(model, tokens(rank, step))
        with summon(model, writeback=False):
            assert model.head.weight.shape == (13, 6)
        with summon(model, writeback=False):
            if step == 1:
                loss.backward()
                assert model.head.weight.shape == (13, 6), "still shown"
        if step == 0:
            loss.backward()
        reference.backward(tokens(rank, step))
        check_gradients("fsdpc", model, reference, f"step {step}")


@ranks(2)
@BOTH
def test_nesting(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    inner = model.blocks[0]
    with summon(model, recurse=False), summon(inner), torch.no_grad():
        assert inner.up.weight.shape == (11, 6) and model.head.weight.shape == (13, 6)
        inner.up.weight.fill_(1.0)
        model.head.weight.fill_(2.0)
    with summon(inner), summon(model, recurse=False, writeback=False):
        assert bool((inner.up.weight == 1.0).all()) and bool((model.head.weight == 2.0).all())
    with (
        pytest.raises(AssertionError, match="already unsharding.*'blocks.0'"),
        summon(model),
        summon(inner),
    ):
        pass
    values = full_parameters(model)
    assert bool((values["blocks.0.up.weight"] == 1.0).all())


@ranks(2)
@BOTH
@pytest.mark.parametrize("c10d", [False, True])
def test_reading_from_forward_hooks(rank, world, use_orig_params, c10d):
    """Units that are not at work may be read in the middle of a pass, as torch allows."""
    if c10d:
        import os

        os.environ["FSDPC_COLLECTIVES"] = "c10d"
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    seen = []
    expected = {n: p.detach() for n, p in toy().named_parameters()}

    def read(unit, prefix):
        def hook(*_):
            with summon(unit):
                for name, p in unit.named_parameters():
                    check_equal({name: p.detach()}, {name: expected[prefix + name]}, "in a hook")
                    seen.append(prefix + name)

        return hook

    first, second = model.blocks
    first.register_forward_pre_hook(read(first, "blocks.0."))
    first.module.register_forward_hook(read(second, "blocks.1."))
    second.register_forward_hook(read(second, "blocks.1."))
    second.module.register_full_backward_hook(read(first, "blocks.0."))
    reference = Reference(toy())
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, "after reading")
    assert len(seen) == 4 * 5


@ranks(2)
@BOTH
def test_no_change_in_the_middle_of_a_pass(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)

    def change(*_):
        with summon(model.blocks[1]), torch.no_grad():
            model.blocks[1].up.bias.add_(1.0)

    handle = model.blocks[0].register_forward_hook(change)
    with pytest.raises(AssertionError, match=r"'up\.bias'.*was changed.*during a forward"):
        model(tokens(rank, 0))
    handle.remove()
    check_equal(
        full_parameters(model), {n: p.detach() for n, p in toy().named_parameters()}, "unchanged"
    )
    trains(model, rank, "after a refusal")


@ranks(2)
def test_a_unit_at_work_is_refused(rank, world, engine):
    model = wrap_blocks(engine, toy(), use_orig_params=True)
    errors = []

    def hook(*_):
        with pytest.raises(AssertionError, match="during forward/backward") as error:
            summon(model.blocks[0]).__enter__()
        errors.append(error)

    model.blocks[0].module.register_forward_hook(hook)
    model(tokens(rank, 0))
    assert len(errors) == 1


@ranks(2)
@BOTH
def test_every_way_out_by_an_exception(rank, world, use_orig_params):
    """In the block, in a forward inside it, and by a value that cannot be written back."""
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    with pytest.raises(KeyError), summon(model):
        raise KeyError
    with pytest.raises(IndexError), torch.no_grad(), summon(model):
        model(tokens(rank, 0) + 100)
    with pytest.raises(ValueError, match="cannot change its shape"), summon(model):
        model.norm.weight = nn.Parameter(torch.ones(2))
    assert model.training_state.name == "IDLE"
    trains(model, rank, "after three exceptions")


@ranks(2)
def test_gradients_of_a_plain_module_around(rank, world):
    outer = nn.Sequential(wrap("fsdpc", Toy(), use_orig_params=True), nn.Identity())
    expected = Toy()
    for m in (outer[0], expected):
        with torch.no_grad():
            for p in m.parameters():
                p.fill_(0.1)
        loss_of(m, tokens(0, 0)).backward()
    with type(outer[0]).summon_full_params(outer, with_grads=True, writeback=False):
        for name, p in outer[0].named_parameters():
            check_equal({name: p.grad}, {name: expected.get_parameter(name).grad}, "", rtol=1e-5)
