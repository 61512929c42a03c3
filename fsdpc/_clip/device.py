"""Norm and clipping on a GPU, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fsdpc._clip.norm import powers_of


def tree_for(units: list[Any], norm_type: float) -> Any:
    """The tree that computes the norm of these units' gradients on the device; None if the host
    must compute it. Equal on all ranks. Local.
    """
    if not units or not norm_type > 0:
        return None
    tree = units[0].tree
    for unit in units:
        on_device = unit.groups.shard.device is not None and not unit.flat.offloaded
        if not on_device or unit.tree is None or unit.tree is not tree:
            return None
    return tree


@contextmanager
def scaling_of(units: list[Any]) -> Iterator[dict[Any, bytes]]:
    """``adopted_grads`` of several units at once; yields a mask for each unit. Local."""
    with ExitStack() as stack:
        yield {unit: stack.enter_context(unit.adopted_grads()) for unit in units}


def norm_and_factor(
    tree: Any,
    masks: dict[Any, bytes],
    others: list[torch.Tensor],
    norm_type: float,
    max_norm: float,
    *,
    scale: bool,
) -> torch.Tensor:
    """A float64 tensor of shape (2,) on the device: the norm of all ranks' gradients, and the
    clipping factor, applied to the gradients with ``scale``.

    ``masks[unit]``: which of the unit's parameters have a gradient; ``others``: gradients that
    every rank holds whole. Collective over the units' sharding groups.
    """
    device = tree.units[0].device
    out = torch.empty(2, dtype=torch.float64, device=device)
    extra = [_part(grad, norm_type).to(device, non_blocking=True) for grad in others]
    tree.core.clip(
        tuple(masks.get(unit) for unit in tree.units),
        norm_type,
        max_norm,
        out,
        torch.stack(extra) if extra else None,
        scale,
    )
    if scale:
        for grad in others:
            grad.mul_(out[1].to(grad.device))
    return out


def _part(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The engine's partial sums, float64 of shape (3,): sum of |x|^p, largest |x|, 0."""
    part = torch.zeros(3, dtype=torch.float64, device=grad.device)
    part[int(math.isinf(norm_type))] = powers_of(grad, norm_type)
    return part
