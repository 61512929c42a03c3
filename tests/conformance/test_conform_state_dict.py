"""FULL state dicts, and loading them."""

from __future__ import annotations

import collections

import torch
from outcome import OFFLOADS_ON_THE_CPU, wrong
from suite import BOTH, SHARDED, Cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
)
from toys import loss_of, toy

case = Cases(__name__, __file__, rtol=1e-6)

T = StateDictType
FULL = T.FULL_STATE_DICT


def trained(lib, model):
    loss_of(model, lib.batch()).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.add_(p.grad)
    model.zero_grad()
    return model


# --- saving --------------------------------------------------------------------------------------


@case(over={"strategy": SHARDED, "orig": BOTH})
def the_unsharded_models_state_dict(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    state = model.state_dict()
    assert list(state) == list(toy().state_dict())
    assert type(state) is collections.OrderedDict
    return dict(state)


@case(over={"orig": BOTH})
def after_a_step(lib, orig):
    return dict(trained(lib, lib.wrap_blocks(toy(), use_orig_params=orig)).state_dict())


@case()
def into_a_given_dictionary(lib):
    given = collections.OrderedDict(other=torch.ones(1))
    result = lib.wrap_blocks(toy()).state_dict(destination=given)
    return result is given, list(given)


@case()
def values_are_copies(lib):
    model = lib.wrap_blocks(toy())
    state = model.state_dict()
    for value in state.values():
        value.zero_()
    return lib.full(model)


@case()
def with_buffers(lib):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    return dict(lib.wrap(model).state_dict())


@case()
def buffers_in_their_original_dtype(lib):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    mixed = MixedPrecision(buffer_dtype=torch.bfloat16, _module_classes_to_ignore=())
    model = lib.wrap(model, mixed_precision=mixed)
    model.check_is_root()
    return {k: v.dtype for k, v in model.state_dict().items()}


@case()
def parameters_in_their_original_dtype(lib):
    model = lib.wrap_blocks(toy(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model(lib.batch())
    return dict(model.state_dict())


@case(torch=wrong("order"), fsdpc_does="has the unsharded model's order")
def the_order_of_tied_weights(lib):
    """Order of a state dict's keys with tied weights"""
    model = toy(width=6, vocabulary=13)
    model.head.weight = model.embed.weight
    expected = list(model.state_dict())
    got = list(lib.wrap(model).state_dict())
    assert got == expected, "another order"


@case()
def frozen_parameters_too(lib):
    model = toy()
    model.blocks[0].requires_grad_(False)
    return dict(lib.wrap_blocks(model).state_dict())


@case()
def a_plain_root_around_units(lib):
    model = toy()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = lib.wrap(block)
    return dict(model.state_dict())


@case(over={"outside": BOTH})
def names_without_activation_wrappers(lib, outside):
    model = toy()
    block = model.blocks[0]
    model.blocks[0] = (
        checkpoint_wrapper(lib.wrap(block)) if outside else lib.wrap(checkpoint_wrapper(block))
    )
    return list(lib.wrap(model).state_dict())


@case()
def a_hook_of_the_user(lib):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"epoch": 3}

        def set_extra_state(self, state):
            self.epoch = state["epoch"]

    model = lib.wrap(nn.Sequential(Extra(2, 2)))
    state = model.state_dict()
    other = lib.wrap(nn.Sequential(Extra(2, 2)))
    other.load_state_dict(state)
    return list(state), other[0].epoch


@case()
def inside_summon(lib):
    model = lib.wrap_blocks(toy())
    with lib.FSDP.summon_full_params(model):
        state = model.state_dict()
    return dict(state)


@case()
def on_all_ranks_or_one(lib):
    """rank0_only with values that are not offloaded"""
    model = lib.wrap_blocks(toy())
    with lib.FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        state = model.state_dict()
    assert bool(state) == (lib.rank == 0)
    return dict(state)


@case()
def on_one_rank_with_ignored_parameters(lib):
    model = toy()
    model = lib.wrap_blocks(model, ignored_modules=[model.head])
    with lib.FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        return dict(model.state_dict())


@case(
    torch=OFFLOADS_ON_THE_CPU,
    fsdpc_does="returns valid copies",
    over={"rank0": BOTH},
)
def offloaded_to_the_cpu(lib, rank0):
    """FullStateDictConfig(offload_to_cpu=True)"""
    model = lib.wrap_blocks(toy())
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0)
    with lib.FSDP.state_dict_type(model, FULL, config):
        state = model.state_dict()
    if lib.rank == 0 or not rank0:
        assert all(torch.equal(state[n], p) for n, p in toy().state_dict().items())


@case()
def between_forward_and_backward(lib):
    model = lib.wrap_blocks(toy())
    loss = loss_of(model, lib.batch())
    state = dict(model.state_dict())
    loss.backward()
    return state, lib.gradients(model)


# --- loading -------------------------------------------------------------------------------------


@case(over={"strategy": SHARDED, "orig": BOTH})
def loading_a_plain_state_dict(lib, strategy, orig):
    model = lib.wrap_blocks(toy(seed=1), sharding_strategy=strategy, use_orig_params=orig)
    result = model.load_state_dict(toy(seed=2).state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    return lib.full(model)


@case()
def saving_and_loading(lib):
    first, second = lib.wrap_blocks(toy(seed=1)), lib.wrap_blocks(toy(seed=2))
    second.load_state_dict(first.state_dict())
    return lib.full(second)


@case()
def loading_into_another_wrapping(lib):
    first = lib.wrap_blocks(toy(seed=1), use_orig_params=True)
    second = lib.wrap(
        toy(seed=2),
        auto_wrap_policy=torch.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
    )
    second.load_state_dict(first.state_dict())
    return lib.full(second)


@case()
def loading_an_fsdp_state_dict_into_a_plain_model(lib):
    plain = toy(seed=2)
    plain.load_state_dict(lib.wrap_blocks(toy(seed=1)).state_dict())
    return dict(plain.state_dict())


@case()
def a_value_of_another_dtype(lib):
    model = lib.wrap_blocks(toy(seed=1))
    model.load_state_dict({k: v.double() for k, v in toy(seed=2).state_dict().items()})
    return lib.full(model)


@case()
def the_given_dictionary_is_not_changed(lib):
    state = toy(seed=2).state_dict()
    keys = list(state)
    lib.wrap_blocks(toy()).load_state_dict(state)
    return list(state) == keys


@case()
def loading_buffers(lib):
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    source = make()
    source[1].running_mean.fill_(3.0)
    model = lib.wrap(make())
    model.load_state_dict(source.state_dict())
    return dict(model.state_dict())


@case()
def loading_between_steps(lib):
    model = lib.wrap_blocks(toy(), use_orig_params=True)
    first = lib.train(model, steps=1)
    model.load_state_dict(toy(seed=3).state_dict())
    return first, lib.train(model, steps=1)


@case()
def loading_into_a_plain_root(lib):
    model = toy(seed=1)
    model.blocks[0] = lib.wrap(model.blocks[0])
    model.load_state_dict(toy(seed=2).state_dict())
    return dict(model.state_dict())


@case()
def loading_with_activation_wrappers(lib):
    model = toy(seed=1)
    model.blocks[0] = lib.wrap(checkpoint_wrapper(model.blocks[0]))
    model = lib.wrap(model)
    model.load_state_dict(toy(seed=2).state_dict())
    return lib.full(model)


@case()
def loading_tied_weights(lib):
    def make(seed):
        model = toy(seed=seed, width=6, vocabulary=13)
        model.head.weight = model.embed.weight
        return model

    model = lib.wrap_blocks(make(1))
    model.load_state_dict(make(2).state_dict())
    return lib.full(model)


test_torch, test_fsdpc = case.tests()
