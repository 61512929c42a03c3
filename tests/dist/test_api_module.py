"""Tests of the wrapper and its constructor beyond what `conformance` compares with torch's.

They cover no_sync, the meta device, sync_module_states, names of units, mark_data_dependent,
fsdpc's own errors, HYBRID groups by host, and `precision_line`, the line about dtypes that is
logged at the first forward.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecision,
    ShardingStrategy,
)
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

from fsdpc import fully_shard


def values(model):
    return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


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
def test_what_nothing_initialised_is_named(rank, world):
    model = nn.Sequential(WithBuffer(device="meta"), WithBuffer(False, device="meta"))
    with pytest.warns(UserWarning, match=r"unwritten: \['1.scale'\]"):
        wrap("fsdpc", model)

    class NoReset(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, device="meta"))

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
    """An inner unit that runs before the outer one is a root until the outer one runs."""
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


HYBRID = ShardingStrategy.HYBRID_SHARD


@ranks(2)
def test_a_mistake_leaves_the_model_as_it_was(rank, world):
    model, mesh = toy(), init_device_mesh("cpu", (world,))
    for options in (
        {"ignored_modules": [model.head], "ignored_states": [model.norm]},
        {"ignored_states": [model.head, model.norm.weight]},
        {"ignored_modules": [1]},
        {"ignored_modules": 3},
        {"ignored_states": 3},
        {"process_group": dist.group.WORLD, "device_mesh": mesh},
        {"sharding_strategy": HYBRID},
        {"sharding_strategy": HYBRID, "process_group": dist.group.WORLD},
        {"sharding_strategy": HYBRID, "device_mesh": mesh},
    ):
        with pytest.raises((TypeError, ValueError)):
            wrap("fsdpc", model, **options)
        assert next(model.parameters()).dim() == 2, options


@ranks(1)
def test_mistakes_of_type_are_named(rank, world):
    for name, value in [
        ("sharding_strategy", "FULL_SHARD"),
        ("cpu_offload", True),
        ("backward_prefetch", "pre"),
        ("mixed_precision", torch.bfloat16),
    ]:
        with pytest.raises(TypeError, match=name):
            wrap("fsdpc", toy(), **{name: value})
    with pytest.raises(ValueError, match="param_init_fn"):
        wrap("fsdpc", toy(), param_init_fn=3)
    with pytest.raises(ValueError, match="auto_wrap_policy"):
        wrap("fsdpc", toy(), auto_wrap_policy=3)
    with pytest.raises(TypeError, match="nn.Module"):
        wrap("fsdpc", torch.zeros(3))
    with pytest.raises(TypeError, match="device_id"):
        wrap("fsdpc", toy(), device_id=2.5)


@ranks(2)
def test_an_accelerator_is_refused_in_one_sentence(rank, world):
    for device in (0, torch.device("cuda", 0), torch.device("meta")):
        with pytest.raises(RuntimeError, match=r"device_id.*CPU"):
            wrap("fsdpc", toy(), device_id=device)


@ranks(2)
def test_warnings_point_at_the_callers_line(rank, world):
    from fsdpc import FSDP

    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    norms = nn.Sequential(nn.BatchNorm1d(2))
    model = toy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
        FSDP(model, ignored_modules=[model])
        FSDP(toy(), sharding_strategy=ShardingStrategy.NO_SHARD)
        FSDP(norms, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed)
        model = FSDP(toy())
        model.clip_grad_norm_(1.0)
        with FSDP.summon_full_params(model, offload_to_cpu=True):
            pass
    assert len(caught) == 6
    assert {warning.filename for warning in caught} == {__file__}


@ranks(2)
def test_a_tie_across_units_is_refused_by_name(rank, world):
    for use_orig_params in (False, True):
        model = toy(width=6, vocabulary=13)
        model.head.weight = model.embed.weight
        with pytest.raises(ValueError, match=r"weight.*tied.*ignored_states"):
            wrap(
                "fsdpc",
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}),
                use_orig_params=use_orig_params,
            )


@ranks(4)
def test_hybrid_groups_by_host(rank, world):
    import os

    os.environ["FSDPC_HOST"] = f"host{rank % 2}"
    model = wrap_blocks("fsdpc", toy(), sharding_strategy=HYBRID)
    assert dist.get_process_group_ranks(model.process_group) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(model._inter_node_pg) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert model.blocks[0].process_group is model.process_group
    os.environ["FSDPC_HOST"] = f"host{rank == 0}"
    with pytest.raises(ValueError, match="same number of ranks on every host"):
        wrap_blocks("fsdpc", toy(), sharding_strategy=HYBRID)


@ranks(2)
def test_the_precision_line(rank, world):
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap_blocks("fsdpc", toy(), mixed_precision=mixed)
    assert model.precision_line == ""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fsdpc").addHandler(handler)
    logging.getLogger("fsdpc").setLevel(logging.INFO)
    for _ in range(2):
        model(tokens(rank, 0))
    assert lines == [model.precision_line] * (rank == 0)
    for part in ("storage fp32", "compute bf16", "reduce fp32", "gradients / 2", "3 units"):
        assert part in model.precision_line


def named(*names):
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))


def in_one_unit(model):
    return wrap("fsdpc", model)


def in_units(model):
    return wrap("fsdpc", model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def by_fully_shard(model):
    for module in (*model, model):
        fully_shard(module)
    return model


@ranks(2)
def test_names_that_differ_between_ranks(rank, world):
    """If parameters have other names on one rank, there is one warning, and the model trains.

    If the ranks have the same names in different orders, an error is raised.
    """
    said = []
    for shard in (in_one_unit, in_units, by_fully_shard):
        results = []
        for names in (("a", "b"), ("a", "y" if rank else "b")):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = shard(named(*names))
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for _ in range(2):
                    loss = model(torch.full((1, 4), 1.0 + rank)).square().sum()
                    loss.backward()
                    optimizer.step()
                results.append(float(loss.detach()))
            said += [str(each.message) for each in caught if "only names" in str(each.message)]
            options = StateDictOptions(full_state_dict=True)
            keys = list(get_model_state_dict(model, options=options))
            assert not keys or keys[2] == f"{names[1]}.weight"
        assert results[0] == results[1]
        swapped = named(*(("b", "a") if rank else ("a", "b")))
        with pytest.raises(Exception, match="disagree"):
            shard(swapped)(torch.ones(1, 4))
        with pytest.raises(Exception, match="disagree"):  # shapes, too
            shard(nn.Sequential(nn.Linear(4, 4 + rank)))
    assert len(said) == 1 and "rank 0 has" in said[0]
