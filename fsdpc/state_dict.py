"""Full state dicts: what ``model.state_dict()`` returns is what the unsharded model would have
returned.

Each FSDP instance carries its own save and load hooks, so that units nested in a plain model work
and no more than one nesting chain of units is unsharded at a time. Saving shows a unit's private
full copies while its modules write themselves, which gives torch's own key order, tied keys and
extra state; then names lose their wrapper segments and low-precision buffers get their original
dtype back. Loading shows the full copies, lets every module load itself, and writes back shard by
shard. Only ``FULL_STATE_DICT`` exists so far.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdpc._collect import unit_modules
from fsdpc._names import FSDP_PREFIX, FSDP_WRAPPED, clean_fqn
from fsdpc._summon import install, uninstall, write_back
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

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def register_hooks(member: nn.Module) -> None:
    """Register the save and load hooks of one FSDP instance."""
    member.register_state_dict_pre_hook(_before_save)
    member.register_state_dict_post_hook(_after_save)
    member.register_load_state_dict_pre_hook(_before_load)
    member.register_load_state_dict_post_hook(_after_load)


def abandon(member: Any) -> None:
    """Back to the sharded parameters after an exception between the hooks. Local."""
    for nested in unit_modules(member):
        if nested._exposed:
            nested._exposed = False
            uninstall(nested)


def _expose(member: Any) -> None:
    """Show the unit's full parameters. Collective over its sharding group."""
    _check_type(member)
    if member._unit is None or member._summoned or member._exposed:
        return
    install(member, member._unit.gather_full())
    member._exposed = True


def _check_type(member: Any) -> None:
    kind = member._state_dict_type
    if kind is StateDictType.FULL_STATE_DICT:
        return
    if member._unit is not None and member._unit.is_sharded:
        raise NotImplementedError(
            f"{kind} is not available in this version of fsdpc: use StateDictType.FULL_STATE_DICT "
            "(FullStateDictConfig(rank0_only=True) keeps the dict on one rank)"
        )
    warnings.warn(
        "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.",
        stacklevel=6,
    )


# --- saving ---


def _before_save(member: Any, prefix: str, keep_vars: bool) -> None:
    _expose(member)


def _after_save(
    member: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    if member._exposed:
        member._exposed = False
        uninstall(member)
    elif member._summoned:
        _detach_copies(state_dict, prefix)
    if getattr(member._state_dict_config, "rank0_only", False) and member.rank != 0:
        _drop_managed(member, state_dict, prefix)
    _rename(state_dict, prefix)
    for name, dtype in member._buffer_dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)


def _detach_copies(state_dict: dict[str, Any], prefix: str) -> None:
    """Inside ``summon_full_params`` the values shown go away on exit; the dict keeps its own."""
    for key, value in state_dict.items():
        if key.startswith(prefix + FSDP_PREFIX) and isinstance(value, torch.Tensor):
            state_dict[key] = value.detach().clone()


def _drop_managed(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """On ranks that do not save, only parameters that no unit manages stay."""
    wrapped = member._fsdp_wrapped_module
    kept = {
        prefix + FSDP_PREFIX + clean_fqn(name)
        for name, param in wrapped.named_parameters(remove_duplicate=False)
        if param in member._ignored.params
    }
    for key in list(state_dict):
        if key.startswith(prefix + FSDP_PREFIX) and key not in kept:
            del state_dict[key]


def _rename(state_dict: dict[str, Any], prefix: str) -> None:
    """Take this instance's wrapper segment out of keys and metadata, in place and in order."""
    start = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(start):
            state_dict[prefix + key[len(start) :]] = state_dict.pop(key)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        wrapped = prefix + FSDP_WRAPPED
        for key in [key for key in metadata if key == wrapped or key.startswith(start)]:
            metadata[clean_fqn(key)] = metadata.pop(key)


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
    """``state_dict`` is this level's own copy of the mapping (torch filters one per child), so it
    may be renamed.
    """
    abandon(member)
    _expose(member)
    member._load_errors = error_msgs
    for key in list(state_dict):
        if key.startswith(prefix):
            rest = key[len(prefix) :].removeprefix(FSDP_PREFIX)
            state_dict[prefix + FSDP_PREFIX + rest] = state_dict.pop(key)


def _after_load(member: Any, incompatible: Any) -> None:
    if member._exposed:
        try:
            write_back(member._unit, with_grads=False)
        finally:
            member._exposed = False
            uninstall(member)
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [clean_fqn(name) for name in names]
    if member._load_errors is not None:
        member._load_errors[:] = [text.replace(FSDP_PREFIX, "") for text in member._load_errors]
        member._load_errors = None


# --- state dict types ---


def set_type(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Set type and configs on every FSDP instance in ``module``; returns the previous ones."""
    if kind not in _CONFIGS:
        raise KeyError(f"{kind!r} is not a StateDictType")
    config_type, optim_type = _CONFIGS[kind]
    config = config_type() if config is None else config
    optim_config = optim_type() if optim_config is None else optim_config
    if type(config) is not config_type:
        raise RuntimeError(
            f"Expected state_dict_config of type {config_type} but got {type(config)}"
        )
    if type(optim_config) is not optim_type:
        raise RuntimeError(
            f"Expected optim_state_dict_config of type {optim_type} but got {type(optim_config)}"
        )
    previous = get_type(module) or StateDictSettings(None, None, None)  # type: ignore[arg-type]
    _apply_settings(module, StateDictSettings(kind, config, optim_config))
    return previous


def _apply_settings(module: nn.Module, settings: StateDictSettings) -> None:
    for member in unit_modules(module):
        member._state_dict_type = settings.state_dict_type
        member._state_dict_config = settings.state_dict_config
        member._optim_state_dict_config = settings.optim_state_dict_config


def get_type(module: nn.Module) -> StateDictSettings | None:
    """The settings of the FSDP instances in ``module``, ``None`` when there are none.

    Raises ``AssertionError`` where they differ.
    """
    found: StateDictSettings | None = None
    for member in unit_modules(module):
        settings = StateDictSettings(
            member._state_dict_type, member._state_dict_config, member._optim_state_dict_config
        )
        if found is not None and settings != found:
            raise AssertionError(
                "All FSDP modules should have the same state_dict_type and configs: got "
                f"{settings} and {found}"
            )
        found = settings
    return found


@contextmanager
def type_in_force(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> Iterator[None]:
    """``set_type`` for a block; restored on exit, also after an exception."""
    previous = set_type(module, kind, config, optim_config)
    try:
        yield
    finally:
        _apply_settings(module, previous)
