"""Tests of models on the meta device as frameworks make them, of values from rank 0,
and of buffers and ignored parts.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from harness import ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from toys import (
    Block,
    Reference,
    Toy,
    check_equal,
    check_gradients,
    full_parameters,
    loss_of,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
STRATEGIES = pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)


class Cached(nn.Module):
    """A module with two buffers and a scale. One buffer is in no state dict, as in a rotary
    embedding. No reset_parameters() sets the scale.
    """

    def __init__(self, width=6):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1.5))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return x * self.scale + self.table


class Model(Toy):
    """A toy with a BatchNorm, a module that has buffers, and tied weights."""

    def __init__(self):
        super().__init__()
        self.cached = Cached()
        self.batch_norm = nn.BatchNorm1d(6)
        self.head.weight = self.embed.weight

    def forward(self, batch):
        x = self.cached(self.embed(batch))
        x = self.batch_norm(x.flatten(0, 1)).view(x.shape)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def real(seed=0):
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        model.batch_norm.running_mean.fill_(0.25)
        model.cached.table.mul_(2.0)
        model.cached.count.fill_(11)
    return model


@contextlib.contextmanager
def parameters_on_meta():
    """Move each parameter to the meta device when it is registered,
    as accelerate's init_empty_weights does.
    """
    register = nn.Module.register_parameter

    def on_meta(module, name, param):
        register(module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def on_meta(how, kind=Model):
    with torch.device("meta") if how == "device" else parameters_on_meta():
        model = kind()
    if how != "device" and kind is Model:
        model.head.weight = model.embed.weight  # frameworks call tie_weights() for this
    return model


def own_only(module):
    module.to_empty(device="cpu", recurse=False)


def all_below(module):
    module.to_empty(device="cpu")


def check_state(model, expected):
    values = full_parameters(model)
    plain = {n: p.detach() for n, p in expected.named_parameters()}
    check_equal(values, plain, "parameters")
    buffers = {n.replace("_fsdp_wrapped_module.", ""): b for n, b in model.named_buffers()}
    check_equal(buffers, dict(expected.named_buffers()), "buffers")


@ranks(2, 3)
@BOTH
@STRATEGIES
@pytest.mark.parametrize("how", ["device", "parameters"])
@pytest.mark.parametrize("init", [None, own_only, all_below], ids=["none", "own", "all"])
def test_values_and_buffers_from_rank_0(rank, world, use_orig_params, strategy, how, init):
    """As with cpu_ram_efficient_loading, only rank 0 has values;
    the other ranks have a model on the meta device.
    """
    model = real() if rank == 0 else on_meta(how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = wrap(
            "fsdpc",
            model,
            use_orig_params=use_orig_params,
            sharding_strategy=strategy,
            sync_module_states=True,
            param_init_fn=None if rank == 0 else init,
        )
    check_state(model, real())
    assert model.head.weight is model.embed.weight, "still tied"
    assert all(not b.is_meta for b in model.buffers())
    reference = Reference(real())
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, "first step")


@ranks(2)
@BOTH
def test_blocks_wrapped_one_by_one(rank, world, use_orig_params):
    model = toy() if rank == 0 else on_meta("device", Toy)
    model = wrap_blocks(
        "fsdpc",
        model,
        use_orig_params=use_orig_params,
        sync_module_states=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        param_init_fn=None if rank == 0 else own_only,
    )
    check_equal(
        full_parameters(model), {n: p.detach() for n, p in toy().named_parameters()}, "from rank 0"
    )
    assert loss_of(model, tokens(rank, 0)).isfinite()


@ranks(1, 2)
@BOTH
@pytest.mark.parametrize("init", [False, True])
def test_reset_parameters_of_every_module(rank, world, engine, use_orig_params, init):
    """Values equal those of a model that is built on the CPU. This holds by default, and with a
    `param_init_fn` like those of torchtune and Lightning.
    """

    def materialise(module):
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def seeded(kind):
        class Seeded(kind):
            def reset_parameters(self):
                torch.manual_seed(self.weight.numel())
                super().reset_parameters()

        return Seeded

    def build():
        model = Toy()
        model.head = seeded(nn.Linear)(6, 13)
        model.embed = seeded(nn.Embedding)(13, 6)
        for block in model.blocks:
            block.up, block.down = seeded(nn.Linear)(6, 11), seeded(nn.Linear)(11, 6, bias=False)
        return model

    with torch.device("meta"):
        model = build()
    model = wrap_blocks(
        engine,
        model,
        use_orig_params=use_orig_params,
        param_init_fn=materialise if init else None,
    )
    expected = {n: p.detach() for n, p in build().named_parameters()}
    check_equal(full_parameters(model), expected, "as built on the CPU")


@ranks(2)
@BOTH
def test_buffers_that_have_values_keep_them(rank, world, use_orig_params):
    class Table(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("table", torch.arange(4.0))

        def forward(self, x):
            return super().forward(x) + self.table

    model = nn.Sequential(on_meta("parameters", Table), nn.BatchNorm1d(4))
    assert model[0].weight.is_meta and not model[0].table.is_meta
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = wrap("fsdpc", model, use_orig_params=use_orig_params)
    assert torch.equal(model[0].table, torch.arange(4.0))
    assert model(torch.ones(3, 4)).isfinite().all()


@ranks(2)
@BOTH
def test_statistics_of_a_deferred_batch_norm(rank, world, engine, use_orig_params):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = wrap(engine, model, use_orig_params=use_orig_params)
    plain = nn.BatchNorm1d(4)
    check_equal(dict(model[1].named_buffers()), dict(plain.named_buffers()), "fresh statistics")
    torch.manual_seed(rank)
    x = torch.randn(5, 4)
    model(x).sum().backward()
    assert int(model[1].num_batches_tracked) == 1 and bool(model[1].running_mean.any())


@ranks(2)
def test_a_module_of_buffers_alone(rank, world, engine):
    class Offsets(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset", torch.arange(3.0))

        def reset_parameters(self):
            self.offset.copy_(torch.arange(3.0))

        def forward(self, x):
            return x + self.offset

    with torch.device("meta"):
        model = nn.Sequential(Offsets(), nn.Linear(3, 3))
    model[0] = wrap(engine, model[0], use_orig_params=True)
    model = wrap(engine, model, use_orig_params=True)
    assert torch.equal(model[0].offset, torch.arange(3.0))
    model(torch.ones(2, 3)).sum().backward()


@ranks(2)
@BOTH
def test_ignored_parts_stay_whole_and_plain(rank, world, engine, use_orig_params):
    """Ignored parameters keep their memory and their identity, and their gradients are local."""
    for spelling in ("modules", "module states", "params"):
        model = toy()
        up, head = model.blocks[0].up, model.head
        kept = [up.weight, up.bias, head.weight, head.bias]
        addresses = [p.data_ptr() for p in kept]
        options = {
            "modules": {"ignored_modules": [up, head]},
            "module states": {"ignored_states": [up, head]},
            "params": {"ignored_states": kept},
        }[spelling]
        model = wrap_blocks(engine, model, use_orig_params=use_orig_params, **options)
        assert [up.weight, up.bias, head.weight, head.bias] == kept
        assert [p.data_ptr() for p in kept] == addresses
        listed = {id(p) for p in model.parameters()}
        assert all(id(p) in listed for p in kept)
        plain = toy()
        for m in (model, plain):
            loss_of(m, tokens(rank, 0)).backward()
        check_equal({"": head.weight.grad}, {"": plain.head.weight.grad}, "local", rtol=1e-5)


@ranks(2)
@BOTH
def test_ignored_parts_beside_meta_ones(rank, world, use_orig_params):
    model = on_meta("device", Toy)
    torch.manual_seed(5)
    model.head = nn.Linear(6, 13)
    before = model.head.weight.detach().clone()
    model = wrap_blocks(
        "fsdpc", model, use_orig_params=use_orig_params, ignored_modules=[model.head]
    )
    assert torch.equal(model.head.weight, before)
    loss_of(model, tokens(rank, 0)).backward()
    assert model.head.weight.grad.shape == (13, 6)


@ranks(2)
def test_real_modules_beside_meta_ones_keep_their_values(rank, world):
    model = on_meta("device", Toy)
    torch.manual_seed(5)
    model.head = nn.Linear(6, 13)
    before = model.head.weight.detach().clone()
    model = wrap_blocks("fsdpc", model, use_orig_params=True)
    check_equal({"": full_parameters(model)["head.weight"]}, {"": before}, "real one")


@ranks(2)
def test_a_function_that_leaves_something_on_meta(rank, world):
    with pytest.raises(RuntimeError, match=r"'norm\.weight' of unit 'blocks\.0' is still on the"):
        wrap_blocks("fsdpc", on_meta("device", Toy), param_init_fn=lambda module: None)
    some = lambda module: own_only(module) if isinstance(module, nn.LayerNorm) else None  # noqa: E731
    with pytest.raises(RuntimeError, match=r"'up\.weight' of unit 'Block' is still on the meta"):
        wrap("fsdpc", on_meta("device", Block), param_init_fn=some)


def ignored_on_meta(rank, world):
    model = real() if rank == 0 else on_meta("device")
    wrap("fsdpc", model, sync_module_states=True, ignored_modules=[model.batch_norm])


def test_ignored_buffers_without_memory_are_named():
    outcomes = run_ranks(ignored_on_meta, 2, faults=True)
    assert "'batch_norm.running_mean' is on the meta device on rank 1" in outcomes[1].error
    assert not outcomes[0].returned
