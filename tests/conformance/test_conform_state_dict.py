"""FULL state dicts and loading them; state-dict types and configurations."""

from __future__ import annotations

import collections
import dataclasses

import torch
from outcome import any_of, dies, raises, wrong
from suite import Cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import api as torch_api
from toys import Block, loss_of, toy

case = Cases(__name__, __file__, rtol=1e-6)

S = ShardingStrategy
SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]
T = StateDictType
FULL = T.FULL_STATE_DICT
BOTH = [True, False]


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
def with_a_prefix(lib):
    return dict(lib.wrap_blocks(toy()).state_dict(prefix="model."))


@case()
def into_a_given_dictionary(lib):
    given = collections.OrderedDict(other=torch.ones(1))
    result = lib.wrap_blocks(toy()).state_dict(destination=given)
    return result is given, list(given)


@case()
def kept_as_variables(lib):
    """keep_vars=True"""
    state = lib.wrap_blocks(toy()).state_dict(keep_vars=True)
    return {k: tuple(v.shape) for k, v in state.items()}


@case()
def values_are_copies(lib):
    model = lib.wrap_blocks(toy())
    state = model.state_dict()
    for value in state.values():
        value.zero_()
    return lib.full(model)


@case()
def values_need_no_gradient(lib):
    return [v.requires_grad for v in lib.wrap_blocks(toy()).state_dict().values()]


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


@case(over={"orig": BOTH})
def tied_weights_twice(lib, orig):
    model = toy(width=6, vocabulary=13)
    model.head.weight = model.embed.weight
    state = lib.wrap_blocks(model, use_orig_params=orig).state_dict()
    same = state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    return dict(sorted(state.items())), same


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


@case()
def a_child_alone(lib):
    return dict(lib.wrap_blocks(toy()).blocks[1].state_dict())


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
    torch=any_of(raises(RuntimeError, "storage"), dies("SIGSEGV"), wrong()),
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


def without(state, *names):
    return {k: v for k, v in state.items() if k not in names}


@case(raises=RuntimeError, words="missing key", over={"key": ["head.bias", "blocks.0.up.weight"]})
def a_missing_key(lib, key):
    lib.wrap_blocks(toy()).load_state_dict(without(toy().state_dict(), key))


@case(raises=RuntimeError, words="unexpected key")
def an_unexpected_key(lib):
    lib.wrap_blocks(toy()).load_state_dict({**toy().state_dict(), "other": torch.ones(1)})


@case(raises=RuntimeError, words="size mismatch")
def a_value_of_another_shape(lib):
    state = {**toy().state_dict(), "head.bias": torch.ones(3)}
    lib.wrap_blocks(toy()).load_state_dict(state)


@case()
def not_strict(lib):
    state = {**without(toy(seed=2).state_dict(), "blocks.0.up.weight"), "other": torch.ones(1)}
    model = lib.wrap_blocks(toy(seed=1))
    result = model.load_state_dict(state, strict=False)
    return result.missing_keys, result.unexpected_keys, lib.full(model)


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


# --- types ---------------------------------------------------------------------------------------

CONFIGS = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    T.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    T.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def told(settings):
    return (
        settings.state_dict_type,
        *(
            (type(c).__name__, dataclasses.asdict(c))
            for c in (settings.state_dict_config, settings.optim_state_dict_config)
        ),
    )


@case()
def the_default_type(lib):
    return told(lib.FSDP.get_state_dict_type(lib.wrap_blocks(toy())))


@case()
def the_type_of_a_plain_module(lib):
    return lib.FSDP.get_state_dict_type(nn.Linear(2, 2))


@case(over={"kind": list(T)})
def setting_a_type(lib, kind):
    model = lib.wrap_blocks(toy())
    before = lib.FSDP.set_state_dict_type(model, kind)
    return told(before), [
        told(lib.FSDP.get_state_dict_type(m)) for m in lib.FSDP.fsdp_modules(model)
    ]


@case(over={"kind": list(T)})
def given_configurations_are_kept(lib, kind):
    model = lib.wrap(toy())
    configs = [make(offload_to_cpu=True) for make in CONFIGS[kind]]
    lib.FSDP.set_state_dict_type(model, kind, *configs)
    found = lib.FSDP.get_state_dict_type(model)
    assert (found.state_dict_config, found.optim_state_dict_config) == tuple(configs)
    return told(found)


@case(raises=RuntimeError, words="state_dict_config", over={"kind": list(T), "other": list(T)})
def a_configuration_of_another_type(lib, kind, other):
    if kind is other:
        raise RuntimeError("nothing to mistake: state_dict_config")
    lib.FSDP.set_state_dict_type(lib.wrap(toy()), kind, CONFIGS[other][0]())


@case(raises=RuntimeError, words="optim_state_dict_config")
def an_optimizer_configuration_of_another_type(lib):
    lib.FSDP.set_state_dict_type(
        lib.wrap(toy()), FULL, FullStateDictConfig(), ShardedOptimStateDictConfig()
    )


@case()
def a_type_for_a_block_of_code(lib):
    model = lib.wrap_blocks(toy())
    config = FullStateDictConfig(rank0_only=True)
    with lib.FSDP.state_dict_type(model, FULL, config):
        inside = told(lib.FSDP.get_state_dict_type(model))
    return inside, told(lib.FSDP.get_state_dict_type(model))


@case()
def blocks_of_code_nest(lib):
    model, found = lib.wrap(toy()), []
    with lib.FSDP.state_dict_type(model, T.SHARDED_STATE_DICT):
        with lib.FSDP.state_dict_type(model, T.LOCAL_STATE_DICT):
            found.append(lib.FSDP.get_state_dict_type(model).state_dict_type)
        found.append(lib.FSDP.get_state_dict_type(model).state_dict_type)
    return found, lib.FSDP.get_state_dict_type(model).state_dict_type


@case(torch=wrong("stays"), fsdpc_does="restores the type")
def a_block_of_code_left_by_an_exception(lib):
    model = lib.wrap(toy())
    try:
        with lib.FSDP.state_dict_type(model, T.SHARDED_STATE_DICT):
            raise KeyError
    except KeyError:
        pass
    kind = lib.FSDP.get_state_dict_type(model).state_dict_type
    assert kind is FULL, f"{kind} stays in force"


@case(raises=AssertionError, words="state_dict_type")
def units_that_disagree(lib):
    model = lib.wrap_blocks(toy())
    lib.FSDP.set_state_dict_type(model.blocks[0], T.SHARDED_STATE_DICT)
    lib.FSDP.get_state_dict_type(model)


@case()
def configurations_are_torchs_own(lib):
    names = [
        "FullStateDictConfig",
        "ShardedStateDictConfig",
        "LocalStateDictConfig",
        "StateDictSettings",
        "StateDictType",
        "MixedPrecision",
        "CPUOffload",
        "BackwardPrefetch",
        "ShardingStrategy",
        "FullOptimStateDictConfig",
    ]
    api = lib.submodule("api")
    return [getattr(api, name) is getattr(torch_api, name) for name in names]


@case()
def a_block_as_a_class_of_the_module(lib):
    return [type(m).__name__ for m in lib.wrap_blocks(toy()).modules() if isinstance(m, Block)]


test_torch, test_fsdpc = case.tests()
