"""LOCAL_STATE_DICT: flat parameters as they lie, and where they do not exist."""

from __future__ import annotations

import pytest
import torch
from checkpoints import LOCAL, SHARDED, build, load, mixed, same, save, typed, whole
from harness import ranks, run_ranks
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import LocalStateDictConfig, ShardingStrategy
from toys import loss_of, tokens, toy, wrap, wrap_blocks


@ranks(2, 3)
def test_round_trip(rank, world):
    model, other = (wrap_blocks("fsdpc", toy(seed=seed)) for seed in (0, 1))
    with typed(model, LOCAL), typed(other, LOCAL, LocalStateDictConfig(offload_to_cpu=True)):
        state = other.state_dict()
        assert list(state) == ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]
        assert all(isinstance(value, ShardedTensor) for value in state.values())
        result = model.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
    same(model.state_dict(), toy(seed=1).state_dict())
    loss_of(model, tokens(rank, 0)).backward()


@ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_keys_are_torchs(rank, world):
    models = [build(kind) for kind in ("fsdpc-flat", "fsdp1-flat")]
    states = []
    for model in models:
        with typed(model, LOCAL):
            states.append(model.state_dict())
    assert sorted(states[0]) == sorted(states[1])
    assert all(type(a) is ShardedTensor for a in states[1].values())


@ranks(2, 3)
def test_several_flat_parameters_in_a_unit(rank, world):
    model, other = (wrap("fsdpc", mixed(seed=seed)) for seed in (0, 1))
    with typed(model, LOCAL), typed(other, LOCAL):
        state = other.state_dict()
        flats = [key for key in state if "_flat_param" in key]
        assert len(flats) == 4, "float32, frozen, bfloat16 and integers"
        assert whole(state["_flat_param"]).dtype == torch.float32
        model.load_state_dict(state)
    same(model.state_dict(), mixed(seed=1).state_dict())


@ranks(2)
def test_nothing_is_copied(rank, world):
    model = wrap("fsdpc", toy())
    with typed(model, LOCAL):
        shard = model.state_dict()["_flat_param"].local_shards()[0].tensor
    assert shard.data_ptr() == model.params[0].data_ptr()


@ranks(2)
def test_strict_loading_and_what_does_not_fit(rank, world):
    model, wide = wrap_blocks("fsdpc", toy()), wrap_blocks("fsdpc", toy(width=40))
    with typed(model, LOCAL), typed(wide, LOCAL):
        state = model.state_dict()
        other = wide.state_dict()
        with pytest.raises(RuntimeError, match=r"blocks\.1\._flat_param of unit.*same wrapping"):
            model.load_state_dict({**state, "blocks.1._flat_param": other["blocks.1._flat_param"]})
        del state["blocks.0._flat_param"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"blocks\.0\._flat_param"'):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert result.missing_keys == ["blocks.0._flat_param"]
    same(model.state_dict(), toy().state_dict())


@ranks(2)
@pytest.mark.parametrize("kind", ["fsdpc", "fsdpc-mesh"])
def test_where_it_does_not_exist(rank, world, kind):
    model = build(kind)
    text = "device_mesh" if "mesh" in kind else "use_orig_params"
    with typed(model, LOCAL):
        for call in (model.state_dict, lambda: model.load_state_dict({})):
            with pytest.raises(RuntimeError, match=text):
                call()
        if "mesh" in kind:
            with pytest.raises(RuntimeError, match=text):
                type(model).get_state_dict_type(model)
    with typed(model, SHARDED):
        same(model.state_dict(), toy().state_dict())


@ranks(2)
def test_what_is_not_sharded_comes_full_with_a_warning(rank, world):
    with pytest.warns(FutureWarning):
        model = wrap("fsdpc", toy(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with typed(model, LOCAL), pytest.warns(UserWarning, match="full_state_dict will be returned"):
        same(model.state_dict(), toy().state_dict())


def write(rank, world, path):
    model = wrap_blocks("fsdpc", toy(seed=1))
    with typed(model, LOCAL):
        save(path, model.state_dict())


def read(rank, world, path):
    model = wrap_blocks("fsdpc", toy())
    with typed(model, LOCAL):
        state = model.state_dict()
        load(path, state)  # into the shards themselves
        model.load_state_dict(state)
    same(model.state_dict(), toy(seed=1).state_dict())


@pytest.mark.parametrize("worlds", [(2, 2), (2, 3), (3, 2)])
def test_on_disk(tmp_path, worlds):
    run_ranks(write, worlds[0], path=str(tmp_path))
    run_ranks(read, worlds[1], path=str(tmp_path))
