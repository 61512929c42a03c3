"""FULL_STATE_DICT of one unit: the unsharded module's state dict.

For a save, private full copies are registered while the unit's modules save, so that the order of
keys, tied keys and extra state are torch's; the dict then owns the copies. A rank that does not
keep the dict (``rank0_only``) takes part in the gather but makes no copy: it allocates nothing if
the ranks share memory, otherwise at most the gather's window. For a load, full copies are
registered too, every module loads into these copies, and this rank's shard is written back.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpc._engine.device import CPU
from fsdpc._fsdp1.names import clean_fqn
from fsdpc._fsdp1.summon import conceal, expose, write_back


def keeps(member: Any) -> bool:
    """Return whether this rank gets the dict. Local."""
    return not getattr(member._state_dict_config, "rank0_only", False) or member.rank == 0


def offloads(member: Any) -> bool:
    """Return whether the dict's values go to the CPU. Local."""
    return bool(getattr(member._state_dict_config, "offload_to_cpu", False))


def before_save(member: Any) -> None:
    """Register full parameters on ranks that keep the dict. Collective over the sharding group."""
    if not getattr(member._state_dict_config, "rank0_only", False):
        check_shown(member)
    if keeps(member):
        show(member, CPU if offloads(member) else None)
    elif member._unit is not None and not member._summoned:
        member._unit.attend_gather()


def check_shown(member: Any) -> None:
    """Raise ``RuntimeError``, on all ranks, inside ``summon_full_params(rank0_only=True)``, because
    ranks other than 0 have nothing to save.
    """
    if member._summoned_on_rank_0 and member.world_size > 1:
        raise RuntimeError(
            f"module {member._name!r} cannot be saved inside summon_full_params(rank0_only=True): "
            "ranks other than 0 have no full parameters. Leave the context first, or save with "
            "FullStateDictConfig(rank0_only=True)"
        )


def show(member: Any, to: torch.device | None = None) -> None:
    """Register private full copies of the parameters, on the device ``to`` (default: the unit's
    device). Collective over the sharding group.
    """
    if member._unit is not None and not member._summoned:
        expose(member, member._unit.gather_full(to))


def after_save(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Register the sharded parameters again after a save. A rank that does not keep the dict drops
    the values. ``state_dict`` has clean keys. Local.
    """
    if not conceal(member) and member._summoned:
        _detach_copies(state_dict, prefix)
    if not keeps(member):
        _drop_managed(member, state_dict, prefix)


def _detach_copies(state_dict: dict[str, Any], prefix: str) -> None:
    """Copy the values that are saved inside ``summon_full_params``, because the full parameters are
    freed on exit.
    """
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, torch.Tensor):
            state_dict[key] = value.detach().clone()


def _drop_managed(member: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Remove all entries of this instance except ignored parameters from the dict. Called on ranks
    that do not keep the dict.
    """
    kept = {
        prefix + clean_fqn(name)
        for name, param in member._fsdp_wrapped_module.named_parameters(remove_duplicate=False)
        if param in member._ignored.params
    }
    for key in list(state_dict):
        if key.startswith(prefix) and key not in kept:
            del state_dict[key]


def before_load(
    member: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> None:
    """Register full parameters for modules to load into. Collective over the sharding group.

    Keys whose values are the unit's own shards are removed: the values stay as they are, and the
    keys count as missing. (torch's ``set_model_state_dict`` inserts these shards for missing keys.)
    """
    if member._unit is not None:
        own = {id(param) for param in member._unit.shard_params}
        for key in [key for key, value in state_dict.items() if id(value) in own]:
            del state_dict[key]
    show(member)


def after_load(member: Any) -> None:
    """Write this rank's elements of the loaded values into its shard. Local."""
    if member._exposed:
        try:
            write_back(member._unit)
        finally:
            conceal(member)
