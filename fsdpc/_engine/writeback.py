"""Changes that the user makes to sharded parameters between steps: ``p.data = ...``, or another
Parameter put into the module.

The new values are copied into the shard before the next read of the shard. The engine detects
changes when a forward begins, and every read of full values checks for changes.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from fsdpc import _C
from fsdpc._comm.channel import this_rank
from fsdpc._torch import storage_use_count

# Maps each parameter to the unit that shards the parameter. Keys and values are weak references, so
# the table keeps neither parameters nor units alive.
_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_OWNER, _GATHERED = "_fsdpc_owner", "_fsdpc_gathered"


def set_owner(param: nn.Parameter, unit: Any) -> None:
    """Record the unit that shards ``param``. Local."""
    if unit.dtensors:  # torch.utils.swap_tensors refuses tensors with weak references
        param.__dict__[_OWNER] = weakref.ref(unit)
    else:
        _OWNERS[param] = weakref.ref(unit)


def owner_of(param: Any) -> Any:
    """Return the unit that shards ``param``, or None. Local."""
    owner = getattr(param, "__dict__", {}).get(_OWNER) or _OWNERS.get(param)
    return owner() if owner is not None else None


def disown(param: nn.Parameter) -> None:
    """Forget the unit that shards ``param``. Local."""
    param.__dict__.pop(_OWNER, None)


def refuse_sharing(fn: Any, unit_name: str) -> None:
    """Raise ``NotImplementedError`` if ``fn`` is the function that ``Module.share_memory`` applies.
    Local.
    """
    if getattr(fn, "__qualname__", "").startswith(f"{nn.Module.share_memory.__qualname__}."):
        raise _sharing(unit_name)


def _sharing(unit_name: str) -> NotImplementedError:
    return NotImplementedError(
        f"share_memory: the shards of unit {unit_name!r} lie in memory that the engine maps, which "
        "cannot be moved into torch's shared memory: share a copy of the values, e.g. the tensors "
        "of a full state dict; a forked child has a copy of this rank's shards"
    )


def gathered_of(param: Any) -> tuple[Any, str] | None:
    """Return the unit and the parameter's name if ``param`` is the full value of a parameter, else
    None. Local.
    """
    unit, name = getattr(param, "__dict__", {}).get(_GATHERED, (None, ""))
    unit = None if unit is None else unit()
    return None if unit is None else (unit, name)


def set_gathered(full: torch.Tensor, unit: Any, name: str) -> None:
    """Record ``full`` as the full value of the parameter ``name`` of ``unit``. Local."""
    full.__dict__.pop(_OWNER, None)
    full.__dict__[_GATHERED] = weakref.ref(unit), name


def adopt_values(unit: Any) -> None:
    """Copy the user's changes of ``unit``'s parameters into the shard. Local.

    New values have the shape of this rank's shard or, with ``use_orig_params=True``, the shape of
    the whole parameter on every rank. A parameter on the meta device leaves the shard as it is.
    ``RuntimeError``: a value has any other shape (torch's "Cannot writeback when the parameter
    shape changes"). ``NotImplementedError``: the names of a tied parameter have got different
    values. ``StateError``: a parameter was deleted. ``ValueError``: a parameter was replaced by a
    parameter of another unit.
    """
    if unit.summoned:
        return
    adopt_objects(unit)
    for index, (param, _, _) in enumerate(unit.optim_params):
        if unit.foreign and unit.adopt_own(index):
            continue
        view, now = unit.views[index], unit.local(param)
        same = now.data_ptr() == view.data_ptr() and now.shape == view.shape
        # share_memory_() moves the storage of all views to shared memory. torch reports every GPU
        # tensor as shared, so only CPU tensors are checked.
        if same and view.device.type == "cpu" and view.untyped_storage().is_shared():
            raise _sharing(unit.name)
        # Module.to_empty() replaces the contents of a DTensor by those of a new tensor, for which
        # no owner is recorded.
        known = owner_of(param) is unit or not unit.dtensors
        if now.is_meta or same and known and now.dtype == view.dtype and now.device == view.device:
            continue
        _write(unit, index, now.detach())
        unit.point_at_shard(index)


def adopt_objects(unit: Any, but: int = -1) -> None:
    """Replace the unit's Parameters by the Parameters that the user has put into the modules. The
    values are copied later. ``but``: the index of a parameter to skip. Local.
    """
    if unit.use_orig_params:
        for index, info in enumerate(unit.infos):
            own = (module._parameters.get(name) is info.param for module, name in info.sites)
            if index != but and not all(own):
                _adopt_new(unit, index, info)


def _is_behind_another(module: nn.Module, name: str) -> bool:
    """Return whether a utility of torch (a parametrization, weight_norm, prune) computes this
    parameter from other parameters of the module.
    """
    made = (f"{name}{ending}" for ending in ("_orig", "_g"))
    return parametrize.is_parametrized(module, name) or any(n in module._parameters for n in made)


def _adopt_new(unit: Any, index: int, info: Any) -> None:
    found = [module._parameters.get(name) for module, name in info.sites]
    own = (info.param, unit.released[index], unit.full[index])
    changed = [param for param in found if not any(param is one for one in own)]
    if not changed:
        return
    what = f"parameter {info.name!r} of unit {unit.name!r}"
    rank = this_rank(unit.groups.shard)
    if any(param is None for param in found):
        way = "delete or replace parameters before wrapping, or keep the parameter and freeze it"
        if any(_is_behind_another(*site) for site in info.sites):
            way = (
                "a parametrization, weight_norm or prune was applied to it after wrapping; apply "
                "them before wrapping, or remove them again"
            )
        raise _C.StateError(f"{what} is no longer registered in its module on rank {rank}: {way}")
    new: Any = changed[0]
    if any(param is not new for param in (changed if unit.dtensors else found)):
        new = _one_of(unit, changed, what)
    owner = owner_of(new)
    if owner is not None:
        raise ValueError(
            f"{what} was replaced by a parameter of unit {owner.name!r} on rank {rank}: tie "
            "parameters before wrapping, in one unit"
        )
    refuse_lending(what)
    new = unit.replacement(index, new, what)
    for module, name in info.sites:
        module._parameters[name] = new
        if any(module.__dict__.get(name) is param for param in changed):
            del module.__dict__[name]  # the attribute would hide the registered parameter
    _, grad, covers = unit.optim_params[index]
    info.param.grad = new.grad = None
    unit.optim_params[index] = (new, grad, covers)
    unit.released[index]._fsdpc_sharded = new
    unit.flat.replace_param(index, new)
    set_owner(new, unit)
    info.param = new


def refuse_unread(unit: Any) -> None:
    """Raise an error if the user has replaced a flat parameter, or an original parameter that a
    flat parameter covers, because no pass would read the new tensor. The error is
    ``NotImplementedError`` inside ``functional_call``, else ``StateError``. Local.
    """
    for index, (table, key) in unit.flat_places.items():
        if table.get(key) is not unit.flat_params[index]:
            way = "copy values into it (param.data.copy_(values)) instead"
            _refuse_unread(unit, f"flat parameter {key!r}", way)
    if unit.flat.readable:  # in a pass, which computes with the tensors in the modules
        return
    for index, info in enumerate(unit.infos):
        for module, name in info.sites:
            shown = module.__dict__.get(name, module._parameters.get(name))
            if shown is not unit.full[index] and shown is not unit.released[index]:
                way = "write values inside summon_full_params, or wrap with use_orig_params=True"
                _refuse_unread(unit, f"parameter {info.name!r}", way)


def _refuse_unread(unit: Any, which: str, way: str) -> None:
    what = f"{which} of unit {unit.name!r}"
    refuse_lending(what)
    raise _C.StateError(
        f"{what} was replaced after wrapping, on rank {this_rank(unit.groups.shard)}, and no step "
        f"would read the new tensor: {way}"
    )


def refuse_lending(what: str) -> None:
    """Raise ``NotImplementedError`` inside ``torch.func.functional_call``. The error's text begins
    with ``what``. Local.
    """
    if _in_functional_call():
        raise NotImplementedError(
            f"{what}: torch.func.functional_call cannot lend values to a sharded module, which "
            "computes with its own shards in forward and in backward; copy values into the "
            "parameters, or call functional_call on the unsharded module"
        )


def _one_of(unit: Any, changed: list[Any], what: str) -> Any:
    """Return one of the new Parameters that are registered under a tied parameter's names. A load
    with ``assign=True`` makes a Parameter with equal values for each name. ``NotImplementedError``:
    the values differ, or the unit's parameters are not DTensors.
    """
    made = [param for param in changed if not param.is_meta] or changed
    if unit.dtensors and all(_equal(unit.local(param), unit.local(made[0])) for param in made):
        return made[0]
    raise NotImplementedError(
        f"Changing shared parameters is not supported yet: {what} is tied, but its modules hold "
        "different new Parameters; assign the same Parameter in all of them"
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta or one.data_ptr() == other.data_ptr():
        return one.shape == other.shape
    return torch.equal(one.to(other), other)


def _in_functional_call() -> bool:
    """Return whether ``functional_call`` is running. ``functional_call`` replaces parameters until
    it ends, and only the call stack tells such a replacement from a permanent one.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@torch.no_grad()
def leave_kept(unit: Any) -> None:
    """Give new memory to each gradient tensor that is no longer its parameter's ``.grad``. The
    program has kept some of these tensors. In the unit's memory, the next backward would overwrite
    their values. Local.
    """
    for index, (param, grad, _) in enumerate(unit.optim_params):
        if grad is not None and param.grad is not grad:
            local = unit.local(grad)
            local.data = local.clone()
            _renew(unit, index)
    unit.announce_grads()


@torch.inference_mode(False)  # called in a first forward, which may be in inference mode
def renew_grads(unit: Any) -> None:
    """Make new gradient tensors after the memory of gradients has moved. At that time no ``.grad``
    refers to the old tensors. Local.
    """
    for index, (_, grad, _) in enumerate(unit.optim_params):
        if grad is not None:
            _renew(unit, index)
    unit.announce_grads()


def _renew(unit: Any, index: int) -> None:
    param, _, covers = unit.optim_params[index]
    fresh = unit.fresh_grad(index)
    unit.optim_params[index] = (param, fresh, covers)
    unit.flat.replace_grad(index, fresh)


def viewed(unit: Any) -> bool:
    """Return whether the program has tensors of its own over the memory of the gradients. Local."""
    return any(_has_views(unit.local(grad)) for _, grad, _ in unit.optim_params if grad is not None)


def grads_free(unit: Any) -> bool:
    """Return whether only the engine refers to the memory of the unit's gradients. Local."""
    return not unit.flat.grads_kept and not viewed(unit)


def _has_views(grad: torch.Tensor) -> bool:
    storage = grad.untyped_storage()
    # The storage's users are the tensor, the tensor's base if there is one, the engine's alias
    # (csrc/py/unit/py_flat.h) and `storage`.
    own = 3 + (grad._base is not None)
    return storage_use_count(storage) > own


@torch.no_grad()
def _write(unit: Any, index: int, value: torch.Tensor) -> None:
    """Copy new values of ``unit.optim_params[index]`` into the shard."""
    view, (_, _, covers) = unit.views[index], unit.optim_params[index]
    if value.shape == view.shape:
        view.copy_(value)
        return
    if unit.use_orig_params and value.shape == unit.shapes[index]:
        unit.flat.write(index, value.to(unit.device, unit.dtypes[index]).contiguous())
        return
    raise RuntimeError(
        "Cannot writeback when the parameter shape changes\n"
        f"Expects {view.shape} but got {value.shape}: parameter {unit.infos[covers[0]].name!r} of "
        f"unit {unit.name!r} on rank {this_rank(unit.groups.shard)}"
    )
