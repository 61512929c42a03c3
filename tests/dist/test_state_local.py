"""Tests of LOCAL_STATE_DICT: flat parameters as ranks hold them, and models without
flat parameters.
"""

from __future__ import annotations

import io

import pytest
import torch
from checkpoints import LOCAL, SHARDED, build, load, mixed, same, save, typed, whole
from harness import ranks, run_ranks
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, ShardMetadata
from torch.distributed.fsdp import LocalStateDictConfig, MixedPrecision, ShardingStrategy
from torch.distributed.remote_device import _remote_device
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
def test_where_it_does_not_exist(rank, world):
    model = build("fsdpc-mesh")
    text = "^Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with"
    with typed(model, LOCAL):
        for call in (model.state_dict, lambda: model.load_state_dict({})):
            with pytest.raises(RuntimeError, match=text):
                call()
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
        load(path, state)  # load() writes directly into the shards
        model.load_state_dict(state)
    same(model.state_dict(), toy(seed=1).state_dict())


@pytest.mark.parametrize("worlds", [(2, 2), (2, 3), (3, 2)])
def test_on_disk(tmp_path, worlds):
    run_ranks(write, worlds[0], path=str(tmp_path))
    run_ranks(read, worlds[1], path=str(tmp_path))


@ranks(2, 3)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_one_cut_for_all_precisions(rank, world, low):
    """A run in low precision can load flat parameters and optimizer states of a float32 run."""
    policies = (None, MixedPrecision(low, low), MixedPrecision(reduce_dtype=low))
    models = [wrap_blocks("fsdpc", toy(seed=i), mixed_precision=p) for i, p in enumerate(policies)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, tokens(rank, 0)).backward()
        optimizer.step()
        assert [p.shape for p in model.parameters()] == [p.shape for p in models[0].parameters()]
    with typed(models[0], LOCAL):
        state = models[0].state_dict()
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        with typed(model, LOCAL):
            model.load_state_dict(state)
        same(model.state_dict(), models[0].state_dict())
        optimizer.load_state_dict(optimizers[0].state_dict())
        optimizer.step()


class Even(torch.nn.Module):
    """A model whose sizes make fsdpc and torch shard at the same places."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(16, 16, bias=False)
        self.second = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def plain_values(state):
    return {
        key: value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
        for key, value in state.items()
    }


@ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_original_parameters_as_torch_saves_them(rank, world, offload):
    """The dict has this rank's elements of each parameter, and the flat parameter;
    torch cannot load such a dict.
    """
    states = []
    for engine in ("fsdpc", "torch.distributed.fsdp"):
        model = wrap_blocks(engine, Even(), torch.nn.Linear, use_orig_params=True)
        with typed(model, LOCAL, LocalStateDictConfig(offload_to_cpu=offload)):
            states.append(model.state_dict())
    assert list(states[0]) == list(states[1])
    ours, theirs = (plain_values(state) for state in states)
    assert [type(value) for value in states[0].values()] == [type(v) for v in states[1].values()]
    for key, value in theirs.items():
        assert torch.equal(ours[key], value.detach()), key
        assert ours[key].dtype == value.dtype and ours[key].device == value.device
    model = wrap_blocks("torch.distributed.fsdp", toy(), use_orig_params=True)
    ours = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    with typed(model, LOCAL), typed(ours, LOCAL):
        assert list(ours.state_dict()) == list(model.state_dict())
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict(model.state_dict())


@ranks(2, 3)
@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_from_one_use_orig_params_to_the_other(rank, world, source, target):
    for make in (toy, mixed):
        model = wrap_blocks("fsdpc", make(seed=1), use_orig_params=source)
        other = wrap_blocks("fsdpc", make(seed=0), use_orig_params=target)
        with typed(model, LOCAL), typed(other, LOCAL):
            state = model.state_dict()
            own = [key for key in state if not key.rpartition(".")[2].startswith("_flat_param")]
            if source:
                key = "head.weight"
                assert type(state[key]) is torch.Tensor and state[key].dim() == 1 and key in own
            result = other.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        same(other.state_dict(), make(seed=1).state_dict())


@ranks(2)
def test_original_parameters_that_do_not_fit(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    wide = wrap_blocks("fsdpc", toy(width=40), use_orig_params=True)
    with typed(model, LOCAL), typed(wide, LOCAL):
        state, other = model.state_dict(), wide.state_dict()
        with pytest.raises(RuntimeError, match=r"blocks\.1\._flat_param of unit.*same wrapping"):
            model.load_state_dict({**state, "blocks.1._flat_param": other["blocks.1._flat_param"]})
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="No `FlatParameter` in `state_dict`"):
            model.load_state_dict(toy(seed=1).state_dict())
    same(model.state_dict(), toy().state_dict())


ALLOWED = [  # what torch.load must allow so that it loads a dict of torch's FSDP
    *(Shard, ShardMetadata, ShardedTensor, ShardedTensorMetadata, TensorProperties),
    *(ChunkShardingSpec, MEM_FORMAT_ENCODING, _remote_device, getattr),
    ShardedTensor.ProcessGroupState,
]


@ranks(2)
def test_a_saved_dict_loads_with_the_classes_that_torchs_needs(rank, world):
    model = wrap_blocks("fsdpc", toy())
    with typed(model, LOCAL):
        state = model.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        with torch.serialization.safe_globals(ALLOWED):
            loaded = torch.load(file, weights_only=True)
        assert loaded.keys() == state.keys()
        model.load_state_dict(loaded)
