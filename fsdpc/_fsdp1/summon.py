"""``summon_full_params``, and the registration of full parameters for state dicts and conversions.

A summoned unit registers private full copies in original shapes under clean names. Users never
write to the gathered slot that ranks share. With ``use_orig_params=True`` the user's Parameter
objects get the full values, so that flags, attributes and optimizer state stay attached. Each site
may have another Parameter on exit, because the user may register one. The values of the Parameters
that the sites have on exit are written back to the shard or dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdpc._comm.channel import this_rank
from fsdpc._engine.device import CPU
from fsdpc._engine.inputs import preparation
from fsdpc._engine.lowbit import check_same_state
from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.names import flat_param_name

Tensors = list[torch.Tensor]
OwnObject = Any  # an item of Unit.own_objects()


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """See ``FullyShardedDataParallel.summon_full_params``. Collective over the sharding groups on
    entry.
    """
    check_arguments(writeback, rank0_only, offload_to_cpu)
    members = unit_modules(module) if recurse else [module] * is_unit_module(module)
    for member in members:
        _check_free(member)
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(
                summon_one(member, writeback, rank0_only, with_grads, offload_to_cpu)
            )
        yield


def check_arguments(writeback: bool, rank0_only: bool, offload_to_cpu: bool) -> None:
    """Raise or warn if torch raises or warns for this combination of arguments. Local."""
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback=True and rank0_only=True is not supported yet: the other ranks have no full "
            "parameters to write back; pass writeback=False to read on rank 0, or "
            "rank0_only=False to write"
        )
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in the unsharded parameters "
            "being redundantly copied to CPU memory for GPUs sharing the same CPU memory, which "
            "risks CPU OOM. We recommend using offload_to_cpu=True with rank0_only=True.",
            stacklevel=4,
        )


def check_idle(member: Any) -> None:
    """Raise torch's ``AssertionError`` if ``member`` is in forward or in backward, or is summoned
    already. Local.
    """
    unit = member._unit
    if unit is not None and unit.state in ("forward", "backward"):
        raise AssertionError(
            "Cannot manually unshard parameters during forward/backward: "
            f"unit {unit.name!r} is in {unit.state} on rank {this_rank(unit.groups.shard)}"
        )
    if member._summoned:
        name = "root" if unit is None else unit.name
        raise AssertionError(
            f"Cannot manually unshard parameters when already unsharding parameters: unit {name!r}"
        )


def _check_free(member: Any) -> None:
    """Raise torch's ``AssertionError`` for a unit that is summoned already or that a forward or
    backward uses. Local.
    """
    unit = member._unit
    if member._summoned or (unit is not None and unit.flat.in_use):
        check_idle(member)


@contextmanager
def summon_one(
    member: Any,
    writeback: bool,
    rank0_only: bool,
    with_grads: bool,
    offload: bool = False,
) -> Iterator[None]:
    """Summon the full parameters of one FSDP instance, without those of nested instances.
    Collective on entry.
    """
    unit = member._unit
    if unit is None:
        with _flagged(member, rank0_only):
            yield
        return
    shows = not rank0_only or member.rank == 0
    to = CPU if offload else None
    full = unit.gather_full(to) if shows else unit.attend_gather()
    grads = unit.gather_full_grads(to) if with_grads else None
    with _flagged(member, rank0_only):
        if full is None:
            yield
            return
        # During a pass other ranks may have gathered the unit already, so values must not change.
        frozen = unit.state in ("forward", "backward")
        before = [tensor.clone() for tensor in full] if frozen else []
        own = unit.own_objects() if unit.use_orig_params else None
        written: list[torch.Tensor | None] | None = None
        install(member, full, grads, own)
        try:
            yield
            if frozen and writeback:
                _check_unchanged(unit, before)
            elif writeback or not unit.is_sharded:
                write_back(unit)
                written = [p.grad for p in site_params(unit)] if with_grads else None
        finally:
            if own is not None:
                _take_flags(unit)
                unit.put_own_back(own)
            uninstall(member)
        if written is not None:
            unit.scatter_full_grads(written)


def _take_flags(unit: Any) -> None:
    """Copy ``requires_grad`` from each Parameter that the user registered inside the context to the
    unit's parameter.
    """
    for info, shown in zip(unit.infos, site_params(unit), strict=True):
        if shown is not None and shown is not info.param:
            info.param.requires_grad_(shown.requires_grad)


def _check_unchanged(unit: Any, before: Tensors) -> None:
    for info, old, new in zip(unit.infos, before, site_params(unit), strict=True):
        same = new is not None and new.shape == old.shape and new.dtype == old.dtype
        if not same or not torch.equal(_bits(new.detach()), _bits(old)):
            raise AssertionError(
                f"parameter {info.name!r} of unit {unit.name!r} was changed inside "
                "summon_full_params during a forward or backward on rank "
                f"{unit.groups.shard.rank}, but other ranks may already use the old values: change "
                "the parameter between steps, or pass writeback=False to drop the change"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def forward(member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a summoned instance on the full parameters, with the user's changes and
    without the engine.
    """
    mixed = member.mixed_precision
    dtype = mixed.param_dtype
    wanted = mixed.cast_forward_inputs or (member._is_root and mixed.cast_root_forward_inputs)
    prepare = preparation(
        member.compute_device if member._is_root else None, dtype if wanted else None
    )
    if prepare is not None:
        args, kwargs = prepare(args, kwargs)
    with _lowered(member._unit, dtype):
        return member._fsdp_wrapped_module(*args, **kwargs)


@contextmanager
def _lowered(unit: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the context, cast the unit's full parameters to the compute dtype ``dtype``."""
    if unit is None or dtype is None:
        yield
        return
    shown = site_params(unit)
    for info, param, carried in zip(unit.infos, shown, unit.carried, strict=True):
        if not carried:
            info.register(nn.Parameter(param.detach().to(dtype), requires_grad=False))
    try:
        yield
    finally:
        for info, param in zip(unit.infos, shown, strict=True):
            info.register(param)


@contextmanager
def _flagged(member: Any, rank0_only: bool) -> Iterator[None]:
    member._summoned = True
    member._summoned_on_rank_0 = rank0_only
    try:
        yield
    finally:
        member._summoned = member._summoned_on_rank_0 = False


def install(
    member: Any,
    full: Tensors,
    grads: list[torch.Tensor | None] | None = None,
    own: list[OwnObject] | None = None,
) -> None:
    """Register ``full`` (and ``grads``) at the unit's sites in place of the sharded parameters. If
    ``own`` is given, the user's Parameter objects get the values ``full``; otherwise new Parameters
    are registered. Local.
    """
    unit = member._unit
    hide_flat_params(member)
    if own is None:
        unit.install_full(full)
        shown = site_params(unit)
        for param, _, covers in unit.optim_params:
            for i in covers:
                shown[i].requires_grad_(param.requires_grad)
    else:
        unit.show_own(full)
    if grads is not None:
        for param, grad in zip(site_params(unit), grads, strict=True):
            param.grad = grad


def uninstall(member: Any) -> None:
    """Register the sharded parameters again. Local."""
    member._unit.install_sharded()
    show_flat_params(member)


def expose(member: Any, values: Tensors) -> None:
    """Register ``values`` for modules to save or load, until ``conceal`` is called. Local."""
    install(member, values)
    member._exposed = True


def conceal(member: Any) -> bool:
    """Undo ``expose``; return False if there is nothing to undo. Local."""
    exposed, member._exposed = member._exposed, False
    if exposed:
        uninstall(member)
    return exposed


def site_params(unit: Any) -> list[Any]:
    """Return the values registered at each parameter's first site. Local."""
    return [info.sites[0][0]._parameters[info.sites[0][1]] for info in unit.infos]


def write_back(unit: Any) -> None:
    """Copy the values registered at the sites into this rank's shard. Local.

    ``ValueError``: a parameter was deleted or changed its shape.
    """
    params = site_params(unit)
    for info, shape, param in zip(unit.infos, unit.shapes, params, strict=True):
        if param is None or param.shape != shape:
            found = "None" if param is None else list(param.shape)
            raise ValueError(
                f"parameter {info.name!r} of unit {unit.name!r} has shape {found} after "
                f"summon_full_params, expected {list(shape)}: a sharded parameter cannot change "
                "its shape"
            )
    for info, param in zip(unit.infos, params, strict=True):
        check_same_state(info.param, param, f"parameter {info.name!r} of unit {unit.name!r}")
    unit.scatter_full(params)


def flat_owner(member: Any) -> nn.Module:
    """Return the module on which a unit's flat parameters are registered: the wrapped module or, if
    that is an activation wrapper, the module inside the activation wrapper. The module is fixed at
    the first call, so that wrappers inserted later (checkpointing, torch.compile) change nothing.
    """
    owner: nn.Module | None = member.__dict__.get("_flat_owner")
    if owner is None:
        owner = member.__dict__["_flat_owner"] = member.module
    return owner


def show_flat_params(member: Any) -> None:
    """Register the unit's flat parameters (``use_orig_params=False``), for optimizers. Local."""
    owner = flat_owner(member)
    for index, param in enumerate(member._unit.flat_params):
        key = flat_param_name(index)
        owner._parameters[key] = param
        member._unit.place_flat_param(index, owner._parameters, key)


def hide_flat_params(member: Any) -> None:
    """Unregister the flat parameters, because original parameters are registered now. Local."""
    owner = flat_owner(member)
    for index in range(len(member._unit.flat_params)):
        owner._parameters.pop(flat_param_name(index), None)
