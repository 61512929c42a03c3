"""summon_full_params, apply and dtype conversion: full values in, shards out, names clean."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import (
    check_equal,
    clean,
    full_gradients,
    loss_of,
    summon,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


def values(model):
    return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


def shards(model):
    return [p.detach().clone() for p in model.parameters()]


@ranks(1, 2, 3)
@BOTH
def test_matrix(rank, world, use_orig_params):
    expected = values(toy())
    flags = [False, True]
    for recurse, writeback, rank0_only, offload, grads in itertools.product(flags, repeat=5):
        if writeback and rank0_only:
            continue
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
def test_refusals(rank, world, engine):
    model = wrap_blocks(engine, toy())
    with (
        pytest.raises(NotImplementedError, match="is not supported"),
        summon(model, rank0_only=True),
    ):
        pass
    with summon(model), pytest.raises(AssertionError, match="already unsharding"), summon(model):
        pass
    with pytest.warns(UserWarning, match="redundantly"), summon(model, offload_to_cpu=True):
        pass


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
        if use_orig_params:
            assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        loss_of(model, tokens(0, 0)).backward()
        reference = toy().double()
        loss_of(reference, tokens(0, 0)).backward()
        with summon(model, with_grads=True):
            grads = {n: p.grad for n, p in model.named_parameters()}
            check_equal(grads, {n: p.grad for n, p in reference.named_parameters()}, "gradients")


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
    """Marks and flags set inside stay, and an optimizer's state belongs to them."""
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
    """A forward inside, its backward outside: refused, not cut."""
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
    """Whole gradients have zeros for a rank that has cleared its part, and are None where the only
    `.grad` is that of a rank without elements: what the memory held before was shown.
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
