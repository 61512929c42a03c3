"""Tests of optimizer state dicts in the SHARDED form. Each rank has rows of the states that the
unsharded optimizer would have.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checkpoints import whole
from harness import ranks
from optim_runs import both, check_dict, mixed, save, start
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from toys import toy

from fsdpc._spans import window as _optim_window

FULL = StateDictType.FULL_STATE_DICT
SHARDED, LOCAL = StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
WIRE = {"FSDPC_COLLECTIVES": "wire"}


def in_form(run, form=SHARDED, options=None):
    return type(run.model).state_dict_type(run.model, form, None, options)


def check_loads(run, saved, expected, *form):
    """Load `saved` in the form `form`. The optimizer of the run must then hold `expected`."""
    with in_form(run, *form):
        loaded = type(run.model).optim_state_dict_to_load(run.model, run.optim, saved)
    run.optim.load_state_dict(loaded)
    check_dict(save(run), expected)


def check_form(saved, form):
    for state in saved["state"].values():
        for key, value in state.items():
            assert type(value) is (form if value.dim() else torch.Tensor), key


@ranks(2, 3)
@both
@pytest.mark.parametrize("form", [SHARDED, LOCAL], ids=["sharded", "local"])
def test_rows_and_back(rank, world, form, use_orig_params):
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    with in_form(run, form):
        saved = save(run)
    check_form(saved, ShardedTensor)
    check_dict(whole(saved), run.expected())
    up = saved["state"]["blocks.0.up.weight"]["exp_avg"].local_shards()
    assert sum(shard.tensor.numel() for shard in up) <= -(-11 // world) * 6
    again = start(rank, mixed(), steps=0, use_orig_params=not use_orig_params)
    check_loads(again, saved, run.expected())


@ranks(2, env=WIRE)
@both
def test_over_torchs_collectives(rank, world, use_orig_params):
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    with in_form(run):
        saved = save(run)
        check_dict(whole(saved), run.expected())
        again = start(rank, mixed(), steps=0, use_orig_params=use_orig_params)
    check_loads(again, saved, run.expected())


@ranks(2, 4)
@both
def test_dtensors_with_a_mesh(rank, world, use_orig_params):
    shape, names = ((2,), ("shard",)) if world == 2 else ((2, 2), ("copies", "shard"))
    strategy = ShardingStrategy.FULL_SHARD if world == 2 else ShardingStrategy.HYBRID_SHARD
    options = {
        "device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
    }
    run = start(rank, toy(), steps=0, **options)
    if world == 4:
        run.reference.groups = [[0, 1], [2, 3]]
    run.train(2)
    config = ShardedOptimStateDictConfig(_use_dtensor=True)
    with type(run.model).state_dict_type(
        run.model, SHARDED, ShardedStateDictConfig(_use_dtensor=True), config
    ):
        saved = save(run)
    check_form(saved, DTensor)
    check_dict(whole(saved), run.expected())
    again = start(rank, toy(), steps=0, **options)
    check_loads(again, saved, run.expected())


@ranks(2)
def test_a_mesh_is_noted_in_the_configurations(rank, world):
    """As with torch's class, the configuration shows whether state dicts have DTensors."""
    run = start(rank, toy(), device_mesh=init_device_mesh("cpu", (2,)))
    config = ShardedOptimStateDictConfig()
    with in_form(run, SHARDED, config):
        settings = type(run.model).get_state_dict_type(run.model)
        assert settings.optim_state_dict_config is config and config._use_dtensor
        check_form(save(run), DTensor)
    plain = start(rank, toy())
    with in_form(plain):
        settings = type(plain.model).get_state_dict_type(plain.model)
        assert not settings.optim_state_dict_config._use_dtensor


@ranks(2)
def test_dtensors_that_lie_in_another_way_are_gathered(rank, world):
    run = start(rank, toy())
    saved = save(run)
    mesh = init_device_mesh("cpu", (2,))
    spread = {
        **saved,
        "state": {
            name: {
                key: distribute_tensor(value, mesh, [Replicate()]) if value.dim() else value
                for key, value in state.items()
            }
            for name, state in saved["state"].items()
        },
    }
    again = start(rank, toy(), steps=0)
    check_loads(again, spread, run.expected(), FULL)


@ranks(2)
def test_dtensors_need_a_mesh(rank, world):
    run = start(rank, toy())
    with in_form(run, SHARDED, ShardedOptimStateDictConfig(_use_dtensor=True)):
        with pytest.raises(AssertionError, match="device_mesh"):
            save(run)


@ranks(2)
@both
def test_units_that_are_not_sharded_stay_whole(rank, world, use_orig_params):
    run = start(
        rank, toy(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params
    )
    with in_form(run):
        saved = save(run)
    check_form(saved, torch.Tensor)
    check_dict(saved, run.expected())
    other = start(rank, toy(), steps=2, use_orig_params=use_orig_params)
    with in_form(other):
        rows = save(other)
    again = start(
        rank,
        toy(),
        steps=0,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=use_orig_params,
    )
    check_loads(again, rows, run.expected())


@ranks(4)
def test_hybrid_without_a_mesh(rank, world):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair = (groups[rank // 2], groups[2 + rank % 2])
    run = start(
        rank, toy(), process_group=pair, steps=0, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    run.reference.groups = [[0, 1], [2, 3]]
    run.train(2)
    with in_form(run):
        saved = save(run)
    check_form(saved, ShardedTensor)
    again = start(rank, toy(), steps=0)
    check_loads(again, saved, run.expected())


@ranks(3)
@both
def test_through_windows_that_hold_a_few_elements(rank, world, use_orig_params):
    _optim_window.WINDOW_BYTES, _optim_window.LEAST_NUMEL = 20, 7
    run = start(rank, mixed(), use_orig_params=use_orig_params)
    expected = run.expected()
    check_dict(save(run), expected)
    with in_form(run):
        rows = save(run)
    check_dict(whole(rows), expected)
    config = FullOptimStateDictConfig(rank0_only=True)
    for kind, options, saved in ((SHARDED, None, rows), (FULL, config, expected)):
        again = start(rank, mixed(), steps=0, use_orig_params=use_orig_params)
        check_loads(again, saved, expected, kind, options)
