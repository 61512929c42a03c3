"""Loss scaling for sharded models, as ``torch.distributed.fsdp.sharded_grad_scaler``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from fsdpc import _C
from fsdpc._comm.bootstrap import comm_for_host
from fsdpc._engine.device import stand_in

__all__ = ["ShardedGradScaler"]

Outputs = torch.Tensor | Iterable[torch.Tensor]


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` for sharded gradients. If any rank's shard of a gradient has an
    infinity or NaN, every rank of ``process_group`` (default: all ranks) skips the step and lowers
    the scale.

    ``unscale_`` is collective. ``step`` is collective if ``unscale_`` was not called before. Names
    and defaults are those of ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``,
    except ``device``: ``None`` means the accelerator, or the CPU if there is no accelerator. The
    ``found_inf`` that fused optimizers (``fused=True``) get is also that of all ranks. Gradients
    may have any floating dtype. If ``torch.distributed`` is not initialized, the scaler is local.
    """

    _stepping: torch.optim.Optimizer | None = None  # the optimizer of the current ``step``

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
        """Return ``outputs`` (a tensor of any shape, or nested iterables of tensors) times the
        scale. Every tensor keeps its dtype, so that a half-precision loss stays in half precision.
        Local. ``ValueError``: ``outputs`` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer as torch's ``GradScaler.step`` does. An optimizer of ``fsdpc.optim``
        whose gradients are in host memory looks for infinities itself. With ``max_norm``,
        it looks for them while it computes the norm. Collective.
        """
        self._stepping = optimizer
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self._stepping = None
            if hasattr(optimizer, "leave_check"):
                optimizer.leave_check(None)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        group = None
        if dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
        if self._stepping is optimizer and hasattr(optimizer, "leave_check"):
            agree = partial(_agree, group, [found_inf], found_inf.device)
            if optimizer.leave_check(found_inf, agree):
                return {found_inf.device: found_inf}
        found: dict[torch.device, torch.Tensor] = {}
        if not (found_inf.is_cpu and float(inv_scale) == 1.0 and _are_finite(optimizer)):
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        if not found:  # all gradients on the host are finite, or there are none
            found = {found_inf.device: found_inf}
        _agree(group, list(found.values()), found_inf.device)
        return found


def _are_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if all gradients are in host memory and finite. If False, torch's check must
    decide. Torch's check also writes to each gradient.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    held = [grad for grad in grads if grad is not None]
    if stand_in() or not all(type(grad) is torch.Tensor and grad.is_cpu for grad in held):
        return False
    try:
        return math.isfinite(_C.optim_sum_squares(held, torch.get_num_threads()))
    except (BufferError, ValueError):  # a gradient is sparse or not contiguous
        return False


def _agree(group: Any, found: list[torch.Tensor], device: torch.device) -> None:
    if group is not None:
        (_agree_on_host if device.type == "cpu" else _agree_on_device)(group, found, device)


def _agree_on_host(group: Any, found: list[torch.Tensor], device: torch.device) -> None:
    comm = comm_for_host(group)
    worst = np.array([max(float(value) for value in found)], dtype=np.float32)
    comm.all_reduce(worst, op="max", what="infinities found by ShardedGradScaler")
    for value in found:
        value.fill_(float(worst[0]))


def _agree_on_device(group: Any, found: list[torch.Tensor], device: torch.device) -> None:
    """Combine the flags by one all-reduce of the process group, as in torch. The host waits for the
    GPU only to copy the result to the flag of offloaded gradients, which is in host memory.
    """
    worst = torch.stack([value.to(device, non_blocking=True) for value in found]).amax(dim=0)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    for value in found:
        value.copy_(worst)


def _default_device() -> str:
    if not torch.accelerator.is_available():  # for example a CUDA build without a driver
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type
