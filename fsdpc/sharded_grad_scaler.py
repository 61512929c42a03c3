"""Loss scaling for sharded models: torch's ``torch.distributed.fsdp.sharded_grad_scaler``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from fsdpc._comm.bootstrap import comm_for_host

__all__ = ["ShardedGradScaler"]

Outputs = torch.Tensor | Iterable[torch.Tensor]


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` whose ranks agree: infinities or NaN in any rank's shard skip the
    step, and lower the scale, on every rank of ``process_group`` (default: all ranks).

    ``unscale_``, and ``step`` without one before it, are collective. Same names and defaults as
    torch's, but for ``device``: ``None`` is the accelerator, or the CPU where there is none.
    Optimizers that look at infinities themselves (``fused=True``) are told all ranks', too.
    Gradients may be of any floating dtype. Without ``torch.distributed`` it is a local scaler.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            _default_device() if device is None else device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Outputs) -> Any:
        """``outputs`` (a tensor, or nested iterables of tensors) times the scale, each in its own
        dtype: the loss of a model in half precision stays in half precision. Local.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        if not found:  # this rank's optimizer has no gradients
            found = {found_inf.device: found_inf}
        if dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
            agree = _agree_on_host if found_inf.device.type == "cpu" else _agree_on_device
            agree(group, list(found.values()), found_inf.device)
        return found


def _agree_on_host(group: Any, found: list[torch.Tensor], device: torch.device) -> None:
    comm = comm_for_host(group)
    worst = np.array([max(float(value) for value in found)], dtype=np.float32)
    comm.all_reduce(worst, op="max", what="infinities found by ShardedGradScaler")
    for value in found:
        value.fill_(float(worst[0]))


def _agree_on_device(group: Any, found: list[torch.Tensor], device: torch.device) -> None:
    """By the process group itself, as torch does: on a GPU the host waits for nothing but the flags
    of offloaded gradients, which it is to read.
    """
    worst = torch.stack([value.to(device, non_blocking=True) for value in found]).amax(dim=0)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    for value in found:
        value.copy_(worst)


def _default_device() -> str:
    if not torch.accelerator.is_available():  # a build for one may run without its driver
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type
