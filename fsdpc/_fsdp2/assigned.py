"""Support for ``param.data = value`` and ``param.grad.data = value`` with DTensors on both sides.

torch changes only the DTensor's wrapper and keeps the old local tensor, so the assignment has no
effect. Here the local tensor of ``value`` replaces the old local tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdpc._engine.writeback import owner_of

_OURS = "_fsdpc_assignable"


def mark(grad: Any) -> Any:
    """Mark ``grad``, a gradient of a sharded parameter, as a tensor whose ``data`` may be assigned.
    Local.
    """
    grad.__dict__[_OURS] = True
    return grad


def install() -> None:
    """Let ``.data = value`` work for sharded parameters and gradients of this process. Local."""
    if "data" not in DTensor.__dict__:
        plain = torch.Tensor.data
        DTensor.data = property(plain.__get__, _put)


def _put(self: Any, value: torch.Tensor) -> None:
    if owner_of(self) is not None or _OURS in self.__dict__:
        if not isinstance(value, DTensor) or value.shape != self.shape:
            raise ValueError(
                f"data of a sharded tensor of shape {tuple(self.shape)} was set to a "
                f"{type(value).__name__} of shape {tuple(value.shape)}: assign a DTensor of its "
                "shape (torch.distributed.tensor.distribute_tensor), or copy values with copy_()"
            )
        if value.placements != self.placements or value.device_mesh != self.device_mesh:
            value = value.redistribute(self.device_mesh, self.placements)
        self._local_tensor = value._local_tensor.detach().to(self.dtype)
    else:
        torch.Tensor.data.__set__(self, value)
