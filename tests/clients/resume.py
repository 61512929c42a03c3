"""What resuming from accelerate's SHARDED checkpoints needs."""

from __future__ import annotations

import torch


def with_state(optimizer: torch.optim.Optimizer) -> None:
    """accelerate reads a SHARDED optimizer into the state that the optimizer has. A new one has
    none and, over torch's FSDP too, silently gets none: so a step of nothing comes first.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
