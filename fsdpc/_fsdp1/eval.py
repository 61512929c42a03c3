"""FSDP_USE_FULL_PREC_IN_EVAL=1: modules in eval mode compute in the parameters' storage dtypes.

The engine gathers in ``param_dtype`` only. A forward in full precision therefore runs on private
full copies. The copies of a unit exist during the unit's forward. Each rank needs memory for these
copies in the storage dtypes, in addition to the slots that all ranks share. Inputs are not cast,
and buffers have their dtypes from before mixed precision. All ranks must run the same units. A
backward through such a forward raises, because the gradients of the copies cannot reach the shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdpc._engine.inputs import preparation
from fsdpc._engine.root import lazy_init
from fsdpc._fsdp1.collect import owned_modules, unit_modules
from fsdpc._fsdp1.names import join
from fsdpc._fsdp1.summon import install, site_params, uninstall


def asked() -> bool:
    """Return whether FSDP_USE_FULL_PREC_IN_EVAL is "1". Called when a module is wrapped. Local."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


def applies(member: Any) -> bool:
    """Return whether a forward of ``member`` runs in full precision. ``member`` is in eval mode,
    and FSDP_USE_FULL_PREC_IN_EVAL is set. The forward does so if an instance in the model has a
    ``param_dtype``, with two exceptions: ``member`` is summoned, or a training pass of the root is
    in progress, which has cast its inputs to low precision. Local.
    """
    if member._summoned:
        return False
    lazy_init(member)
    root = None if member._root is None else member._root()
    if root is not None and root.training and root._tree is not None:
        if root._tree.training_state != "idle":
            return False
    members = unit_modules(member if root is None else root)
    return any(other.mixed_precision.param_dtype is not None for other in members)


def forward(member: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one instance's forward on full-precision copies. Collective over the sharding group."""
    prepare = preparation(member.compute_device if member._is_root else None, None)
    if prepare is not None:
        args, kwargs = prepare(args, kwargs)
    with _full_parameters(member), _full_buffers(member):
        return member._fsdp_wrapped_module(*args, **kwargs)


@contextmanager
def _full_parameters(member: Any) -> Iterator[None]:
    unit = member._unit
    if unit is None or unit.summoned:  # the unit is summoned if a module calls itself
        yield
        return
    install(member, unit.gather_full())
    for info, param in zip(unit.infos, site_params(unit), strict=True):
        if param.requires_grad and torch.is_grad_enabled():
            param.register_hook(partial(_refuse, unit.name, info.name))
    try:
        yield
    finally:
        uninstall(member)


def _refuse(unit: str, name: str, grad: torch.Tensor) -> None:
    raise RuntimeError(
        f"backward through parameter {name!r} of unit {unit!r}, whose forward ran in eval mode "
        "with FSDP_USE_FULL_PREC_IN_EVAL=1: call train() before a forward that needs a backward, "
        "freeze the parameter, or unset the variable"
    )


@contextmanager
def _full_buffers(member: Any) -> Iterator[None]:
    """Inside the context, give the unit's buffers the dtypes from before mixed precision."""
    low = member.mixed_precision.buffer_dtype
    cast = []
    if low is not None and member._buffer_dtypes:
        root, ignored = member._fsdp_wrapped_module, member._ignored.modules
        for path, module in owned_modules(root, ignored, shared_twice=True):
            for name, buffer in module._buffers.items():
                dtype = member._buffer_dtypes.get(join(path, name))
                if buffer is not None and dtype is not None and buffer.dtype == low:
                    buffer.data = buffer.to(dtype)
                    cast.append(buffer)
    try:
        yield
    finally:
        for buffer in cast:
            buffer.data = buffer.to(low)
