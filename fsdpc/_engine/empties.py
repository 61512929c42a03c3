"""Detection of buffers that ``Module.to_empty`` has made and no code has written since.

If a model is made on the meta device and filled from a checkpoint, its parameters come from the
checkpoint, but buffers that are not persistent (rotary frequencies, position numbers) get no
values. fsdpc lets ``to_empty`` fill such buffers with NaN, or with an extreme number, so that they
can be told from buffers with values.
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
    """Whether a buffer has no values: the buffer is on the meta device, or ``to_empty`` has made
    the buffer and no code has written to the buffer since.

    Local. The call waits for the GPU only if ``to_empty`` has made the buffer.
    """
    if buffer.is_meta:
        return True
    mark = getattr(buffer, _MARK, None)
    if mark is None:
        return False
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    value = _filling(local.dtype)
    if value != value:  # `value` is NaN, which programs hardly ever write to all elements
        return bool(local.isnan().all())
    return mark == buffer._version and bool((local == value).all())


@torch.no_grad()
def fill(buffer: Tensor) -> None:
    """Fill a buffer and mark it as unwritten; do nothing if it has no memory. Local."""
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
