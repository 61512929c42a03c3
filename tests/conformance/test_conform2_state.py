"""State dicts, the meta device, and checkpoints of fully_shard."""

from __future__ import annotations

import torch
from rows_library import RowsLibrary, linear, trained, wholes
from suite import BOTH, Cases
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from toys import toy

case = Cases(__name__, __file__, library=RowsLibrary)


# --- state_dict ----------------------------------------------------------------------------------


@case(over={"when": ["fresh", "after forward", "after step"]})
def values_of_state_dict(lib, when):
    model = lib.shard_blocks(toy())
    if when == "after forward":
        model(lib.batch())
    if when == "after step":
        lib.train(model, 1)
    state = model.state_dict()
    kinds = {type(v).__name__ for v in state.values()}
    kept = [v.requires_grad for v in model.state_dict(keep_vars=True).values()]
    return [*state], kinds, wholes(state), kept


@case()
def state_dict_aliases_parameters(lib):
    model = lib.shard_blocks(toy())
    state = model.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return wholes(state)


@case()
def a_cloned_state_dict_is_a_snapshot(lib):
    model = lib.shard_blocks(toy())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    lib.train(model, 1)
    model.load_state_dict(state)
    return lib.full(model)


@case()
def state_dict_with_buffers(lib):
    model = lib.fully_shard(nn.Sequential(nn.BatchNorm1d(3), linear(3, 3)))
    model(torch.ones(2, 3) + lib.rank)
    state = model.state_dict()
    return {k: type(v).__name__ for k, v in state.items()}


@case(over={"assign": BOTH})
def loading_a_state_dict(lib, assign):
    source, target = trained(lib, optimizer=False), lib.shard_blocks(toy(7))
    target.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=assign)
    return target(lib.batch()), lib.full(target)


@case(over={"assign": BOTH})
def training_after_loading(lib, assign):
    source, target = trained(lib, optimizer=False), lib.shard_blocks(toy(7))
    target.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=assign)
    return lib.train(target)


@case(over={"assign": BOTH})
def loading_between_steps(lib, assign):
    """The first state is loaded after a step, and a new optimizer trains on from that state."""
    model = lib.shard_blocks(toy())
    start = {k: v.clone() for k, v in model.state_dict().items()}
    first = lib.train(model, 1)
    model.load_state_dict(start, assign=assign)
    return first, lib.train(model, 1)


@case()
def loading_full_tensors(lib):
    """load_state_dict of full tensors raises: a plain tensor cannot be copied into a DTensor."""
    model = lib.shard_blocks(toy())
    return lib.refuses(RuntimeError, model.load_state_dict, toy(7).state_dict(), words="DTensor")


@case(over={"assign": BOTH})
def loading_distributed_full_tensors(lib, assign):
    """A full state dict can be loaded after distribute_tensor of each value, as accelerate does."""
    model, plain = lib.shard_blocks(toy()), toy(7).state_dict()
    state = {
        k: distribute_tensor(plain[k], v.device_mesh, v.placements)
        for k, v in model.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)
    return model(lib.batch()), lib.full(model)


@case()
def loading_under_swap_tensors(lib):
    source, target = trained(lib, optimizer=False), lib.shard_blocks(toy(7))
    state = {k: v.clone() for k, v in source.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        target.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return target(lib.batch()), lib.full(target)


@case()
def a_parameter_that_the_user_replaced(lib):
    """The user replaces the parameter between sharding and the first forward."""
    model = lib.fully_shard(linear())
    old = model.weight
    value = DTensor.from_local(
        old.to_local().detach() * 2,
        old.device_mesh,
        old.placements,
        shape=old.shape,
        stride=old.stride(),
    )
    model.weight = nn.Parameter(value)
    model(torch.ones(1, 3)).sum().backward()
    return lib.full(model), lib.gradients(model)


# --- meta ----------------------------------------------------------------------------------------


def on_meta():
    with torch.device("meta"):
        return toy()


@case()
def sharding_on_meta(lib):
    model = lib.shard_blocks(on_meta())
    return [(p.is_meta, tuple(p.shape), p.to_local().shape) for p in model.parameters()]


@case(over={"how": ["constant", "ones", "copy"]})
def materialising_then_initialising(lib, how):
    model = lib.shard_blocks(on_meta())
    model.to_empty(device="cpu")
    plain = dict(toy(3).named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if how == "constant":
                nn.init.constant_(p, 0.1)
            elif how == "ones":
                p.fill_(1.0)
            else:
                p.copy_(distribute_tensor(plain[name].detach(), p.device_mesh, p.placements))
    return lib.train(model)


@case()
def resetting_parameters_of_norms(lib):
    """reset_parameters() works for sharded modules whose initial values are not random."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5))
    lib.fully_shard(model)
    model.to_empty(device="cpu")
    for part in model:
        part.reset_parameters()
    return lib.full(model)


@case(over={"assign": BOTH})
def materialising_by_loading(lib, assign):
    source = lib.shard_blocks(toy(3))
    model = lib.shard_blocks(on_meta())
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=assign)
    return lib.train(model)


@case(over={"broadcast": BOTH})
def materialising_from_rank_0(lib, broadcast):
    model = lib.shard_blocks(on_meta())
    model.to_empty(device="cpu")
    full = toy(3).state_dict() if lib.rank == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, full, options=options)
    return lib.train(model)


@case(raises=RuntimeError, words="should be materialized from meta device")
def a_forward_on_meta(lib):
    lib.shard_blocks(on_meta())(lib.batch())


@case()
def an_optimizer_made_after_materialising(lib):
    model = lib.shard_blocks(on_meta())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
    return lib.full_after(model, count=2)


@case()
def a_model_moved_to_meta_first(lib):
    """A model is sharded on the meta device and then loaded, as accelerate does to save memory."""
    model = toy()
    full = {k: v.clone() for k, v in model.state_dict().items()}
    model = lib.shard_blocks(model.to("meta"))
    state = {
        k: nn.Parameter(distribute_tensor(full[k], v.device_mesh, v.placements))
        for k, v in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return lib.train(model)


test_torch, test_fsdpc = case.tests()
