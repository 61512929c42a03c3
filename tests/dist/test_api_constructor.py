"""The constructor: exceptions, warnings and attributes, the same as torch's class has.

The table of mistakes runs against either engine (`--engine torch` shows that it tells the truth).
"""

from __future__ import annotations

import inspect
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
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from toys import Block, tokens, toy, wrap, wrap_blocks

from fsdpc import fully_shard

HYBRID = ShardingStrategy.HYBRID_SHARD


def mixed_states(model):
    return [model.head, model.norm.weight]


# name: (options from the model, exception, words that the message must hold)
MISTAKES = {
    "both ignored spellings": (
        lambda m: {"ignored_modules": [m.head], "ignored_states": [m.norm]},
        ValueError,
        "ignored_modules and ignored_states",
    ),
    "mixed ignored states": (
        lambda m: {"ignored_states": mixed_states(m)},
        ValueError,
        "all nn.Parameter or all nn.Module",
    ),
    "ignored modules of wrong type": (
        lambda m: {"ignored_modules": [1]},
        ValueError,
        "expects nn.Module list elements",
    ),
    "ignored modules not iterable": (lambda m: {"ignored_modules": 3}, TypeError, "iterable"),
    "ignored states not iterable": (lambda m: {"ignored_states": 3}, TypeError, "iterable"),
    "group and mesh": (
        lambda m: {
            "process_group": dist.group.WORLD,
            "device_mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        },
        ValueError,
        "both process_group and device_mesh",
    ),
    "hybrid by hand without groups": (
        lambda m: {"sharding_strategy": HYBRID},
        ValueError,
        "requires explicit specification of process group or device_mesh",
    ),
    "hybrid with one group": (
        lambda m: {"sharding_strategy": HYBRID, "process_group": dist.group.WORLD},
        ValueError,
        "process_group",
    ),
    "hybrid with a 1-D mesh": (
        lambda m: {
            "sharding_strategy": HYBRID,
            "device_mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        },
        ValueError,
        "ndim=2",
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(rank, world, engine, name):
    options, error, words = MISTAKES[name]
    model = toy()
    with pytest.raises(error, match=words):
        wrap(engine, model, **options(model))
    assert [p.dim() for p in model.parameters()][0] == 2, "the model is untouched"


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
def test_no_device_means_cpu(rank, world):
    model = wrap("fsdpc", toy(), device_id=None)
    assert model.compute_device == torch.device("cpu")
    model(tokens(rank, 0)).sum().backward()


@ranks(2)
def test_nested_wrapping_by_policy_is_refused(rank, world, engine):
    model = toy()
    model.head = wrap(engine, model.head)
    with pytest.raises(ValueError, match=r"auto wrapping requires.*head"):
        wrap_blocks(engine, model)


@ranks(2)
def test_ignoring_a_unit_is_refused(rank, world, engine):
    model = toy()
    model.head = wrap(engine, model.head)
    with pytest.raises(ValueError, match="should not include FSDP modules"):
        wrap(engine, model, ignored_modules=[model.head])


def messages_of(engine, category, module, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = wrap(engine, module, **options)
    return wrapped, [str(w.message) for w in caught if w.category is category]


@ranks(1, 2)
def test_strategy_warnings(rank, world, engine):
    _, texts = messages_of(engine, UserWarning, toy())
    assert any("switching to use `NO_SHARD`" in text for text in texts) == (world == 1)
    no_shard = ShardingStrategy.NO_SHARD
    model, texts = messages_of(engine, FutureWarning, toy(), sharding_strategy=no_shard)
    assert any("`NO_SHARD` sharding strategy is deprecated" in t for t in texts) == (world > 1)
    assert model.sharding_strategy is no_shard


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
def test_container_warnings(rank, world, engine):
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        _, texts = messages_of(engine, UserWarning, container)
        assert any("do not implement forward" in text for text in texts)
    model = toy()
    _, texts = messages_of(engine, UserWarning, model, ignored_modules=[model])
    assert any("ignore the top-level module" in text for text in texts)


@ranks(2)
def test_attributes(rank, world, engine):
    model = wrap_blocks(
        engine,
        toy(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        forward_prefetch=True,
        limit_all_gathers=False,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
    )
    assert (model.rank, model.world_size) == (rank, world)
    assert model.process_group is dist.group.WORLD
    assert model.compute_device == torch.device("cpu")
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert model.mixed_precision == MixedPrecision(reduce_dtype=torch.float32)
    assert model.cpu_offload == CPUOffload()
    assert (model.forward_prefetch, model.limit_all_gathers) == (True, False)
    assert model._use_orig_params is False and model._has_params
    assert model._is_root is None
    assert model.training_state.name == "IDLE"
    assert [p.dim() for p in model.params] == [1]
    assert model._flat_param is model.params[0]
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    cls = type(model)
    assert cls.fsdp_modules(model) == [model, model.blocks[0], model.blocks[1]]
    assert cls.fsdp_modules(model, root_only=True) == [model]
    assert isinstance(model.module.blocks[0].module, Block)
    assert model.embed.num_embeddings == 13, "missing attributes come from the wrapped module"


@ranks(2)
def test_indexing_reaches_the_wrapped_module(rank, world, engine):
    model = wrap(engine, nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert isinstance(model[1], nn.ReLU)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = model.no_such_name


@ranks(2)
def test_the_signature_is_torchs(rank, world):
    import fsdpc

    ours = inspect.signature(fsdpc.FullyShardedDataParallel.__init__).parameters
    theirs = inspect.signature(torch.distributed.fsdp.FullyShardedDataParallel.__init__).parameters
    assert [(n, p.default) for n, p in ours.items()] == [(n, p.default) for n, p in theirs.items()]


@ranks(2)
def test_options_must_agree_across_the_tree(rank, world, engine):
    for name, values in {
        "use_orig_params": (True, False),
        "limit_all_gathers": (True, False),
    }.items():
        model = toy()
        model.head = wrap(engine, model.head, **{name: values[0]})
        model = wrap(engine, model, **{name: values[1]})
        with pytest.raises(ValueError, match=f"one homogeneous value for .*{name}"):
            model(tokens(rank, 0))


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


@ranks(2)
def test_a_module_without_parameters(rank, world, engine):
    model = wrap(engine, nn.Sequential(nn.ReLU(), nn.Tanh()))
    x = torch.randn(3)
    torch.testing.assert_close(model(x), torch.tanh(torch.relu(x)))
    assert not model._has_params and model._handle is None and model.params == []


@ranks(2)
def test_a_root_without_parameters_of_its_own(rank, world, engine):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = wrap(engine, model, auto_wrap_policy=always_wrap_policy)
    model(torch.randn(2, 3)).sum().backward()
    assert model.check_is_root() and not model[0].check_is_root()
    assert all(p.grad is not None for p in model.parameters() if p.numel())


@ranks(4)
def test_hybrid_groups(rank, world, engine):
    mesh = init_device_mesh("cpu", (2, 2))
    model = wrap(engine, toy(), sharding_strategy=HYBRID, device_mesh=mesh)
    assert dist.get_process_group_ranks(model.process_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(model._inter_node_pg) == [rank % 2, rank % 2 + 2]
    pair = (mesh.get_group(1), mesh.get_group(0))
    model = wrap_blocks(engine, toy(), sharding_strategy=HYBRID, process_group=pair)
    assert (model.blocks[0].process_group, model.blocks[0]._inter_node_pg) == pair


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
    """Only names: one warning, and the model trains; the same names in another order: refused."""
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
