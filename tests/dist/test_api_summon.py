"""Tests of summon_full_params, apply and dtype conversion.

Inside the context of summon_full_params, parameters have full values, and their names have no
"_fsdp_wrapped_module". Afterwards, parameters are sharded again. Forwards, hooks, nested contexts
and exceptions are tested inside the context.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from combinations import subset
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import (
    Reference,
    Toy,
    check_equal,
    check_gradients,
    clean,
    full_gradients,
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


def values(model):
    return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


def shards(model):
    return [p.detach().clone() for p in model.parameters()]


@ranks(1, 2, 3)
@BOTH
def test_matrix(rank, world, use_orig_params):
    expected = values(toy())
    flags = itertools.product([False, True], repeat=5)
    allowed = (each for each in flags if not (each[1] and each[2]))  # writeback and rank0_only
    for recurse, writeback, rank0_only, offload, grads in subset(allowed, least="pairs"):
        model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
        loss_of(model, tokens(0, 0)).backward()
        options = {
            "recurse": recurse,
            "writeback": writeback,
            "rank0_only": rank0_only,
            "offload_to_cpu": offload,
            "with_grads": grads,
        }
        check_one(model, expected, options, sharded=world > 1)


def check_one(model, expected, options, sharded):
    before = shards(model)
    reference = toy()
    loss_of(reference, tokens(0, 0)).backward()
    shows = not options["rank0_only"] or model.rank == 0
    with summon(model, **options):
        if shows:
            own = {n: p for n, p in model.named_parameters() if "blocks" not in n}
            shown = dict(model.named_parameters()) if options["recurse"] else own
            check_equal(
                {n: p.detach() for n, p in shown.items()},
                expected if options["recurse"] else {n: expected[n] for n in own},
                f"summoned with {options}",
            )
            if options["with_grads"]:
                grads = {n: p.grad for n, p in shown.items()}
                expected_grads = {n: reference.get_parameter(n).grad for n in shown}
                check_equal(grads, expected_grads, "grads", rtol=1e-6)
            with torch.no_grad():
                for p in shown.values():
                    p.add_(1.0)
                    if options["with_grads"]:
                        p.grad.mul_(2.0)
        else:
            assert all(torch.equal(a, b) for a, b in zip(before, shards(model), strict=True))
    changed = options["writeback"] or not sharded
    with summon(model, writeback=False, with_grads=True):
        for name, p in model.named_parameters():
            wrote = changed and (options["recurse"] or "blocks" not in name)
            assert torch.equal(p.detach(), expected[name] + float(wrote)), (name, options)
            factor = 2.0 if wrote and options["with_grads"] else 1.0
            reference_grad = factor * reference.get_parameter(name).grad
            check_equal({name: p.grad}, {name: reference_grad}, f"{options}", rtol=1e-6)


@ranks(2)
@BOTH
def test_names_objects_and_gradients_come_back(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names, params = zip(*model.named_parameters(), strict=True)
    with summon(model):
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in toy().named_parameters()]
        assert model.embed.weight.shape == (13, 6) and isinstance(model.embed.weight, nn.Parameter)
    assert [n for n, _ in model.named_parameters()] == list(names)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert all("_fsdp_wrapped_module." in name for name in names)
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()


@ranks(2)
def test_a_plain_model_with_units_inside(rank, world, engine):
    model = toy()
    model.blocks[1] = wrap(engine, model.blocks[1])
    with type(model.blocks[1]).summon_full_params(model):
        assert model.blocks[1].up.weight.shape == (11, 6)
        with torch.no_grad():
            model.blocks[1].up.weight.fill_(3.0)
    with type(model.blocks[1]).summon_full_params(model, recurse=False):
        assert not any(p.dim() == 2 for p in model.blocks[1].parameters())
    with summon(model.blocks[1]):
        assert bool((model.blocks[1].up.weight == 3.0).all())


@ranks(2)
@BOTH
def test_a_parameter_put_there_anew_is_written_back(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    with summon(model):
        model.head.bias = nn.Parameter(torch.full((13,), 2.5))
    with summon(model):
        assert bool((model.head.bias == 2.5).all())
    with (
        pytest.raises(ValueError, match=r"head\.bias.*\[3\].*expected \[13\]"),
        summon(model),
    ):
        model.head.bias = nn.Parameter(torch.zeros(3))
    loss_of(model, tokens(rank, 0)).backward()


@ranks(2)
def test_not_during_forward_or_backward(rank, world):
    model = wrap_blocks("fsdpc", toy())
    failures = []

    def try_to_summon(*args):
        try:
            with summon(model.blocks[1]):
                pass
        except AssertionError as error:
            failures.append(str(error))

    model.blocks[1].up.register_forward_hook(lambda *args: try_to_summon())
    out = model(tokens(rank, 0))
    assert len(failures) == 1 and "during forward/backward" in failures[0]
    model.blocks[1].up.register_full_backward_hook(lambda *args: try_to_summon())
    out = model(tokens(rank, 0))
    out.sum().backward()
    assert len(failures) == 3


@ranks(2)
@BOTH
def test_an_exception_inside_leaves_the_model_usable(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    with pytest.raises(KeyError), summon(model), torch.no_grad():
        model.head.bias.fill_(7.0)
        raise KeyError("mine")
    assert model.training_state.name == "IDLE"
    loss_of(model, tokens(rank, 0)).backward()
    assert torch.equal(full_value(model, "head.bias"), toy().head.bias.detach())


def full_value(model, name):
    with summon(model, writeback=False):
        return model.get_parameter(name).detach().clone()


@ranks(1, 2)
@BOTH
def test_apply_initialises_full_parameters(rank, world, engine, use_orig_params):
    shapes = []

    def initialise(module):
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            torch.manual_seed(7)
            with torch.no_grad():
                module.weight.normal_()

    expected = toy().apply(initialise)
    plain_shapes, shapes = shapes, []
    model = wrap_blocks(engine, toy(), use_orig_params=use_orig_params)
    assert model.apply(initialise) is model
    assert shapes == plain_shapes
    assert model._is_root is None, "apply is no first use"
    check_equal(values_of(model), values(expected), "after apply")
    with summon(model), pytest.raises(ValueError, match="states"):
        model.apply(initialise)


def values_of(model):
    with summon(model, writeback=False):
        return values(model)


@ranks(2)
@BOTH
def test_conversion_of_a_sharded_model(rank, world, use_orig_params):
    for before_use in (True, False):
        model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
        params = list(model.parameters())
        if not before_use:
            loss_of(model, tokens(rank, 0)).backward()
            model.zero_grad()
        assert model.double() is model
        check_equal(values_of(model), values(toy().double()), "as double")
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        optimizer = torch.optim.SGD(params, 0.5)  # keeps the objects from before the conversion
        loss_of(model, tokens(0, 0)).backward()
        reference = toy().double()
        loss_of(reference, tokens(0, 0)).backward()
        with summon(model, with_grads=True):
            grads = {n: p.grad for n, p in model.named_parameters()}
            check_equal(grads, {n: p.grad for n, p in reference.named_parameters()}, "gradients")
        optimizer.step()
        torch.optim.SGD(reference.parameters(), 0.5).step()
        check_equal(values_of(model), values(reference), "after a step")


@ranks(2)
def test_flat_parameters_that_a_conversion_joins(rank, world):
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    model = wrap("fsdpc", module, use_orig_params=False)
    with pytest.warns(UserWarning, match="(?s)0.weight/0.bias.*after the conversion"):
        model.double()
    assert len(list(model.parameters())) == 1


@ranks(2)
@BOTH
def test_conversions_that_change_nothing(rank, world, use_orig_params):
    model = toy()
    model.register_buffer("offset", torch.ones(2))
    model = wrap_blocks("fsdpc", model, use_orig_params=use_orig_params)
    pointers = [p.data_ptr() for p in model.parameters()]
    model.to("cpu").float()
    model.to_empty(device="cpu")
    assert [p.data_ptr() for p in model.parameters()] == pointers
    check_equal(values_of(model), values(toy()), "untouched")
    with pytest.raises(NotImplementedError, match="meta"):
        model.to("meta")


@ranks(2)
def test_no_shard_shows_and_keeps_full_parameters(rank, world):
    model = wrap_blocks("fsdpc", toy(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with summon(model, writeback=False, offload_to_cpu=True, rank0_only=True):
        if rank == 0:
            assert model.head.weight.shape == (13, 6)


@ranks(1, 2)
@pytest.mark.parametrize("writeback", [True, False])
def test_the_users_own_objects_show_full_values(rank, world, writeback):
    """Inside the context, the parameters are the same objects and keep their optimizer states.

    Attributes and requires_grad flags that are set inside the context stay afterwards.
    """
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()
    before = {clean(name): p for name, p in model.named_parameters()}
    grads = {name: p.grad for name, p in before.items()}
    with summon(model, writeback=writeback):
        for name, p in model.named_parameters():
            assert p is before[name] and p.shape == toy().get_parameter(name).shape
            assert p.grad is None
            p.mark = name
            assert "exp_avg" in optimizer.state[p] or not before[name].numel() or world > 1
        model.blocks[0].up.weight.requires_grad_(False)
    assert all(p.mark == name and p.grad is grads[name] for name, p in before.items())
    optimizer.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    assert before["blocks.0.up.weight"].grad is None
    optimizer.step()


@ranks(2)
def test_a_flag_of_a_parameter_put_there_anew(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    with summon(model):
        model.head.bias = nn.Parameter(torch.full((13,), 2.5), requires_grad=False)
    assert not model.module.head.bias.requires_grad
    loss_of(model, tokens(rank, 0)).backward()
    with summon(model):
        assert bool((model.head.bias == 2.5).all())


@ranks(2)
def test_gradients_of_before_survive_a_backward_inside(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    loss_of(model, tokens(rank, 0)).backward()
    before = full_gradients(model)
    with summon(model):
        loss_of(model, tokens(rank, 1)).backward()
        assert model.head.weight.grad.shape == (13, 6)
    check_equal(full_gradients(model), before, "after a backward inside summon")


@ranks(2)
def test_a_whole_gradient_does_not_pass_for_a_shards(rank, world):
    """A forward runs inside the context, and its backward runs outside.

    Either this backward or the next clip_grad_norm_ raises an error.
    """
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    with summon(model):
        loss = loss_of(model, tokens(rank, 0))
    try:
        loss.backward()
    except RuntimeError:
        return
    with pytest.raises(ValueError, match="does not fit its shard"):
        model.clip_grad_norm_(1.0)


@ranks(2)
def test_gradients_that_ranks_clear_or_set_alone(rank, world):
    """If a rank has cleared its `.grad`, this rank's elements of the whole gradient are zero.

    A whole gradient is None if the only ranks with a `.grad` are ranks without elements.
    """
    model = wrap("fsdpc", nn.Linear(40, 40), use_orig_params=True)
    model(torch.ones(2, 40)).square().sum().backward()
    weight, bias = (getattr(model.module, name) for name in ("weight", "bias"))
    with summon(model, writeback=False, with_grads=True):
        expected = model.module.weight.grad.clone().view(-1)
    count = weight.numel()
    counts = [None, None]
    torch.distributed.all_gather_object(counts, (count, bias.numel()))
    assert 0 < counts[0][0] < 1600 and 0 in (counts[0][1], counts[1][1])
    if rank == 0:
        weight.grad = None
    expected[: counts[0][0]] = 0
    bias.grad = None if bias.numel() else torch.zeros_like(bias)
    with summon(model, writeback=False, with_grads=True):
        assert torch.equal(model.module.weight.grad.view(-1), expected)
        assert model.module.bias.grad is None


def trains(model, rank, what):
    """Check that the gradients of one step are right, so the model works as before."""
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
    """An evaluation inside the context uses values that the user has changed there.

    Programs do this to evaluate averaged weights.
    """
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
    """The context gathers only the root, and the program calls the root's inner module.

    Programs do this around generate().
    """
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
    """Full values are shown in the storage dtype; forwards compute in the low-precision dtype."""
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
@pytest.mark.parametrize("wire", [False, True])
def test_reading_from_forward_hooks(rank, world, use_orig_params, wire):
    """Hooks may gather a unit in the middle of a forward or backward, as with torch."""
    if wire:
        import os

        os.environ["FSDPC_COLLECTIVES"] = "wire"
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
@BOTH
def test_every_way_out_by_an_exception(rank, world, use_orig_params):
    """The context ends cleanly after an error in the block, in a forward or in the write-back."""
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
