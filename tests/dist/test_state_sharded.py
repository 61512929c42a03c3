"""Tests of SHARDED_STATE_DICT: its values equal those of the unsharded model, and its tensors
have the same types as in torch's state dicts.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from checkpoints import FULL, SHARDED, build, hybrid, mixed, same, typed, whole
from harness import ranks, run_ranks
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from toys import loss_of, tokens, toy, wrap, wrap_blocks

WIRES = [None, "wire"]


def round_trip(rank, world, mesh, use_orig_params):
    options = {"use_orig_params": use_orig_params}
    if mesh:
        options["device_mesh"] = init_device_mesh("cpu", (world,))
    expected = copy.deepcopy(mixed(seed=1).state_dict())
    model = wrap("fsdpc", mixed(), **options)
    saved = wrap("fsdpc", mixed(seed=1), **options)
    config = ShardedStateDictConfig()
    with typed(saved, SHARDED, config):
        state = saved.state_dict()
    assert config._use_dtensor == mesh
    kind = DTensor if mesh else ShardedTensor
    for key in ("embed.weight", "head.weight", "stage.0.bias", "again.weight", "low", "codes"):
        assert type(state[key]) is kind, key
    assert type(state["scale"]) is torch.Tensor and type(state["mask"]) is torch.Tensor
    same(state, expected)
    with typed(model):
        result = model.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    same(model.state_dict(), expected)
    same(saved.state_dict(), expected)
    assert state._metadata.keys() == expected._metadata.keys()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("mesh", [False, True])
def test_round_trip(world, wire, use_orig_params, mesh):
    env = {"FSDPC_COLLECTIVES": wire} if wire else {}
    run_ranks(round_trip, world, env=env, mesh=mesh, use_orig_params=use_orig_params)


@ranks(2, 3)
@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_form_is_torchs(rank, world, mesh):
    suffix = "-mesh" if mesh else ""
    models = [build(kind + suffix) for kind in ("fsdpc", "fsdp1")]
    states = []
    for model in models:
        with typed(model):
            states.append(model.state_dict())
    got, expected = states
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert type(got[key]) is type(value), key
        if mesh:
            assert got[key].placements == value.placements and got[key].shape == value.shape
            assert torch.equal(got[key].to_local(), value.to_local()), key
            continue
        assert got[key].metadata() == value.metadata(), key
        pairs = zip(got[key].local_shards(), value.local_shards(), strict=True)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs), key


@ranks(2)
@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_dict_loads_and_the_other_way_round(rank, world, mesh):
    suffix = "-mesh" if mesh else ""
    for source, target in (("fsdpc", "fsdp1"), ("fsdp1", "fsdpc")):
        model, other = build(source + suffix, toy(seed=1)), build(target + suffix)
        with typed(model), typed(other):
            other.load_state_dict(model.state_dict())
        same(other.state_dict(), toy(seed=1).state_dict())


@ranks(4)
@pytest.mark.parametrize("mesh", [False, True])
def test_hybrid(rank, world, mesh):
    options = hybrid(mesh)
    expected = toy(seed=2).state_dict()
    model = wrap_blocks("fsdpc", toy(), **options)
    other = wrap_blocks("fsdpc", toy(seed=2), **options)
    with typed(model), typed(other):
        state = other.state_dict()
        if mesh:
            assert state["embed.weight"].placements == (Replicate(), Shard(0))
        else:
            assert len(state["embed.weight"].metadata().shards_metadata) == 2
        model.load_state_dict(state)
    if mesh:
        same(state, expected)
    same(model.state_dict(), expected)


@ranks(4)
@pytest.mark.parametrize("names", [None, ("data", "model")])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_mesh_with_a_dimension_that_nothing_is_sharded_over(rank, world, names, strategy):
    """A model that is sharded over dimension 0 of a mesh saves its values as rows of a 1-D mesh.
    The values of ranks that differ in the other dimension may differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy[strategy]}
    column = mesh.get_local_rank(1)
    model = wrap_blocks("fsdpc", toy(), **options)
    other = wrap_blocks("fsdpc", toy(seed=2 + column), **options)
    optimizer = torch.optim.Adam(other.parameters())
    loss_of(other, tokens(rank, 0)).backward()
    optimizer.step()
    expected = other.state_dict()
    with typed(model), typed(other):
        state = other.state_dict()
        value = state["embed.weight"]
        assert type(value) is DTensor and value.placements == (Shard(0),)
        assert value.to_local().shape[0] in (6, 7)
        same(state, expected)
        model.load_state_dict(state)
        moments = type(other).optim_state_dict(other, optimizer)
        assert type(moments["state"]["embed.weight"]["exp_avg"]) is DTensor
        fresh = torch.optim.Adam(model.parameters())
        fresh.load_state_dict(type(model).optim_state_dict_to_load(model, fresh, moments))
    same(model.state_dict(), expected)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])


@ranks(4)
def test_rows_over_another_dimension_of_the_mesh_are_gathered(rank, world):
    """The state dict holds values as torch's FullyShardedDataParallel shards them on a 2-D mesh:
    over dimension 1. A load must gather a value either on every rank or on no rank."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = wrap_blocks("fsdpc", toy(), device_mesh=mesh)
    expected = toy(seed=1).state_dict()
    state = {
        key: distribute_tensor(value, mesh, [Replicate(), Shard(0)])
        for key, value in expected.items()
    }
    with typed(model):
        model.load_state_dict(state)
    same(model.state_dict(), expected)


@ranks(2)
def test_full_tensors_and_other_placements_load(rank, world):
    expected = toy(seed=3).state_dict()
    model = build("fsdpc-mesh")
    mesh = init_device_mesh("cpu", (world,))
    state = dict(expected)
    state["embed.weight"] = torch.distributed.tensor.distribute_tensor(
        state["embed.weight"], mesh, [Shard(1)]
    )
    with typed(model):
        model.load_state_dict(state)
    same(model.state_dict(), expected)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_strict_loading(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    before = model.state_dict()
    other = wrap_blocks("fsdpc", toy(seed=1), use_orig_params=use_orig_params)
    wide = wrap_blocks("fsdpc", toy(width=8), use_orig_params=use_orig_params)
    with typed(model), typed(other), typed(wide):
        state = other.state_dict()
        missing = ["blocks.1.up.bias", "head.weight"]
        for key in missing:
            del state[key]
        state["surplus"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match=r'"blocks.1.up.bias", "head.weight"'):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert result.missing_keys == missing and result.unexpected_keys == ["surplus"]
        state = other.state_dict()
        state["blocks.0.up.weight"] = wide.state_dict()["blocks.0.up.weight"]
        wrong = r"While loading blocks\.0\.up\.weight of unit 'blocks\.0'.*\(11, 8\).*\(11, 6\)"
        with pytest.raises(RuntimeError, match=wrong):
            model.load_state_dict(state)
        state["blocks.0.up.weight"] = "text"
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*expected a tensor"):
            model.load_state_dict(state)
    got = model.state_dict()
    expected = toy(seed=1).state_dict()
    for key in ("head.bias", "blocks.1.down.weight"):
        assert torch.equal(got[key], expected[key]), key
    for key in ("blocks.0.up.weight",):
        assert torch.equal(got[key], expected[key]), "the first, non-strict load"
    assert not torch.equal(before["head.weight"], got["head.weight"]), "from the complete dict"
    loss_of(model, tokens(rank, 0)).backward()


@ranks(2)
def test_a_plain_root_around_units(rank, world):
    expected = toy(seed=1).state_dict()
    model, other = toy(), toy(seed=1)
    for root in (model, other):
        for i, block in enumerate(root.blocks):
            root.blocks[i] = wrap("fsdpc", block)
    with typed(model), typed(other):
        state = other.state_dict()
        assert type(state["embed.weight"]) is torch.Tensor
        assert type(state["blocks.0.up.weight"]) is ShardedTensor
        same(state, expected)
        model.load_state_dict(state)
    same(model.state_dict(), expected)


@ranks(2)
@pytest.mark.parametrize("place", ["inside", "outside", "modules"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_activation_wrappers(rank, world, place, use_orig_params):
    expected = toy(seed=1).state_dict()

    def wrapped(seed):
        model = toy(seed=seed)
        if place == "inside":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(block)
        options = {"use_orig_params": use_orig_params}
        for i, block in enumerate(model.blocks):
            model.blocks[i] = wrap("fsdpc", block, **options)
        model = wrap("fsdpc", model, **options)
        if place == "outside":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(block)
        if place == "modules":
            apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        return model

    model, other = wrapped(0), wrapped(1)
    with typed(model), typed(other):
        state = other.state_dict()
        same(state, expected)
        model.load_state_dict(state)
    same(model.state_dict(), expected)
    loss_of(model, tokens(rank, 0)).backward()


@ranks(2)
def test_ignored_parts_are_plain(rank, world):
    expected = toy(seed=1).state_dict()

    def wrapped(seed):
        model = toy(seed=seed)
        ignored = [model.norm.weight, model.blocks[0].up.bias]
        return wrap_blocks("fsdpc", model, ignored_states=ignored)

    model, other = wrapped(0), wrapped(1)
    with typed(model), typed(other):
        state = other.state_dict()
        assert type(state["norm.weight"]) is type(state["blocks.0.up.bias"]) is torch.Tensor
        assert type(state["norm.bias"]) is ShardedTensor
        assert state.keys() == expected.keys()
        same({key: state[key] for key in expected}, expected)
        model.load_state_dict(state)
    got = model.state_dict()
    same({key: got[key] for key in expected}, expected)


@ranks(2)
def test_mixed_precision(rank, world):
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    expected = copy.deepcopy(mixed().state_dict())
    model = wrap("fsdpc", mixed(), mixed_precision=precision)
    with torch.no_grad():
        model(torch.tensor([[1, 2], [3, 4]]))
    with typed(model):
        state = model.state_dict()
    expected["stage.1.running_mean"] = state["stage.1.running_mean"]
    expected["stage.1.running_var"] = state["stage.1.running_var"]
    expected["stage.1.num_batches_tracked"] = state["stage.1.num_batches_tracked"]
    assert state["stage.1.running_mean"].dtype == state["mask"].dtype == torch.float32
    expected["mask"] = expected["mask"].bfloat16().float()
    same(state, expected)


@ranks(2)
def test_what_is_not_sharded_comes_full_with_a_warning(rank, world):
    with pytest.warns(FutureWarning):
        model = wrap("fsdpc", toy(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with typed(model):
        with pytest.warns(UserWarning, match="full_state_dict will be returned"):
            state = model.state_dict()
        assert all(type(value) is torch.Tensor for value in state.values())
        same(state, toy().state_dict())
        with pytest.warns(UserWarning, match="full_state_dict will be returned"):
            model.load_state_dict(toy(seed=1).state_dict())
    same(model.state_dict(), toy(seed=1).state_dict())


@ranks(2)
def test_dtensors_need_a_mesh(rank, world):
    model = wrap("fsdpc", toy())
    with typed(model, SHARDED, ShardedStateDictConfig(_use_dtensor=True)):
        with pytest.raises(RuntimeError, match="device_mesh"):
            model.state_dict()
    same(model.state_dict(), toy().state_dict())


@ranks(2)
def test_inside_summon_full_params(rank, world):
    model = wrap_blocks("fsdpc", toy())
    with type(model).summon_full_params(model), typed(model):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="leave the context"):
            model.load_state_dict(state)
    same(state, toy().state_dict())
    assert all(isinstance(value, ShardedTensor) for value in state.values())


@ranks(2)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_inside_summon_on_rank_0(rank, world, kind):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    with type(model).summon_full_params(model, rank0_only=True, writeback=False):
        with typed(model, kind):
            with pytest.raises(RuntimeError, match="ranks other than 0 have no full parameters"):
                model.state_dict()
        with typed(model, FULL, FullStateDictConfig(rank0_only=True)):
            same(model.state_dict(), toy().state_dict() if rank == 0 else {})
    with typed(model, kind):
        same(model.state_dict(), toy().state_dict())


@ranks(2)
def test_settings_of_units(rank, world, engine):
    model = wrap_blocks(engine, toy(), use_orig_params=True)
    cls = type(model)
    cls.set_state_dict_type(model.blocks[0], FULL, FullStateDictConfig(rank0_only=True))
    assert cls.set_state_dict_type(model, SHARDED).state_dict_type is FULL, "configs may differ"
    assert type(cls.get_state_dict_type(model).state_dict_config) is ShardedStateDictConfig
    cls.set_state_dict_type(model.blocks[0], FULL)
    for call in (cls.get_state_dict_type, lambda m: cls.set_state_dict_type(m, SHARDED)):
        with pytest.raises(AssertionError):
            call(model)


@ranks(2)
def test_loading_by_assignment(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    params = list(model.parameters())
    other = wrap_blocks("fsdpc", toy(seed=1), use_orig_params=True)
    with typed(model), typed(other):
        model.load_state_dict(other.state_dict(), assign=True)
    same(model.state_dict(), toy(seed=1).state_dict())
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_between_forward_and_backward(rank, world, strategy, kind, use_orig_params):
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    model, other = (wrap_blocks("fsdpc", toy(), **options) for _ in range(2))
    losses = [loss_of(m, tokens(rank, 0)) for m in (model, other)]
    with typed(model, kind):
        same(model.state_dict(), toy().state_dict())
    for loss in losses:
        loss.backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(p.grad is q.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs)


@ranks(2)
def test_during_forward_is_refused(rank, world):
    model = wrap_blocks("fsdpc", toy())
    raised = []

    def save(*args):
        with pytest.raises(AssertionError, match="in forward on rank"):
            model.state_dict()
        raised.append(True)

    model.blocks[0].module.up.register_forward_hook(save)
    loss_of(model, tokens(rank, 0)).backward()
    assert raised


@ranks(2)
def test_a_module_that_writes_in_its_own_way(rank, world):
    """A module's state dict hook casts the values that are saved. Rows are cast too, and remain
    rows."""
    model = toy()
    model.head._register_state_dict_hook(
        lambda m, state, prefix, _: state.update(
            {k: v.half() for k, v in state.items() if k.startswith(prefix)}
        )
    )
    expected = {k: v.half() if k.startswith("head.") else v for k, v in toy().state_dict().items()}
    model = wrap_blocks("fsdpc", model)
    with typed(model):
        state = model.state_dict()
    assert whole(state["head.weight"]).dtype == torch.float16
    same(state, expected)


def write_own_file(rank, world, folder):
    model = wrap_blocks("fsdpc", toy(seed=1))
    with typed(model):
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    other = wrap_blocks("fsdpc", toy())
    with typed(other), load_with_process_group(dist.group.WORLD):
        other.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=False))
    same(other.state_dict(), toy(seed=1).state_dict())


def test_a_file_for_each_rank(tmp_path):
    run_ranks(write_own_file, 2, folder=str(tmp_path))
