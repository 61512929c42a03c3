"""Checkpoints of fully_shard: torch.distributed.checkpoint and its state dict functions."""

from __future__ import annotations

import itertools
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rows_library import RowsLibrary, linear, trained, wholes
from suite import BOTH, Cases
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from toys import loss_of, toy

case = Cases(__name__, __file__, library=RowsLibrary)


def folder_of_rank_0():
    names = [tempfile.mkdtemp(prefix="fsdpc-conform-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


# --- checkpoints ---------------------------------------------------------------------------------


@case()
def saving_and_loading_a_checkpoint(lib):
    model, folder = trained(lib, optimizer=False), folder_of_rank_0()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = lib.shard_blocks(toy(7))
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    other.load_state_dict(state)
    return other(lib.batch()), lib.full(other)


@case()
def loading_a_checkpoint_in_place(lib):
    """dcp.load into state_dict() changes the model, because state_dict() aliases the parameters."""
    model, folder = trained(lib, optimizer=False), folder_of_rank_0()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = lib.shard_blocks(toy(7))
    dcp.load(other.state_dict(), checkpoint_id=folder)
    return other(lib.batch()), lib.full(other)


@case(world=4, over={"shape": [(2, 2), (4,)]})
def a_checkpoint_for_another_mesh(lib, shape):
    model, folder = trained(lib, optimizer=False), folder_of_rank_0()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = lib.shard_blocks(toy(7), mesh=lib.mesh(*shape))
    dcp.load(other.state_dict(), checkpoint_id=folder)
    return lib.full(other)


@case()
def a_checkpoint_of_an_unsharded_model(lib):
    folder = folder_of_rank_0()
    dcp.save(toy(3).state_dict(), checkpoint_id=folder)
    model = lib.shard_blocks(toy(7))
    dcp.load(model.state_dict(), checkpoint_id=folder)
    plain = toy(8).state_dict()
    sharded = folder_of_rank_0()
    dcp.save(model.state_dict(), checkpoint_id=sharded)
    dcp.load(plain, checkpoint_id=sharded)
    return lib.full(model), plain


@case(over={"full": BOTH})
def resuming_from_a_checkpoint(lib, full):
    """The model and the optimizer resume; further steps equal those of an uninterrupted run."""
    model, optimizer = trained(lib)
    options = StateDictOptions(full_state_dict=full)
    folder = folder_of_rank_0()
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    other = lib.shard_blocks(toy(7))
    made = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
    weights, moments = get_state_dict(other, made, options=options)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other,
        made,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    results = []
    for m, o in ((model, optimizer), (other, made)):
        for step in range(2, 4):
            loss_of(m, lib.batch(step)).backward()
            o.step()
            o.zero_grad()
        results.append(lib.full(m))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    return results[1]


@case(over={"full": BOTH, "offload": BOTH})
def model_state_by_dcp(lib, full, offload):
    model = trained(lib, optimizer=False)
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
    state = get_model_state_dict(model, options=options)
    return [*state], {type(v).__name__ for v in state.values()}, wholes(state)


@case(over={"full": BOTH, "offload": BOTH})
def optimizer_state_by_dcp(lib, full, offload):
    model, optimizer = trained(lib)
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload)
    return wholes(get_optimizer_state_dict(model, optimizer, options=options))


@case(over={"flatten": BOTH})
def optimizer_state_flattened(lib, flatten):
    model, optimizer = trained(lib)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return wholes(get_optimizer_state_dict(model, optimizer, options=options))


@case(over={"full": BOTH, "kind": ["frozen", "groups"]})
def every_flag_of_the_options(lib, full, kind):
    """The libraries give the same state dicts for each combination of the flags that change keys.

    The model has frozen parameters, or the optimizer has several parameter groups.
    """
    model = toy()
    model.blocks[0].requires_grad_(kind != "frozen")
    lib.shard_blocks(model)
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "groups":
        flat = [p for p in params if p.dim() == 1]
        params = [p for p in params if p.dim() > 1]
        params = [{"params": params, "lr": 2e-2}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-3)
    loss_of(model, lib.batch()).backward()
    optimizer.step()
    seen = {}
    for flags in itertools.product(BOTH, repeat=3):
        names = ("ignore_frozen_params", "flatten_optimizer_state_dict", "keep_submodule_prefixes")
        given = dict(zip(names, flags, strict=True))
        options = StateDictOptions(full_state_dict=full, **given)
        weights, moments = get_state_dict(model, optimizer, options=options)
        seen[str(given)] = [list(weights), wholes(weights), list(moments), wholes(moments)]
        if given["flatten_optimizer_state_dict"]:
            continue  # torch loads a flattened state only if all keys of parameter groups match
        back = StateDictOptions(full_state_dict=full, strict=False, **given)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=back
        )
    loss_of(model, lib.batch(1)).backward()
    optimizer.step()
    return seen, lib.full(model)


@case(over={"broadcast": BOTH})
def setting_model_state_by_dcp(lib, broadcast):
    model = lib.shard_blocks(toy())
    full = toy(7).state_dict() if lib.rank == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, full, options=options)
    return model(lib.batch()), lib.full(model)


@case(over={"broadcast": BOTH})
def setting_optimizer_state_by_dcp(lib, broadcast):
    model, optimizer = trained(lib)
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_optimizer_state_dict(model, made, state, options=options)
    loss_of(model, lib.batch(2)).backward()
    made.step()
    return lib.full(model)


@case(over={"strict": BOTH})
def setting_a_part_by_dcp(lib, strict):
    model = lib.shard_blocks(toy())
    state = {k: v for k, v in toy(7).state_dict().items() if not k.startswith("head")}
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(model, state, options=options)
    return lib.full(model)


@case()
def states_of_an_optimizer_by_hand(lib):
    """The state_dict() of an optimizer of DTensors can be loaded into another optimizer."""
    model, optimizer = trained(lib)
    state = optimizer.state_dict()
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    made.load_state_dict(state)
    loss_of(model, lib.batch(2)).backward()
    made.step()
    return lib.full(model)


@case(world=4)
def model_state_with_replicas(lib):
    model = trained(lib, optimizer=False, mesh=lib.mesh(2, 2))
    options = StateDictOptions(full_state_dict=True)
    return wholes(get_model_state_dict(model, options=options))


@case()
def saving_local_tensors_by_torch_save(lib):
    model = lib.fully_shard(linear())
    with tempfile.TemporaryFile() as file:
        torch.save({n: p.to_local() for n, p in model.state_dict().items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


test_torch, test_fsdpc = case.tests()
