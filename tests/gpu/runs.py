"""A small model, its data, and training runs that the tests here compare."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Block, Toy

STEPS, BATCH, LENGTH, WIDTH, VOCABULARY = 4, 3, 5, 24, 13

# On a GPU, two equal runs may differ: the addresses of a matrix product's operands determine the
# algorithm of the product, and therefore its roundings.
LEAST_TOLERANCE = 0.0 if os.environ.get("FSDPC_LIBCUDA") else 2e-5


def model(device: torch.device, dtype: torch.dtype = torch.float32, blocks: int = 3) -> Toy:
    """A model, with the same weights each time."""
    torch.manual_seed(0)
    return Toy(blocks=blocks, width=WIDTH, vocabulary=VOCABULARY).to(device, dtype)


def batch(device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets that depend on nothing but the step."""
    rng = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=rng).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(module: nn.Module, device: torch.device, step: int) -> Tensor:
    """Cross entropy in fp32 on the step's batch."""
    inputs, targets = batch(device, step)
    return F.cross_entropy(module(inputs).float().flatten(0, 1), targets.flatten())


def wrap(module: nn.Module, device: torch.device, library: str = "fsdpc", **options: Any) -> Any:
    """Wrap with fsdpc, or with torch's FSDP1 (library="torch"). Each block is a unit, and the rest
    is one unit."""
    if library == "torch":
        from torch.distributed import fsdp as library_module
        from torch.distributed.fsdp import wrap as policies
    else:
        import fsdpc as library_module
        from fsdpc import wrap as policies
    policy = functools.partial(policies.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return library_module.FullyShardedDataParallel(
        module,
        **{
            "auto_wrap_policy": policy,
            "device_id": device,
            "use_orig_params": True,
            **options,
        },
    )


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(
    module: nn.Module,
    device: torch.device,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    micro: int = 1,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
    before_step: Callable[[nn.Module], object] = lambda module: None,
    steps: Sequence[int] = range(STEPS),
) -> list[float]:
    """Train and return the losses. Each step sums the gradients of `micro` backwards, of which all
    but the last run in no_sync()."""
    optimizer = optimizer or adamw(module)
    losses = []
    for step in steps:
        for k in range(micro):
            with nullcontext() if k == micro - 1 else no_sync():
                loss = loss_of(module, device, step * micro + k)
                loss.backward()
        losses.append(loss.detach())
        before_step(module)
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


def close(got: Sequence[float], want: Sequence[float], tolerance: float = 1e-6) -> None:
    """Compare losses, with a relative and absolute tolerance."""
    tolerance = max(tolerance, LEAST_TOLERANCE)
    torch.testing.assert_close(
        torch.tensor(got), torch.tensor(want), rtol=tolerance, atol=tolerance, equal_nan=False
    )
