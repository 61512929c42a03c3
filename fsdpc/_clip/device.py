"""Gradient norms and clipping on a GPU, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fsdpc._clip.norm import powers_of


def tree_for(units: list[Any], norm_type: float) -> Any:
    """Return the tree that computes the norm of these units' gradients on the device.

    None if the host must compute the norm. The choice is the same on all ranks. Local.
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
    """Enter ``unit.adopted_grads()`` for all units and yield ``{unit: mask}``. Local."""
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
    """Return a float64 tensor of shape (2,) on the device: the norm of all ranks' gradients, and
    the clipping factor. If ``scale`` is true, also multiply the gradients by the clipping factor.

    ``masks[unit]`` says which of the unit's parameters have a gradient. ``others`` are gradients
    that every rank holds in full. Collective over the units' sharding groups.
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
    """Return what the engine needs of a gradient: a float64 tensor (sum of |x|^p, largest |x|, 0).

    Only the entry that the norm needs is computed; the other entry is 0.
    """
    part = torch.zeros(3, dtype=torch.float64, device=grad.device)
    part[int(math.isinf(norm_type))] = powers_of(grad, norm_type)
    return part
