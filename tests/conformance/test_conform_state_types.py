"""State-dict types and configurations; SHARDED and LOCAL state dicts."""

from __future__ import annotations

import dataclasses

import torch
from outcome import raises, wrong
from suite import BOTH, Cases, S
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import api as torch_api
from toys import toy

case = Cases(__name__, __file__, rtol=1e-6)

T = StateDictType
FULL, SHARDED, LOCAL = T.FULL_STATE_DICT, T.SHARDED_STATE_DICT, T.LOCAL_STATE_DICT

# --- types ---------------------------------------------------------------------------------------

CONFIGS = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def plain_values(settings):
    return (
        settings.state_dict_type,
        *(
            (type(c).__name__, dataclasses.asdict(c))
            for c in (settings.state_dict_config, settings.optim_state_dict_config)
        ),
    )


@case()
def the_default_type(lib):
    return plain_values(lib.FSDP.get_state_dict_type(lib.wrap_blocks(toy())))


@case()
def the_type_of_a_plain_module(lib):
    return lib.FSDP.get_state_dict_type(nn.Linear(2, 2))


@case(over={"kind": list(T)})
def setting_a_type(lib, kind):
    model = lib.wrap_blocks(toy())
    before = lib.FSDP.set_state_dict_type(model, kind)
    return plain_values(before), [
        plain_values(lib.FSDP.get_state_dict_type(m)) for m in lib.FSDP.fsdp_modules(model)
    ]


@case(over={"kind": list(T)})
def given_configurations_are_kept(lib, kind):
    model = lib.wrap(toy())
    configs = [make(offload_to_cpu=True) for make in CONFIGS[kind]]
    lib.FSDP.set_state_dict_type(model, kind, *configs)
    found = lib.FSDP.get_state_dict_type(model)
    assert (found.state_dict_config, found.optim_state_dict_config) == tuple(configs)
    return plain_values(found)


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
        inside = plain_values(lib.FSDP.get_state_dict_type(model))
    return inside, plain_values(lib.FSDP.get_state_dict_type(model))


@case()
def blocks_of_code_nest(lib):
    model, found = lib.wrap(toy()), []
    with lib.FSDP.state_dict_type(model, SHARDED):
        with lib.FSDP.state_dict_type(model, LOCAL):
            found.append(lib.FSDP.get_state_dict_type(model).state_dict_type)
        found.append(lib.FSDP.get_state_dict_type(model).state_dict_type)
    return found, lib.FSDP.get_state_dict_type(model).state_dict_type


@case(torch=wrong("stays"), fsdpc_does="restores the type")
def a_block_of_code_left_by_an_exception(lib):
    model = lib.wrap(toy())
    try:
        with lib.FSDP.state_dict_type(model, SHARDED):
            raise KeyError
    except KeyError:
        pass
    kind = lib.FSDP.get_state_dict_type(model).state_dict_type
    assert kind is FULL, f"{kind} stays in force"


@case(raises=AssertionError, words="state_dict_type")
def units_that_disagree(lib):
    model = lib.wrap_blocks(toy())
    lib.FSDP.set_state_dict_type(model.blocks[0], SHARDED)
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


# --- sharded and local ---------------------------------------------------------------------------


def shards(value):
    """Return this rank's shard of a value, with the type, size and dtype of the whole value."""
    if hasattr(value, "local_shards"):
        return (
            type(value).__name__,
            tuple(value.size()),
            value.dtype,
            [(tuple(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()],
        )
    if hasattr(value, "placements"):
        return (
            type(value).__name__,
            tuple(value.shape),
            value.dtype,
            str(value.placements),
            value.to_local().detach().clone(),
        )
    return value


def sharded(lib, model, kind=SHARDED, config=None):
    with lib.FSDP.state_dict_type(model, kind, config):
        return model.state_dict()


@case(over={"strategy": [S.FULL_SHARD, S.SHARD_GRAD_OP], "orig": BOTH})
def rows_of_each_parameter(lib, strategy, orig):
    model = lib.wrap_blocks(toy(), sharding_strategy=strategy, use_orig_params=orig)
    return {k: shards(v) for k, v in sharded(lib, model).items()}


@case(world=3)
def rows_on_three_ranks(lib):
    return {k: shards(v) for k, v in sharded(lib, lib.wrap_blocks(toy())).items()}


@case()
def rows_with_a_mesh(lib):
    model = lib.wrap_blocks(toy(), device_mesh=init_device_mesh("cpu", (2,)))
    return {k: shards(v) for k, v in sharded(lib, model).items()}


@case(world=4)
def rows_with_replicas(lib):
    mesh = init_device_mesh("cpu", (2, 2))
    model = lib.wrap_blocks(toy(), sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
    return {k: shards(v) for k, v in sharded(lib, model).items()}


@case()
def rows_without_sharding(lib):
    model = lib.wrap(toy(), sharding_strategy=S.NO_SHARD)
    state = sharded(lib, model)
    return {k: shards(v) for k, v in state.items()}, bool(lib.warned("NO_SHARD"))


@case(over={"mesh": BOTH})
def saving_and_loading_rows(lib, mesh):
    options = {"device_mesh": init_device_mesh("cpu", (2,))} if mesh else {}
    first, second = (lib.wrap_blocks(toy(seed=s), **options) for s in (1, 2))
    state = sharded(lib, first)
    with lib.FSDP.state_dict_type(second, SHARDED):
        result = second.load_state_dict(state)
    return result.missing_keys, result.unexpected_keys, lib.full(second)


@case()
def loading_rows_into_another_wrapping(lib):
    state = sharded(lib, lib.wrap_blocks(toy(seed=1)))
    model = lib.wrap(toy(seed=2), use_orig_params=True)
    with lib.FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(state)
    return lib.full(model)


@case()
def ignored_parameters_in_rows(lib):
    model = toy()
    model = lib.wrap_blocks(model, ignored_modules=[model.head])
    return {k: shards(v) for k, v in sharded(lib, model).items()}


@case()
def rows_of_a_model_with_buffers(lib):
    model = lib.wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    return {k: shards(v) for k, v in sharded(lib, model).items()}


@case()
def rows_are_unrounded(lib):
    """SHARDED state dicts have the unrounded values, even with mixed precision."""
    mixed = torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    model = lib.wrap(toy(), mixed_precision=mixed)
    model(lib.batch())
    return {k: shards(v) for k, v in sharded(lib, model).items()}


@case()
def names_of_the_local_form(lib):
    state = sharded(lib, lib.wrap_blocks(toy()), LOCAL)
    return sorted(state), {k: type(v).__name__ for k, v in sorted(state.items())}


@case()
def saving_and_loading_the_local_form(lib):
    first, second = (lib.wrap_blocks(toy(seed=s)) for s in (1, 2))
    state = sharded(lib, first, LOCAL)
    with lib.FSDP.state_dict_type(second, LOCAL):
        second.load_state_dict(state)
    return lib.full(second)


@case(torch=raises(RuntimeError), fsdpc_does="loads what it saved")
def the_local_form_of_original_parameters(lib):
    """torch cannot load its own LOCAL state dict with use_orig_params."""
    first, second = (lib.wrap(toy(seed=s), use_orig_params=True) for s in (1, 2))
    state = sharded(lib, first, LOCAL)
    with lib.FSDP.state_dict_type(second, LOCAL):
        second.load_state_dict(state)


test_torch, test_fsdpc = case.tests()
