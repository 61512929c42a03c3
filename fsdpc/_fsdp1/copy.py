"""``copy.deepcopy`` of an FSDP instance: a second sharded model with separate memory.

Modules, buffers and hooks are copied by ``nn.Module``'s deepcopy, nested instances first. In the
copy, parameters without memory replace a unit's parameters. A new unit with the same layout is made
from the parameters without memory, and each rank copies its shard. Nothing is gathered and the
original does not change. Process groups, communicators and communication hooks are shared.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fsdpc._comm.channel import this_rank
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.lowbit import holds_codes
from fsdpc._engine.unit import ParamInfo
from fsdpc._fsdp1.collect import Ignored

# Attributes that the original and the copy share.
_SHARED = frozenset(
    {
        "process_group",
        "_inter_node_pg",
        "_groups",
        "_options",
        "_device_mesh",
        "mixed_precision",
        "cpu_offload",
        "_comm_hook",
        "_comm_hook_state",
        "_state_dict_config",
        "_optim_state_dict_config",
    }
)
# Attributes that the copy gets from its own unit and its own lazy initialisation.
_OWN = frozenset(
    {
        "_unit",
        "_pass_unit",
        "_mark_handles",
        "_enter",
        "_leave",
        "_tree",
        "_root",
        "_is_root",
        "_prepare_inputs",
        "_ignored",
        "_state_form",
        "precision_line",
    }
)

Memo = dict[int, Any]


class Copying:
    """A stand-in for an FSDP instance inside ``copy.deepcopy``. If the instance itself had a
    ``__deepcopy__``, wrappers that forward attribute access to the instance, such as torch's
    ``checkpoint_wrapper``, would have it too. These wrappers would then be missing in the copy.
    """

    def __init__(self, member: Any) -> None:
        self.member = member

    def __deepcopy__(self, memo: Memo) -> Any:
        return deepcopy(self.member, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a sharded module cannot be pickled or shallow-copied (unit "
            f"{self.member._name!r}): save state_dict(), or use copy.deepcopy for a sharded copy"
        )


def copied(made: Any) -> Any:
    """``copy.deepcopy`` calls this function with a finished copy, which is returned. ``copy.copy``
    calls this function with a ``Copying``, which raises ``TypeError``.
    """
    return made.__reduce_ex__(2) if isinstance(made, Copying) else made


def deepcopy(member: Any, memo: Memo) -> Any:
    """Return the sharded copy of ``member``, with its nested instances and without gradients.
    Collective: every rank of the groups must copy the same instance, between steps.

    ``RuntimeError``: the call is inside a forward, a backward or ``summon_full_params``.
    ``TypeError``: a module's ``__deepcopy__`` omits a parameter, or a flat parameter was copied
    before its model.
    """
    _check_free(member)
    result = type(member).__new__(type(member))
    result._init_state()
    memo[id(member)] = result
    empty_params = _empty_params(member, memo)
    for key, value in member.__dict__.items():
        if key in _SHARED:
            result.__dict__[key] = value
        elif key not in _OWN:
            result.__dict__[key] = copy.deepcopy(value, memo)
    result._ignored = Ignored(
        {memo[id(module)] for module in member._ignored.modules if id(module) in memo},
        {memo[id(param)] for param in member._ignored.params if id(param) in memo},
    )
    if member._unit is not None:
        result._shard(_infos(member._unit, empty_params, memo))
        _copy_shards(member._unit, result._unit, memo)
    return result


def _check_free(member: Any) -> None:
    doing = member.training_state.name
    if member._summoned or member._exposed:
        where = "while its full parameters are shown (summon_full_params, state_dict)"
    elif doing != "IDLE":
        where = f"in {member._unit.state if member._unit is not None else doing}"
    else:
        return
    raise RuntimeError(
        f"module {member._name!r} cannot be copied {where} on rank {this_rank()}: call "
        "copy.deepcopy between steps, on every rank"
    )


def _empty_params(member: Any, memo: Memo) -> list[nn.Parameter]:
    """Return the copy's parameters, which have shapes but no memory. Each is entered in ``memo``,
    so that the copied modules refer to it.
    """
    unit = member._unit
    if unit is None:
        return []
    _writeback.adopt_values(unit)
    made = []
    for i, info in enumerate(unit.infos):
        param = memo.get(id(info.param))  # not None if the optimizer was copied before the model
        if type(param) is not type(info.param):
            param = torch.Tensor._make_subclass(
                type(info.param), torch.empty(0, device=unit.device), unit.trainable[i]
            )
        memo[id(info.param)] = param
        param.requires_grad_(False)
        one = torch.zeros(1, dtype=unit.dtypes[i], device=unit.device)
        param.data = one.expand(unit.shapes[i]) if unit.shapes[i] else one.reshape(())
        if unit.trainable[i]:
            param.requires_grad_()
        for module, name in info.sites:
            shown = module.__dict__.get(name)
            if shown is not None:
                memo[id(shown)] = param
        memo[id(unit.full[i])] = param
        made.append(param)
    for info, param in zip(unit.infos, made, strict=True):
        if holds_codes(info.param):
            param.__dict__.update(copy.deepcopy(info.param.__dict__, memo))
    for flat in unit.flat_params:
        if id(flat) in memo:
            raise TypeError(
                f"the flat parameter of unit {unit.name!r} was copied before its model: copy the "
                "model first, then objects that refer to its parameters (optimizers)"
            )
        memo[id(flat)] = made[0]
    return made


def _infos(unit: Any, empty_params: list[nn.Parameter], memo: Memo) -> list[ParamInfo]:
    infos = []
    for info, param in zip(unit.infos, empty_params, strict=True):
        sites = []
        for module, name in info.sites:
            copied = memo.get(id(module))
            if not isinstance(copied, nn.Module) or copied is module:
                raise TypeError(
                    f"parameter {info.name!r} of unit {unit.name!r} was not copied: "
                    f"{type(module).__name__}.__deepcopy__ must copy the module's parameters"
                )
            sites.append((copied, name))
        infos.append(ParamInfo(info.name, param, sites))
    return infos


@torch.no_grad()
def _copy_shards(unit: Any, made: Any, memo: Memo) -> None:
    """Copy each shard of ``unit`` into the same shard of ``made``. The layouts are equal, because
    names, sizes, dtypes and ranks are equal.
    """
    for ours, theirs, (param, _, _), (old, _, _) in zip(
        made.views, unit.views, made.optim_params, unit.optim_params, strict=True
    ):
        ours.copy_(theirs)
        param.requires_grad_(old.requires_grad)
        memo[id(old)] = param
