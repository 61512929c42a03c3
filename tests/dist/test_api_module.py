"""The module's face and its preparation: no_sync, names, input casts, ignored parts, meta device,
sync_module_states, repr, marks."""

from __future__ import annotations

import collections
import dataclasses
import functools

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
)
from toys import (
    Block,
    check_equal,
    clean,
    full_parameters,
    loss_of,
    summon,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

BF16 = torch.bfloat16


def values(model):
    return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


@ranks(2)
def test_no_sync_belongs_to_the_root(rank, world, engine):
    model = wrap_blocks(engine, toy())
    model(tokens(rank, 0))
    with pytest.raises(RuntimeError, match="no_sync.*root"):
        model.blocks[0].no_sync().__enter__()
    with summon(model), pytest.raises(ValueError, match="states"):
        model.no_sync().__enter__()


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_no_sync_accumulates_and_ends_with_an_exception_too(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    with pytest.raises(KeyError), model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
        raise KeyError("mine")
    loss_of(model, tokens(rank, 1)).backward()
    reference = toy()
    for r in range(world):
        for step in range(2):
            (loss_of(reference, tokens(r, step)) / world).backward()
    with summon(model, with_grads=True, writeback=False):
        for name, p in model.named_parameters():
            torch.testing.assert_close(
                p.grad, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-6
            )


Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    label: str


class Spy(nn.Module):
    """Reports the dtypes it sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen = None

    def forward(self, x, *rest, **named):
        self.seen = (x, rest, named)
        return self.linear(x.to(self.linear.weight.dtype))


@ranks(2)
def test_inputs_are_cast_wherever_they_are(rank, world, engine):
    mixed = MixedPrecision(param_dtype=BF16)
    model = wrap(engine, Spy(), mixed_precision=mixed)
    f, i = torch.ones(2, 2), torch.ones(2, dtype=torch.int64)
    x = torch.ones(3, 2, requires_grad=True)
    model(x, i, [f, 3], (f, None), Pair(f, i), {"k": f}, batch=Batch(f, "a"), n=4).sum().backward()
    got_x, (got_i, got_list, got_tuple, got_pair, got_dict), named = model.module.seen
    assert got_x.dtype == BF16 and got_i.dtype == torch.int64
    assert got_list[0].dtype == BF16 and got_list[1] == 3
    assert got_tuple[0].dtype == BF16 and got_tuple[1] is None
    assert type(got_pair) is Pair and got_pair.a.dtype == BF16 and got_pair.b.dtype == torch.int64
    assert got_dict["k"].dtype == BF16
    assert named["batch"].x.dtype == BF16 and named["batch"].label == "a" and named["n"] == 4
    assert x.grad.dtype == torch.float32 and f.dtype == torch.float32


@ranks(2)
@pytest.mark.parametrize("root_casts", [True, False])
@pytest.mark.parametrize("all_cast", [True, False])
def test_which_units_cast(rank, world, engine, root_casts, all_cast):
    mixed = MixedPrecision(
        param_dtype=BF16, cast_forward_inputs=all_cast, cast_root_forward_inputs=root_casts
    )

    class Outer(nn.Module):
        def __init__(self, has_own):
            super().__init__()
            self.first, self.inner = Spy(), Spy()
            self.own = nn.Parameter(torch.ones(1)) if has_own else None

        def forward(self, x):
            self.seen = x.dtype
            return self.inner(self.first(x).float())

    for has_own in (True, False):
        policy = ModuleWrapPolicy({Spy})
        model = wrap(engine, Outer(has_own), mixed_precision=mixed, auto_wrap_policy=policy)
        model(torch.ones(1, 2))
        casts = root_casts or (all_cast and has_own)
        assert model.module.seen == (BF16 if casts else torch.float32)
        inner = model.module.inner.module.seen[0].dtype
        assert inner == (BF16 if all_cast else torch.float32)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_ignored_parts_stay_as_they_are(rank, world, engine, use_orig_params):
    for spelling in ("ignored_modules", "ignored_states", "parameters"):
        model = toy()
        block = model.blocks[0]
        options = {
            "ignored_modules": {"ignored_modules": [block]},
            "ignored_states": {"ignored_states": [block]},
            "parameters": {"ignored_states": list(block.parameters())},
        }[spelling]
        before = {name: (p, p.detach().clone()) for name, p in block.named_parameters()}
        model = wrap(engine, model, use_orig_params=use_orig_params, **options)
        loss_of(model, tokens(rank, 0)).backward()
        for name, (p, value) in before.items():
            assert block.get_parameter(name) is p and torch.equal(p.detach(), value)
        expected = toy()
        loss_of(expected, tokens(rank, 0)).backward()
        torch.testing.assert_close(
            block.up.weight.grad, expected.blocks[0].up.weight.grad, rtol=1e-5, atol=1e-7
        )


@ranks(2)
def test_ignored_buffers_keep_their_dtype(rank, world, engine):
    model = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
    mixed = MixedPrecision(buffer_dtype=torch.float64, _module_classes_to_ignore=())
    model = wrap(engine, model, mixed_precision=mixed, ignored_modules=[model["b"]])
    model.check_is_root()
    assert model.module["a"].running_mean.dtype == torch.float64
    assert model.module["a"].num_batches_tracked.dtype == torch.int64
    assert model.module["b"].running_mean.dtype == torch.float32


class WithBuffer(nn.Module):
    def __init__(self, writes_buffer=True, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2, device=device))
        self.register_buffer("scale", torch.ones(2, device=device))
        self.writes_buffer = writes_buffer

    def reset_parameters(self):
        torch.manual_seed(11)
        with torch.no_grad():
            self.weight.normal_()
            if self.writes_buffer:
                self.scale.fill_(2.0)

    def forward(self, x):
        return x @ self.weight * self.scale


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_meta_device_by_reset_parameters(rank, world, engine, use_orig_params):
    model = nn.Sequential(WithBuffer(device="meta"), nn.Sequential(WithBuffer(device="meta")))
    expected = WithBuffer()
    expected.reset_parameters()
    policy = ModuleWrapPolicy({nn.Sequential})
    model = wrap(engine, model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    got = full_parameters(model)
    for name in ("0.weight", "1.0.weight"):
        assert torch.equal(got[name], expected.weight.detach())
    assert all(buffer.tolist() == [2.0, 2.0] for buffer in model.buffers())


@ranks(2)
def test_meta_device_by_function(rank, world, engine):
    model = toy().to("meta")
    asked = []

    def initialise(module):
        asked.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.fill_(0.5)

    model = wrap_blocks(engine, model, param_init_fn=initialise)
    assert all(bool((value == 0.5).all()) for value in full_parameters(model).values())
    assert asked.count("Block") == 2 and asked.count("Toy") == 1 and asked.count("Linear") == 5


@ranks(2)
def test_meta_device_keeps_ties(rank, world):
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model = wrap("fsdpc", model)
    with summon(model):
        assert model["a"].weight is model["b"].weight


@ranks(2)
def test_what_nothing_initialised_is_named(rank, world):
    model = nn.Sequential(WithBuffer(device="meta"), WithBuffer(False, device="meta"))
    with pytest.warns(UserWarning, match=r"unwritten: \['1.scale'\]"):
        wrap("fsdpc", model)

    class NoReset(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, device="meta"))

    with (
        pytest.warns(UserWarning, match="Unable to call `reset_parameters"),
        pytest.raises(AttributeError, match="reset_parameters"),
    ):
        wrap("fsdpc", NoReset())
    with pytest.raises(RuntimeError, match=r"weight.*still on the meta device"):
        wrap("fsdpc", NoReset(), param_init_fn=lambda module: None)


@ranks(2, 4)
@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda s: s.name)
def test_sync_module_states(rank, world, strategy):
    from torch.distributed.device_mesh import init_device_mesh

    options = {"sharding_strategy": strategy}
    if "HYBRID" in strategy.name:
        options["device_mesh"] = init_device_mesh("cpu", (world // 2, 2))
    model = toy(seed=rank)
    model.blocks[0].register_buffer("offset", torch.arange(6.0).reshape(2, 3).t() + rank)
    model.register_buffer("flag", torch.tensor([rank == 0]))
    model = wrap_blocks("fsdpc", model, sync_module_states=True, **options)
    check_equal(full_parameters(model), values(toy(seed=0)), "of rank 0")
    assert model.blocks[0].offset.tolist() == torch.arange(6.0).reshape(2, 3).t().tolist()
    assert model.flag.item() is True


@ranks(2)
def test_sync_module_states_after_meta(rank, world):
    model = toy() if rank == 0 else toy().to("meta")
    init = None if rank == 0 else lambda m: m.to_empty(device="cpu", recurse=False)
    model = wrap_blocks("fsdpc", model, sync_module_states=True, param_init_fn=init)
    check_equal(full_parameters(model), values(toy()), "of rank 0")


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_names_and_repr(rank, world, engine, use_orig_params):
    model = wrap_blocks(engine, toy(), use_orig_params=use_orig_params)
    names = [name for name, _ in model.named_parameters()]
    if use_orig_params:
        assert [clean(name) for name in names] == [name for name, _ in toy().named_parameters()]
    else:
        assert sorted(clean(n) for n in names) == [
            "_flat_param",
            "blocks.0._flat_param",
            "blocks.1._flat_param",
        ]
    assert "Block" in repr(model)


@ranks(2)
def test_units_are_named_by_their_path(rank, world):
    def names(model):
        return [m._handle.name for m in type(model).fsdp_modules(model)]

    by_callable = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is Block)
    for policy in (ModuleWrapPolicy({Block}), by_callable):
        model = wrap("fsdpc", toy(), auto_wrap_policy=policy)
        assert names(model) == ["Toy", "blocks.0", "blocks.1"]
        model.check_is_root()
        assert names(model) == ["Toy", "blocks.0", "blocks.1"]
    model = toy()
    model.blocks[1] = wrap("fsdpc", model.blocks[1])
    assert names(wrap("fsdpc", model)) == ["Toy", "Block"]


@ranks(2)
def test_inner_units_used_before_the_root(rank, world):
    """An inner unit that ran alone was a root for a while; the outer one takes over."""
    model = wrap_blocks("fsdpc", toy())
    model.blocks[0](torch.randn(2, 6)).sum().backward()
    model.zero_grad()
    assert model.blocks[0]._is_root
    loss_of(model, tokens(0, 0)).backward()
    assert model._is_root and model.blocks[0]._is_root is False
    reference = toy()
    loss_of(reference, tokens(0, 0)).backward()
    with summon(model, with_grads=True):
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, reference.get_parameter(name).grad)


@ranks(2)
def test_memory_stats_and_marks(rank, world):
    import fsdpc

    model = toy()
    assert fsdpc.mark_data_dependent(model.blocks) is model.blocks
    assert model.blocks._fsdpc_data_dependent is True
    model = wrap("fsdpc", model, auto_wrap_policy=always_wrap_policy)
    assert fsdpc.memory_stats(model) == {}
    loss_of(model, tokens(rank, 0)).backward()
    stats = fsdpc.memory_stats(model)
    assert stats and all(isinstance(value, int) and value >= 0 for value in stats.values())
    for function in (fsdpc.mark_data_dependent, fsdpc.memory_stats):
        with pytest.raises(TypeError, match="nn.Module"):
            function(3)


@ranks(2)
def test_an_exception_in_forward_and_a_new_step(rank, world):
    model = wrap_blocks("fsdpc", toy())

    def fail(*args):
        raise KeyError("mine")

    handle = model.blocks[1].norm.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(KeyError):
            model(tokens(rank, 0))
        assert model.training_state.name == "IDLE"
    handle.remove()
    loss_of(model, tokens(0, 0)).backward()
    reference = toy()
    loss_of(reference, tokens(0, 0)).backward()
    assert isinstance(model.blocks[0].module, Block)
    with summon(model, with_grads=True):
        torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad)
