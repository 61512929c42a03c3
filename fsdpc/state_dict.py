"""State dicts of FSDP instances: the hooks before and after saving and loading, and the settings.

Each FSDP instance has its own hooks, so that units inside a plain model work, and so that full
values exist for at most one unit and the units around it at a time. The module of the current type
(``_fsdp1/state/full.py``, ``sharded.py`` or ``local.py``) decides which values are saved and
loaded. This file removes the wrappers' names from keys and restores the original dtype of
low-precision buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fsdpc._comm.channel import this_rank
from fsdpc._comm.rendezvous import rendezvous
from fsdpc._fsdp1 import args as _args
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._fsdp1.names import FSDP_PREFIX, clean_fqn
from fsdpc._fsdp1.state import full as _state_full
from fsdpc._fsdp1.state import local as _state_local
from fsdpc._fsdp1.state import sharded as _state_sharded
from fsdpc._fsdp1.state.keys import fill_ties, put_wrapper_in, take_wrapper_out
from fsdpc._fsdp1.summon import conceal
from fsdpc._torch import ShardedTensor
from fsdpc.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

# For each type: the classes of its two configurations, and the module that saves and loads it.
_KINDS: dict[StateDictType, tuple[type[Any], type[Any], ModuleType]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig, _state_full),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig, _state_local),
    StateDictType.SHARDED_STATE_DICT: (
        ShardedStateDictConfig,
        ShardedOptimStateDictConfig,
        _state_sharded,
    ),
}


def register_hooks(member: nn.Module) -> None:
    """Register the save and load hooks of one FSDP instance. If the unit has a flat parameter,
    also register hooks that refuse values for single parameters in the flat parameter.
    """
    member.register_state_dict_pre_hook(_before_save)
    member.register_state_dict_post_hook(_after_save)
    member.register_load_state_dict_pre_hook(_before_load)
    member.register_load_state_dict_post_hook(_after_load)
    if member._unit is None or member._unit.use_orig_params:
        return
    flat: dict[nn.Module, list[str]] = {}
    for module, name in (site for info in member._unit.infos for site in info.sites):
        flat.setdefault(module, []).append(name)
    for module, names in flat.items():
        module.register_load_state_dict_pre_hook(partial(_refuse_part, names))


def abandon(member: Any) -> None:
    """Restore the sharded parameters if a save or load has raised an exception. Local."""
    for nested in unit_modules(member):
        conceal(nested)


def _begin(member: Any, action: str, prefix: str) -> ModuleType:
    """Check the call, and return the module of the current type. Collective over the sharding
    group, except for the LOCAL type.

    An unsharded unit always has the FULL type, as in torch. ``AssertionError``: the unit is in
    forward or backward. ``MismatchError``: ranks make different calls, or the same call for units
    at different positions of their models (units wrapped one by one may have equal shapes).
    """
    abandon(member)  # in case a save outside of FSDP.state_dict has failed
    unit = member._unit
    if unit is not None and unit.state in ("forward", "backward"):
        raise AssertionError(
            "Expects the handle training to be IDLE but got "
            f"HandleTrainingState.{'FORWARD' if unit.state == 'forward' else 'BACKWARD_PRE'}: unit "
            f"{unit.name!r} is in {unit.state} on rank {this_rank(unit.groups.shard)}: save and "
            "load state dicts between steps"
        )
    kind = member._state_dict_type
    if unit is None:
        return _state_full
    if kind is not StateDictType.FULL_STATE_DICT and not unit.is_sharded:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.",
            stacklevel=6,
        )
        return _state_full
    if kind is not StateDictType.LOCAL_STATE_DICT:
        doing = f"{action} of a {kind.name}, "
        number = None if unit.tree is None else f"{doing}{unit.tree.units.index(unit)}"
        doing += f"module at {clean_fqn(prefix) or '(root)'}"
        rendezvous(unit.groups, doing, f"state dict of unit {unit.name}", number)
    return _KINDS[kind][2]


# --- saving ---


def _before_save(member: Any, prefix: str, keep_vars: bool) -> None:
    member._state_form = _begin(member, "saving", prefix)
    member._state_form.before_save(member)


def _after_save(
    member: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    take_wrapper_out(state_dict, prefix)
    member._state_form.after_save(member, state_dict, prefix)
    for name, dtype in member._buffer_dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
    if _state_full.offloads(member):
        _offload(state_dict, prefix)


def _offload(state_dict: dict[str, Any], prefix: str) -> None:
    """Move the tensors of the keys that begin with ``prefix`` to the CPU."""
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, (torch.Tensor, ShardedTensor)):
            state_dict[key] = value.cpu()  # no copy if already on the CPU


# --- loading ---


def _before_load(
    member: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Prepare a load. May change ``state_dict``, because torch passes each child a copy."""
    member._state_form = _begin(member, "loading", prefix)
    member._load_errors = error_msgs
    put_wrapper_in(state_dict, prefix)
    if member._fill_ties:
        fill_ties(member, state_dict, prefix)
    member._state_form.before_load(member, state_dict, prefix, error_msgs)


def _refuse_part(
    names: list[str],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Report an error for values of parameters that are in a flat parameter. This is a load hook of
    modules inside the unit. In a load that does not go through the unit, such a module has no
    parameters, and ``strict=False`` would drop the values silently.
    """
    for name in names:
        if prefix + name in state_dict and name in module.__dict__:
            which = getattr(module.__dict__[name], "_fsdpc_which", "a parameter of a unit")
            error_msgs.append(
                f"{prefix}{name} is {which}, which is in a flat parameter: load through the FSDP "
                "module around it (with strict=False the dict may lack other parameters), inside "
                "FSDP.summon_full_params(model), or wrap with use_orig_params=True"
            )


def _after_load(member: Any, incompatible: Any) -> None:
    member._state_form.after_load(member)
    if member._unit is not None:  # the engine has written to the parameters
        increment_version(member._unit.shard_params)
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [clean_fqn(name) for name in names]
    if member._load_errors is not None:
        member._load_errors[:] = [text.replace(FSDP_PREFIX, "") for text in member._load_errors]
        member._load_errors = None


def warn_if_nothing_was_loaded(given: list[str], found: Any) -> None:
    """Warn if a load with ``strict=False`` found no tensor of the model. Local."""
    if given and found.missing_keys and len(found.unexpected_keys) == len(given):
        warnings.warn(
            f"load_state_dict has loaded nothing: none of the {len(given)} keys names a parameter "
            f"or buffer of the model. A key is {given[0]!r}, a name {found.missing_keys[0]!r}: "
            "load values under the names of model.state_dict(). If the keys are from peft: call "
            "set_peft_model_state_dict before sharding",
            stacklevel=3,
        )


# --- state dict types ---


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the state-dict type of every unit in ``module`` and return the previous settings. Local.

    ``TypeError``: arguments in the wrong order. ``KeyError``: the type is a str or int.
    ``RuntimeError``: a config's class does not match the type. ``AssertionError``: the units
    have different settings now.
    """
    _args.check_model("state_dict_type", module)
    kind = state_dict_type
    if not isinstance(kind, StateDictType):
        error = KeyError if isinstance(kind, (str, int)) else TypeError
        raise error(f"state_dict_type: {kind!r} is not a StateDictType")
    config_type, optim_type, _ = _KINDS[kind]
    config = config_type() if state_dict_config is None else state_dict_config
    optim_config = optim_type() if optim_state_dict_config is None else optim_state_dict_config
    if type(config) is not config_type:
        raise RuntimeError(
            f"Expected state_dict_config of type {config_type} but got {type(config)}"
        )
    if type(optim_config) is not optim_type:
        raise RuntimeError(
            f"Expected optim_state_dict_config of type {optim_type} but got {type(optim_config)}"
        )
    before = [_settings_of(member) for member in unit_modules(module)]
    for other in before[1:]:
        _check_same_kinds(other, before[0])
    _apply_settings(module, StateDictSettings(kind, config, optim_config))
    return before[0] if before else StateDictSettings(None, None, None)  # type: ignore[arg-type]


def _settings_of(member: Any) -> StateDictSettings:
    return StateDictSettings(
        member._state_dict_type, member._state_dict_config, member._optim_state_dict_config
    )


def _check_same_kinds(one: StateDictSettings, other: StateDictSettings) -> None:
    if one.state_dict_type != other.state_dict_type:
        text = "should have the same state_dict_type."
    elif type(one.state_dict_config) is not type(other.state_dict_config):
        text = "must have the same type of state_dict_config."
    elif type(one.optim_state_dict_config) is not type(other.optim_state_dict_config):
        text = "must have the same type of optim_state_dict_config."
    else:
        return
    raise AssertionError(f"All FSDP modules {text} Got {one} and {other}")


def _apply_settings(module: nn.Module, settings: StateDictSettings) -> None:
    for member in unit_modules(module):
        member._state_dict_type = settings.state_dict_type
        member._state_dict_config = settings.state_dict_config
        member._optim_state_dict_config = settings.optim_state_dict_config


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Return the current settings of the units in ``module``; ``None`` if it has no units. Local.

    ``AssertionError``: the units have different settings. ``RuntimeError``: the type is LOCAL and
    the units have a device mesh.
    """
    _args.check_model("get_state_dict_type", module)
    found: StateDictSettings | None = None
    for member in unit_modules(module):
        settings = _settings_of(member)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            _state_local.refuse_mesh(member)
        if found is not None and settings != found:
            raise AssertionError(
                "All FSDP modules must have the same state dict settings."
                f"Got {settings} and {found}."
            )
        found = settings
    for member in unit_modules(module):
        if member._device_mesh is not None:  # torch's FSDP sets this flag in the user's config, too
            member._optim_state_dict_config._use_dtensor = True
    return found


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Context manager around ``set_state_dict_type``: restores the settings on exit, also after
    exceptions. Local.
    """
    previous = set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        _apply_settings(module, previous)
