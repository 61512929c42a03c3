"""Tests of torch.distributed.checkpoint.state_dict on fsdpc models and
on the other models that it accepts.
"""

from __future__ import annotations

import copy
import dataclasses
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import KINDS, build, dcp_state_dict, hybrid, load, mixed, same, save
from harness import ranks, run_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from toys import loss_of, tokens, toy, wrap, wrap_blocks

import fsdpc
from fsdpc._fsdp1.state import dcp as _dcp

OURS = [kind for kind in KINDS if kind.startswith("fsdpc")]
FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@ranks(2, 3)
@pytest.mark.parametrize("kind", OURS)
def test_sharded(rank, world, kind):
    expected = toy(seed=1).state_dict()
    state = get_model_state_dict(build(kind, toy(seed=1)))
    form = DTensor if "mesh" in kind else ShardedTensor
    assert all(type(value) is form for value in state.values())
    same(state, expected)
    model = build(kind)
    result = set_model_state_dict(model, state)
    assert not result.missing_keys and not result.unexpected_keys
    same(model.state_dict(), expected)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert list(offloaded) == list(expected)


@ranks(2)
@pytest.mark.parametrize("kind", OURS)
def test_full(rank, world, kind):
    expected = toy(seed=1).state_dict()
    other = build(kind, toy(seed=1))
    state = get_model_state_dict(other, options=FULL)
    assert all(type(value) is torch.Tensor for value in state.values())
    same(state, expected)
    model = build(kind)
    set_model_state_dict(model, state, options=FULL)
    same(model.state_dict(), expected)
    kept = get_model_state_dict(other, options=ON_RANK_0)
    same(kept, expected if rank == 0 else {})


@ranks(2)
@pytest.mark.parametrize("kind", OURS)
def test_broadcast_from_rank_0(rank, world, kind):
    expected = toy(seed=1).state_dict()
    model = build(kind)
    set_model_state_dict(model, expected if rank == 0 else {}, options=FROM_RANK_0)
    same(model.state_dict(), expected)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_several_dtypes_and_ties(rank, world, use_orig_params):
    """A unit may have several flat parameters. Some parameters are frozen, and one is 0-dim."""
    expected = copy.deepcopy(mixed(seed=1).state_dict())
    model, other = (wrap("fsdpc", mixed(s), use_orig_params=use_orig_params) for s in (0, 1))
    state = get_model_state_dict(other)
    same(state, expected)
    set_model_state_dict(model, state)
    same(model.state_dict(), expected)
    trained = get_model_state_dict(other, options=StateDictOptions(ignore_frozen_params=True))
    assert list(trained) == [key for key in expected if key not in ("frozen", "codes")]
    model = wrap("fsdpc", mixed(), use_orig_params=use_orig_params)
    full = get_model_state_dict(other, options=FULL)
    set_model_state_dict(model, full if rank == 0 else {}, options=FROM_RANK_0)
    same(model.state_dict(), expected)


@ranks(2)
@pytest.mark.parametrize("kind", ["fsdpc", "fsdpc-flat"])
def test_full_with_keys_missing(rank, world, kind):
    def values():
        full = {name: value + 1 for name, value in toy(seed=1).state_dict().items()}
        del full["blocks.0.up.weight"], full["head.bias"]
        return full

    for options in (FULL, FROM_RANK_0):
        model = build(kind, toy())
        options = dataclasses.replace(options, strict=False)
        some = values() if rank == 0 or not options.broadcast_from_rank0 else {}
        set_model_state_dict(model, some, options=options)
        found = get_model_state_dict(model, options=FULL)
        same(found, {**toy().state_dict(), **values()})


@ranks(2)
def test_strict(rank, world):
    model = build("fsdpc")
    state = get_model_state_dict(build("fsdpc", toy(seed=1)))
    del state["head.weight"]
    with pytest.raises(RuntimeError, match="head.weight"):
        set_model_state_dict(model, dict(state))
    lenient = StateDictOptions(strict=False)
    result = set_model_state_dict(model, {**state, "extra": torch.ones(1)}, options=lenient)
    assert result.missing_keys == ["head.weight"] and result.unexpected_keys == ["extra"]


@ranks(2)
def test_wrappers_around_and_inside(rank, world):
    expected = toy(seed=1).state_dict()
    model = toy(seed=1)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap("fsdpc", checkpoint_wrapper(block))
    same(get_model_state_dict(model), expected)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), wrap("fsdpc", nn.Linear(3, 2))))
    state = copy.deepcopy(get_model_state_dict(model, options=FULL))
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    set_model_state_dict(model, {k: v + 1 for k, v in state.items()}, options=FULL)
    got = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(got[key], state[key] + 1) for key in state)


@ranks(4)
def test_hybrid(rank, world):
    options = hybrid(mesh=True)
    expected = toy(seed=1).state_dict()
    models = [wrap_blocks("fsdpc", toy(seed), **options) for seed in (0, 1)]
    state = get_model_state_dict(models[1])
    same(state, expected)
    set_model_state_dict(models[0], state)
    same(models[0].state_dict(), expected)


# --- the module itself ---


@ranks(2, alone=True)
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat", "fsdp1-mesh", "fsdp2", "plain"])
def test_others_beside_are_served_as_before(rank, world, kind):
    def run():
        model = build(kind, toy(seed=1))
        state = get_model_state_dict(model)
        set_model_state_dict(model, state)
        return state

    client = dcp_state_dict()
    before = client.FSDP
    expected = run()
    ours = build("fsdpc")
    assert client.FSDP is not before
    same(get_model_state_dict(ours), toy().state_dict())
    got = run()
    assert list(got) == list(expected)
    assert all(type(got[key]) is type(expected[key]) for key in got)
    model = build(kind, toy(seed=1))
    if kind != "fsdp2":
        loss_of(model, tokens(rank, 0)).backward()
    assert list(run()) == list(expected)


@ranks(2)
def test_units_of_both_in_one_model_are_refused(rank, world):
    model = nn.Sequential(
        wrap("fsdpc", nn.Linear(2, 2)), wrap("torch.distributed.fsdp", nn.Linear(2, 2))
    )
    with pytest.raises(RuntimeError, match=r"module '1' is wrapped by torch's"):
        get_model_state_dict(model)


def test_attaching_once():
    client = dcp_state_dict()
    _dcp.attach()
    attached = dict(vars(client))
    assert isinstance(client.FSDP, _dcp.Names) and client.FSDP.fsdp_modules(toy()) == []
    with pytest.raises(AttributeError, match="no_such_name"):
        client.FSDP.no_such_name  # noqa: B018
    _dcp.attach()
    assert dict(vars(client)) == attached


def imported_late(rank, world):
    names = [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]
    for name in names:
        del sys.modules[name]
    model = build("fsdpc", toy(seed=1))
    same(dcp_state_dict().get_model_state_dict(model), toy(seed=1).state_dict())


def test_imported_after_the_model():
    run_ranks(imported_late, 2)


# --- checkpoints on disk ---


def write(rank, world, path, kind):
    save(path, get_model_state_dict(build(kind, toy(seed=1))))


def read(rank, world, path, kind):
    model = build(kind)
    state = get_model_state_dict(model)
    load(path, state)
    set_model_state_dict(model, state)
    same(get_model_state_dict(model, options=FULL), toy(seed=1).state_dict())
    if kind != "fsdp2":
        loss_of(model, tokens(rank, 0)).backward()


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("worlds", [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_ranks(tmp_path, kind, worlds):
    run_ranks(write, worlds[0], path=str(tmp_path), kind=kind)
    run_ranks(read, worlds[1], path=str(tmp_path), kind=kind)


def write_in_background(rank, world, path, kind):
    model = build(kind, toy(seed=1))
    state = get_model_state_dict(model)
    future = dcp.async_save(state, checkpoint_id=path)
    with torch.no_grad():  # the checkpoint must keep the values from before
        for param in model.parameters():
            param.zero_()
    future.result()


def test_saved_in_the_background(tmp_path):
    """Background saves work only with DTensors, because torch's staging of dicts cannot copy a
    ShardedTensor, whichever class made it.
    """
    run_ranks(write_in_background, 2, path=str(tmp_path), kind="fsdpc-mesh")
    run_ranks(read, 3, path=str(tmp_path), kind="fsdpc-mesh")


@ranks(2)
@pytest.mark.parametrize("first", ["install", "model"])
def test_under_torchs_name(rank, world, first):
    """State dicts work if install() is called before or after the first model is made, and also
    after uninstall().
    """
    model = build("fsdpc", toy(seed=1)) if first == "model" else None
    fsdpc.install()
    try:
        if model is None:
            import torch.distributed.fsdp as public

            model = public.FullyShardedDataParallel(toy(seed=1))
            assert type(model) is fsdpc.FSDP
        same(get_model_state_dict(model), toy(seed=1).state_dict())
    finally:
        fsdpc.uninstall()
    same(get_model_state_dict(model, options=FULL), toy(seed=1).state_dict())
    theirs = build("fsdp1", toy(seed=2))
    same(get_model_state_dict(theirs, options=FULL), toy(seed=2).state_dict())


def write_and_read_hybrid(rank, world, path, mesh):
    options = hybrid(mesh)
    model, other = (wrap_blocks("fsdpc", toy(seed), **options) for seed in (0, 1))
    save(path, get_model_state_dict(other))
    state = get_model_state_dict(model)
    load(path, state)
    set_model_state_dict(model, state)
    same(model.state_dict(), toy(seed=1).state_dict())


@pytest.mark.parametrize("mesh", [False, True])
def test_hybrid_checkpoint_on_disk(tmp_path, mesh):
    run_ranks(write_and_read_hybrid, 4, path=str(tmp_path), mesh=mesh)
    run_ranks(read, 3, path=str(tmp_path), kind="fsdpc")
