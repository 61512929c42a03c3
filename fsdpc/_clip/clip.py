"""Global gradient norm and clipping over sharded, replicated and unmanaged gradients.

Each rank sums over its shard in fp64, and one small all-reduce per sharding group adds the ranks'
sums. Replicas hold equal gradients, so each gradient is counted once. On a GPU, ``device.py``
computes the norm without a host sync, except in the cases that ``tree_for`` excludes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch

from fsdpc._clip.device import norm_and_factor, scaling_of, tree_for
from fsdpc._clip.norm import combine_of, root_of, sums_of_units, tensor_sum
from fsdpc._clip.torch_utils import check_not_stepped

# For each unit: a mask with one byte per parameter, non-zero if the parameter has a gradient.
Masks = dict[Any, bytes]


def clip_grad_norm(root: Any, units: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
    """Implement ``clip_grad_norm_`` of the wrapper class. Collective over the sharding groups."""
    check_not_stepped(units)
    max_norm, norm_type = float(max_norm), float(norm_type)
    others = list(_unmanaged_grads(root, units))
    dtypes = [grad.dtype for grad in _all_grads(units, others)]
    tree = None if _spread_elsewhere(root, units) else tree_for(units, norm_type)
    with scaling_of(units) as masks:
        if tree is None:
            total = _clip_on_host(root, masks, others, max_norm, norm_type)
        else:
            total = norm_and_factor(tree, masks, others, norm_type, max_norm, scale=True)[0]
    if not dtypes and float(total) != 0.0:  # only other ranks hold elements with gradients
        dtypes = list(_dtypes_elsewhere(units))
    if not dtypes:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {root.rank} with no gradients -- returning "
            "the total norm in the default dtype torch.float32",
            stacklevel=4,
        )
        return total.to(torch.float32)
    return total.to(reduce(torch.promote_types, dtypes))


def _clip_on_host(
    root: Any, masks: Masks, others: list[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    total = root_of(_global_sum(masks, others, norm_type), norm_type)
    factor = _clip_factor(total, max_norm)
    if factor != 1.0:  # a factor of NaN must reach the gradients, too, as in torch
        _scale(masks, others, factor)
    return torch.tensor(total, dtype=torch.float64, device=root.compute_device)


def _clip_factor(total: float, max_norm: float) -> float:
    factor = max_norm / (total + 1e-6)
    return factor if math.isnan(factor) else min(factor, 1.0)


def _global_sum(masks: Masks, others: list[torch.Tensor], norm_type: float) -> float:
    """Return the sum of |g|^p over all gradient elements of the model; for p = inf, max |g|."""
    combine = combine_of(norm_type)
    own = combine(tensor_sum(grad, norm_type) for grad in others)
    parts = sums_of_units(
        masks,
        lambda unit: unit.grad_norm_sums(masks[unit], norm_type),
        norm_type,
        "clip_grad_norm_",
    )
    return combine([own, *parts])


def _unmanaged(root: Any, units: list[Any]) -> Iterator[torch.Tensor]:
    managed = {id(param) for unit in units for param in unit.shard_params}
    return (param for param in root.parameters() if id(param) not in managed)


def _unmanaged_grads(root: Any, units: list[Any]) -> Iterator[torch.Tensor]:
    return (param.grad for param in _unmanaged(root, units) if param.grad is not None)


def _spread_elsewhere(root: Any, units: list[Any]) -> bool:
    """Whether a parameter that no unit manages is sharded by other means, as a DTensor."""
    return any(hasattr(param, "full_tensor") for param in _unmanaged(root, units))


def _all_grads(units: list[Any], others: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from others
    for unit in units:
        for param in unit.shard_params:
            if param.grad is not None:
                yield param.grad


def _dtypes_elsewhere(units: list[Any]) -> Iterator[torch.dtype]:
    for unit in units:
        for param, grad, _ in unit.optim_params:
            if grad is not None and unit.holds_nothing(param):
                yield grad.dtype


def _scale(masks: Masks, others: list[torch.Tensor], factor: float) -> None:
    for unit, mask in masks.items():
        unit.flat.scale_grads(mask, factor)
    for grad in others:
        grad.mul_(factor)
