"""Optimizer state dicts: FULL and SHARDED ones, loading, the five older functions, and rekeying."""

from __future__ import annotations

import copy

import torch
from outcome import wrong
from suite import BOTH, Cases, S
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
)
from toys import Reference, loss_of, toy

case = Cases(__name__, __file__)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def make(lib, seed=0, blocks=True, kind=torch.optim.AdamW, steps=2, model=None, **options):
    """Return a model and its optimizer after some steps."""
    model = toy(seed) if model is None else model
    model = (lib.wrap_blocks if blocks else lib.wrap)(model, **options)
    extra = {"eps": 1e-3} if kind is not torch.optim.SGD else {"momentum": 0.9}
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(params, lr=1e-2, **extra)
    advance(lib, model, optimizer, range(steps))
    return model, optimizer


def advance(lib, model, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, lib.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def told(value):
    """Convert a state dict to a form that can be compared.

    Names are sorted, and a ShardedTensor becomes its size and this rank's local shards.
    """
    if isinstance(value, dict):
        return {str(k): told(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple)):
        return [told(v) for v in value]
    if hasattr(value, "local_shards"):
        return (
            "rows",
            tuple(value.size()),
            [(tuple(s.metadata.shard_offsets), s.tensor) for s in value.local_shards()],
        )
    return value


# --- saving --------------------------------------------------------------------------------------


@case(over={"kind": [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]})
def the_full_form(lib, kind):
    model, optimizer = make(lib, kind=kind)
    return told(lib.FSDP.optim_state_dict(model, optimizer))


@case(torch=wrong("exp_avg"), fsdpc_does="equals the unsharded optimizer's state")
def the_full_form_with_original_parameters(lib):
    """optim_state_dict with use_orig_params=True"""
    model, optimizer = make(lib, use_orig_params=True)
    state = lib.FSDP.optim_state_dict(model, optimizer)["state"]
    reference = Reference(toy())
    plain = torch.optim.AdamW(reference.master.parameters(), lr=1e-2, eps=1e-3)
    for step in range(2):
        reference.backward(lib.batch(step))
        plain.step()
        plain.zero_grad()
    for name, p in reference.master.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            got, expected = state[name][key], plain.state[p][key]
            assert torch.allclose(got, expected, rtol=1e-4, atol=1e-8), f"{key} of {name}"


@case(over={"strategy": [S.SHARD_GRAD_OP, S.NO_SHARD]})
def the_full_form_under_a_strategy(lib, strategy):
    model, optimizer = make(lib, sharding_strategy=strategy)
    return told(lib.FSDP.optim_state_dict(model, optimizer))


@case()
def the_full_form_on_one_rank(lib):
    model, optimizer = make(lib)
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with lib.FSDP.state_dict_type(model, FULL, *configs):
        state = lib.FSDP.optim_state_dict(model, optimizer)
    assert bool(state) == (lib.rank == 0)
    return told(state)


@case()
def the_sharded_form(lib):
    model, optimizer = make(lib)
    with lib.FSDP.state_dict_type(model, SHARDED):
        return told(lib.FSDP.optim_state_dict(model, optimizer))


@case()
def an_optimizer_that_never_stepped(lib):
    model, optimizer = make(lib, steps=0)
    return told(lib.FSDP.optim_state_dict(model, optimizer))


@case()
def a_state_that_is_given(lib):
    """optim_state_dict=optimizer.state_dict()"""
    model, optimizer = make(lib)
    return told(lib.FSDP.optim_state_dict(model, optimizer, optimizer.state_dict()))


@case()
def a_frozen_unit(lib):
    model = toy()
    model.blocks[0].requires_grad_(False)
    model, optimizer = make(lib, model=model)
    return told(lib.FSDP.optim_state_dict(model, optimizer))


@case()
def ignored_parameters(lib):
    model = toy()
    model, optimizer = make(lib, model=model, ignored_modules=[model.head])
    state = lib.FSDP.optim_state_dict(model, optimizer)
    return sorted(state["state"]), [sorted(g["params"]) for g in state["param_groups"]]


@case()
def hyper_parameters_by_group(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    norm = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.1}, {"params": norm, "lr": 0.2}], lr=0.3)
    return told(lib.FSDP.optim_state_dict(model, optimizer)["param_groups"])


# --- loading -------------------------------------------------------------------------------------


def resumed(lib, state_of=None, **options):
    """Return the losses of a model that resumes from a first model, and the first model's losses.

    `options` are those of the model that resumes. `state_of` returns the state for that model's
    optimizer, or loads the state itself and returns None.
    """
    model, optimizer = make(lib)
    weights = model.state_dict()
    other, fresh = make(lib, seed=5, steps=0, **options)
    other.load_state_dict(weights)
    if state_of:
        state = state_of(model, optimizer, other, fresh)
    else:
        saved = lib.FSDP.optim_state_dict(model, optimizer)
        state = lib.FSDP.optim_state_dict_to_load(other, fresh, saved)
    if state is not None:
        fresh.load_state_dict(state)
    expected = advance(lib, model, optimizer, range(2, 4))
    return advance(lib, other, fresh, range(2, 4)), expected


@case(over={"kind": [FULL, SHARDED]})
def resuming(lib, kind):
    """The resumed run has the same next losses as the run that was not interrupted."""
    model, optimizer = make(lib)
    with lib.FSDP.state_dict_type(model, kind):
        weights = model.state_dict()
        state = lib.FSDP.optim_state_dict(model, optimizer)
    expected = advance(lib, model, optimizer, range(2, 4))
    other, fresh = make(lib, seed=5, steps=0)
    with lib.FSDP.state_dict_type(other, kind):
        other.load_state_dict(weights)
        fresh.load_state_dict(lib.FSDP.optim_state_dict_to_load(other, fresh, state))
    got = advance(lib, other, fresh, range(2, 4))
    assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))
    return got, lib.full(other)


@case()
def resuming_directly(lib):
    """load_directly=True"""

    def load(model, optimizer, other, fresh):
        state = lib.FSDP.optim_state_dict(model, optimizer)
        lib.FSDP.optim_state_dict_to_load(other, fresh, state, load_directly=True)

    return resumed(lib, load)[0]


@case()
def resuming_in_another_wrapping(lib):
    return resumed(lib, blocks=False)[0]


@case(torch=wrong("losses"), fsdpc_does="goes on with the same losses")
def resuming_with_original_parameters(lib):
    """optim_state_dict_to_load with use_orig_params=True"""
    got, expected = resumed(lib, use_orig_params=True)
    assert torch.allclose(got[1], expected[1]), f"other losses: {got}, {expected}"


@case()
def resuming_from_rank_0_alone(lib):
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)

    def state_of(model, optimizer, other, fresh):
        with lib.FSDP.state_dict_type(model, FULL, *configs):
            state = lib.FSDP.optim_state_dict(model, optimizer)
        with lib.FSDP.state_dict_type(other, FULL, *configs):
            return lib.FSDP.optim_state_dict_to_load(other, fresh, state)

    return resumed(lib, state_of)[0]


@case()
def a_plain_models_state(lib):
    """The unsharded optimizer's state, by names, is loaded into the sharded optimizer."""
    plain = toy()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    batch = torch.arange(10).reshape(2, 5)
    loss_of(plain, batch).backward()
    optimizer.step()
    state = lib.FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=optimizer
    )
    model, fresh = make(lib, steps=0)
    model.load_state_dict(plain.state_dict())
    fresh.load_state_dict(lib.FSDP.optim_state_dict_to_load(model, fresh, state))
    return advance(lib, model, fresh, range(2))


@case()
def the_given_state_is_not_changed(lib):
    model, optimizer = make(lib)
    state = lib.FSDP.optim_state_dict(model, optimizer)
    before = copy.deepcopy(told(state))
    lib.FSDP.optim_state_dict_to_load(model, optimizer, state)
    return before, told(state)


@case()
def loading_nothing(lib):
    """An optimizer state dict without entries can be loaded."""
    model, optimizer = make(lib, steps=0)
    state = lib.FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(lib.FSDP.optim_state_dict_to_load(model, optimizer, state))
    return advance(lib, model, optimizer, range(2))


# --- the older functions -------------------------------------------------------------------------


@case(over={"rank0": BOTH})
def full_optim_state_dict(lib, rank0):
    model, optimizer = make(lib)
    state = lib.FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0)
    assert bool(state) == (lib.rank == 0 or not rank0)
    return told(state)


@case()
def sharded_optim_state_dict(lib):
    model, optimizer = make(lib)
    return told(lib.FSDP.sharded_optim_state_dict(model, optimizer))


@case()
def shard_full_optim_state_dict(lib):
    def state_of(model, optimizer, other, fresh):
        full = lib.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        return lib.FSDP.shard_full_optim_state_dict(full, other, optim=fresh)

    return resumed(lib, state_of)[0]


@case()
def scatter_full_optim_state_dict(lib):
    def state_of(model, optimizer, other, fresh):
        full = lib.FSDP.full_optim_state_dict(model, optimizer)
        full = full if lib.rank == 0 else None
        return lib.FSDP.scatter_full_optim_state_dict(full, other, optim=fresh)

    return resumed(lib, state_of)[0]


@case()
def flatten_sharded_optim_state_dict(lib):
    def state_of(model, optimizer, other, fresh):
        rows = lib.FSDP.sharded_optim_state_dict(model, optimizer)
        return lib.FSDP.flatten_sharded_optim_state_dict(rows, other, fresh)

    return resumed(lib, state_of)[0]


@case(over={"name": ["full_optim_state_dict", "sharded_optim_state_dict"]})
def older_functions_are_deprecated(lib, name):
    model, optimizer = make(lib)
    getattr(lib.FSDP, name)(model, optimizer)
    return "FutureWarning" in lib.warned("deprecated")


# --- keys ----------------------------------------------------------------------------------------


def plain_state():
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, torch.arange(10).reshape(2, 5)).backward()
    optimizer.step()
    return model, optimizer


@case(over={"kind": list(OptimStateKeyType)})
def keys_of_a_plain_models_state(lib, kind):
    model, optimizer = plain_state()
    state = lib.FSDP.rekey_optim_state_dict(optimizer.state_dict(), kind, model, optim=optimizer)
    return told(state), [type(k).__name__ for k in state["state"]]


@case(torch=wrong("step"), fsdpc_does="gives each parameter its own")
def steps_of_a_plain_optimizer_from_a_sharded_state(lib):
    """An unsharded optimizer resumes from a FULL state.

    The step counter of each parameter must count each step once.
    """
    model, optimizer = make(lib)
    names = lib.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = toy()
    fresh = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    fresh.load_state_dict(
        lib.FSDP.rekey_optim_state_dict(names, OptimStateKeyType.PARAM_ID, plain, optim=fresh)
    )
    loss_of(plain, torch.arange(10).reshape(2, 5)).backward()
    fresh.step()
    steps = {float(fresh.state[p]["step"]) for p in plain.parameters()}
    assert steps == {3.0}, f"steps are {sorted(steps)} after 3: parameters share one counter"


@case()
def keys_there_and_back(lib):
    model, optimizer = plain_state()
    names = lib.FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )
    ids = lib.FSDP.rekey_optim_state_dict(names, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    assert sorted(ids["state"]) == sorted(optimizer.state_dict()["state"])
    return told(ids)


@case()
def ids_of_a_sharded_models_names(lib):
    """The FULL state of a sharded model can be loaded into the optimizer of an unsharded model."""
    model, optimizer = make(lib)
    names = lib.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = toy()
    fresh = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    fresh.load_state_dict(
        lib.FSDP.rekey_optim_state_dict(names, OptimStateKeyType.PARAM_ID, plain, optim=fresh)
    )
    for name, p in plain.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            got, expected = fresh.state[p][key], names["state"][name][key]
            assert torch.equal(got, expected), f"{key} of {name}"
    return told(fresh.state_dict()), told(names)


@case(raises=ValueError)
def keys_of_two_kinds(lib):
    model, optimizer = plain_state()
    state = optimizer.state_dict()
    state["state"]["head.bias"] = state["state"].pop(0)
    lib.FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)


# --- refused -------------------------------------------------------------------------------------


@case(raises=RuntimeError)
def a_state_that_one_rank_lacks(lib):
    model, optimizer = make(lib)
    if lib.rank == 1:
        optimizer.state.clear()
    lib.FSDP.optim_state_dict(model, optimizer)


@case()
def entries_of_no_parameter(lib):
    """Unknown entries are kept, with a warning."""
    model, optimizer = make(lib)
    state = optimizer.state_dict()
    state["state"]["extra"] = {"note": 3}
    got = lib.FSDP.optim_state_dict(model, optimizer, state)
    return got["state"].get("extra"), bool(lib.warned("extra"))


@case()
def units_in_a_plain_root(lib):
    model = toy()
    model.blocks[0] = lib.wrap(model.blocks[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    batch = torch.arange(10).reshape(2, 5)
    loss_of(model, batch).backward()
    optimizer.step()
    return told(lib.FSDP.optim_state_dict(model, optimizer))


@case()
def a_module_of_one_layer(lib):
    model = lib.wrap(nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3) * (1 + lib.rank)).sum().backward()
    optimizer.step()
    return told(lib.FSDP.optim_state_dict(model, optimizer))


test_torch, test_fsdpc = case.tests()
