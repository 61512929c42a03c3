"""Tests of optimizer states of fsdpc models through torch.distributed.checkpoint.state_dict: they
equal those of the unsharded optimizer in every form, on disk and on another number of ranks.
"""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import load, save, typed, whole
from harness import ranks, run_ranks
from optim_runs import check_dict, check_states, start
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from toys import full_parameters, toy

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLATTENED = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


def trained(rank, world, *, seed=0, steps=2, mesh=False, **options):
    if mesh:
        options["device_mesh"] = init_device_mesh("cpu", (world,))
    return start(rank, toy(seed=seed), steps=steps, **options)


def check(run, expected):
    """Check the present states of the run's optimizer, by parameter names."""
    with typed(run.model, torch.distributed.fsdp.StateDictType.FULL_STATE_DICT):
        check_dict(type(run.model).optim_state_dict(run.model, run.optim), expected)


@ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_full(rank, world, use_orig_params):
    run = trained(rank, world, use_orig_params=use_orig_params)
    expected = run.expected()
    state = get_optimizer_state_dict(run.model, run.optim, options=FULL)
    check_dict(state, expected)
    kept = get_optimizer_state_dict(run.model, run.optim, options=ON_RANK_0)
    if rank == 0:
        check_dict(kept, expected)
    else:
        assert not kept.get("state") and not kept.get("param_groups")
    other = trained(rank, world, seed=1, use_orig_params=use_orig_params)
    set_optimizer_state_dict(other.model, other.optim, state, options=FULL)
    check(other, expected)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_broadcast_from_rank_0(rank, world, use_orig_params):
    run = trained(rank, world, use_orig_params=use_orig_params)
    expected = run.expected()
    state = get_optimizer_state_dict(run.model, run.optim, options=ON_RANK_0)
    other = trained(rank, world, seed=1, use_orig_params=use_orig_params)
    set_optimizer_state_dict(
        other.model, other.optim, state if rank == 0 else {}, options=FROM_RANK_0
    )
    check(other, expected)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flattened(rank, world, use_orig_params):
    """The flattened form, which pipelines use, has a single level of keys."""
    run = trained(rank, world, use_orig_params=use_orig_params)
    state = get_optimizer_state_dict(run.model, run.optim, options=FLATTENED)
    exp_avg = run.expected()["state"]["head.bias"]["exp_avg"]
    assert torch.equal(state["state.head.bias.exp_avg"], exp_avg)
    assert state["param_groups.head.bias.lr"] == 1e-2


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_fresh_optimizer(rank, world, use_orig_params):
    """A fresh optimizer has no state yet, and gets one without moving the parameters."""
    run = trained(rank, world, use_orig_params=use_orig_params)
    expected = run.expected()
    state = get_optimizer_state_dict(run.model, run.optim, options=FULL)
    other = trained(rank, world, seed=1, steps=0, use_orig_params=use_orig_params)
    before = full_parameters(other.model)
    set_optimizer_state_dict(other.model, other.optim, state, options=FULL)
    after = full_parameters(other.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    check(other, expected)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("mesh", [False, True])
def test_sharded(rank, world, use_orig_params, mesh):
    options = {"use_orig_params": use_orig_params, "mesh": mesh}
    run = trained(rank, world, **options)
    expected = run.expected()
    model_state, state = get_state_dict(run.model, run.optim)
    check_states(whole(state["state"]), expected["state"])
    other = trained(rank, world, seed=1, **options)
    set_state_dict(other.model, other.optim, model_state_dict=model_state, optim_state_dict=state)
    check(other, expected)
    next_losses = [r.train(2) for r in (run, other)]
    assert all(torch.equal(a, b) for a, b in zip(*next_losses, strict=True))


# --- on disk ---


def write(rank, world, path, **options):
    run = trained(rank, world, **options)
    model_state, state = get_state_dict(run.model, run.optim)
    save(path, {"model": model_state, "optim": state})
    return copy.deepcopy(run.expected()), full_parameters(run.model)


def read(rank, world, path, expected, parameters, **options):
    run = trained(rank, world, seed=1, steps=0, **options)
    model_state, state = get_state_dict(run.model, run.optim)
    holder = {"model": model_state, "optim": state}
    load(path, holder)
    set_state_dict(
        run.model,
        run.optim,
        model_state_dict=holder["model"],
        optim_state_dict=holder["optim"],
    )
    check(run, expected)
    got = full_parameters(run.model)
    assert all(torch.equal(got[name], value) for name, value in parameters.items())
    run.train(1)


@pytest.mark.parametrize("use_orig_params", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1)])
@pytest.mark.parametrize("mesh", [False, True])
def test_another_number_of_ranks(tmp_path, use_orig_params, worlds, mesh):
    path = str(tmp_path)
    before, after = use_orig_params
    expected, parameters = run_ranks(
        write, worlds[0], path=path, use_orig_params=before, mesh=mesh
    )[0]
    run_ranks(
        read,
        worlds[1],
        path=path,
        expected=expected,
        parameters=parameters,
        use_orig_params=after,
        mesh=mesh,
    )
