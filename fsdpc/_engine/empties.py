"""Buffers that ``to_empty`` has made and nobody has written.

A model that is made on the meta device and filled from a checkpoint has its parameters from there,
and buffers that are not persistent (rotary frequencies, position numbers) from nowhere:
``to_empty`` fills these with NaN, or an extreme number, so that they can be told from values.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_MARK = "_fsdpc_empty"
_real_to_empty = nn.Module.to_empty


@functools.wraps(_real_to_empty)
def _to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    result = _real_to_empty(self, device=device, recurse=recurse)
    for module in self.modules() if recurse else [self]:
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None:
                fill(buffer)
    return result


nn.Module.to_empty = _to_empty  # type: ignore[method-assign]


def is_unwritten(buffer: Tensor) -> bool:
    """True for a buffer without values: on the meta device, or as ``to_empty`` has left it. Local;
    waits for a GPU only where ``to_empty`` has made the buffer and no kernel has written it.
    """
    if buffer.is_meta:
        return True
    mark = getattr(buffer, _MARK, None)
    if mark is None:
        return False
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    value = _filling(local.dtype)
    if value != value:  # a program hardly writes NaN everywhere
        return bool(local.isnan().all())
    return mark == buffer._version and bool((local == value).all())


@torch.no_grad()
def fill(buffer: Tensor) -> None:
    """Mark a buffer that has memory as unwritten. Local."""
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    if not local.is_meta and local.numel():
        local.fill_(_filling(local.dtype))
        setattr(buffer, _MARK, buffer._version)


def _filling(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    info = torch.iinfo(dtype)
    return info.min or info.max
