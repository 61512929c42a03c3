"""FSDP_USE_FULL_PREC_IN_EVAL=1: modules in eval mode compute in the parameters' own dtypes.

The engine gathers in ``param_dtype`` alone, so such a forward runs on private full copies, one unit
(and those around it) at a time: a unit's size in its storage dtype on each rank, beside the slots
that all ranks share. Inputs are not cast, and buffers have the dtypes that they had before mixed
precision. As with every gathering of whole values all ranks must run the same units. What such a
forward leaves for a backward has no way into the shards, and raises there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdpc._engine.inputs import preparation
from fsdpc._fsdp1.collect import owned_modules, unit_modules
from fsdpc._fsdp1.names import join
from fsdpc._fsdp1.root import lazy_init
from fsdpc._fsdp1.summon import install, site_params, uninstall


def asked() -> bool:
    """What the environment says when a model is wrapped."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


def applies(member: Any) -> bool:
    """Whether a forward of ``member`` is to be in full precision: it, or the model around it, has a
    ``param_dtype``, and it is no part of another one's training pass, whose values come in low
    precision. Asked of modules in eval mode, where the environment says so.
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
    """The forward of one instance. Collective over the sharding group."""
    prepare = preparation(member.compute_device if member._is_root else None, None)
    if prepare is not None:
        args, kwargs = prepare(args, kwargs)
    with _full_parameters(member), _full_buffers(member):
        return member._fsdp_wrapped_module(*args, **kwargs)


@contextmanager
def _full_parameters(member: Any) -> Iterator[None]:
    unit = member._unit
    if unit is None or unit.summoned:  # a module that calls itself
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
    """The unit's own buffers in the dtypes that they had before mixed precision cast them."""
    low = member.mixed_precision.buffer_dtype
    cast = []
    if low is not None and member._buffer_dtypes:
        root, ignored = member._fsdp_wrapped_module, member._ignored.modules
        for place, module in owned_modules(root, ignored, shared_twice=True):
            for name, buffer in module._buffers.items():
                dtype = member._buffer_dtypes.get(join(place, name))
                if buffer is not None and dtype is not None and buffer.dtype == low:
                    buffer.data = buffer.to(dtype)
                    cast.append(buffer)
    try:
        yield
    finally:
        for buffer in cast:
            buffer.data = buffer.to(low)
