"""Global gradient norm and clipping over sharded, replicated and unmanaged gradients.

Sums are taken in double precision over each rank's own part, then over the sharding group; replicas
hold equal gradients and are counted once. One scalar per group travels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import torch

from fsdpc._root import tree_units


def clip_grad_norm(root: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """See ``FullyShardedDataParallel.clip_grad_norm_``. Collective over the sharding groups."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    units = tree_units(root)
    others = list(_unmanaged_grads(root, units))
    total = _root_of(_global_sum(units, others, norm_type), norm_type)
    dtypes = [grad.dtype for grad in _all_grads(units, others)]
    if not dtypes:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {root.rank} with no gradients -- returning "
            "the total norm in the default dtype torch.float32",
            stacklevel=4,
        )
        return torch.tensor(total, dtype=torch.float32)
    factor = _clip_factor(total, max_norm)
    if factor != 1.0:  # true for NaN as well, which must reach the gradients as it does in torch
        _scale(units, others, factor)
    return torch.tensor(total, dtype=reduce(torch.promote_types, dtypes))


def _clip_factor(total: float, max_norm: float) -> float:
    factor = max_norm / (total + 1e-6)
    return factor if math.isnan(factor) else min(factor, 1.0)


def _global_sum(units: list[Any], others: list[torch.Tensor], norm_type: float) -> float:
    """Sum of |g|^p over every gradient element of the model; the largest |g| for the inf norm."""
    combine = _combine(norm_type)
    total = combine(_tensor_sum(grad, norm_type) for grad in others)
    for comm, members in _by_comm(units):
        part = combine(unit.grad_norm_sums(norm_type) for unit in members)
        if comm.world > 1:
            part = _reduce_over_ranks(comm, part, "max" if math.isinf(norm_type) else "sum")
        total = combine([total, part])
    return total


def _reduce_over_ranks(comm: Any, part: float, op: str) -> float:
    """Sum or maximum over ranks. NaN travels as a flag: not every backend's maximum keeps it."""
    values = np.array([0.0 if math.isnan(part) else part, math.isnan(part)], dtype=np.float64)
    comm.all_reduce(values, op=op, what="clip_grad_norm_")
    return math.nan if values[1] else float(values[0])


def _by_comm(units: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Units grouped by sharding communicator, in module order, which is the same on every rank."""
    groups: dict[int, tuple[Any, list[Any]]] = {}
    for unit in units:
        comm = unit.groups.shard
        groups.setdefault(id(comm), (comm, []))[1].append(unit)
    return list(groups.values())


def _combine(norm_type: float) -> Any:
    """Sum, or a maximum that lets NaN through (Python's ``max`` would drop it by position)."""
    if not math.isinf(norm_type):
        return lambda values: float(sum(values))
    return lambda values: float(np.max(np.fromiter(values, dtype=np.float64), initial=0.0))


def _root_of(total: float, norm_type: float) -> float:
    if math.isinf(norm_type):
        return total
    if norm_type == 0:
        return total
    return float(np.float64(total) ** (1.0 / norm_type))


def _tensor_sum(grad: torch.Tensor, norm_type: float) -> float:
    grad = grad.detach().double().abs()
    if grad.numel() == 0:
        return 0.0
    if math.isinf(norm_type):
        return grad.max().item()
    return (grad != 0).sum().item() if norm_type == 0 else grad.pow(norm_type).sum().item()


def _unmanaged_grads(root: Any, units: list[Any]) -> Iterator[torch.Tensor]:
    managed = {id(param) for unit in units for param in unit.shard_params}
    for param in root.parameters():
        if id(param) not in managed and param.grad is not None:
            yield param.grad


def _all_grads(units: list[Any], others: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from others
    for unit in units:
        for param in unit.shard_params:
            if param.grad is not None:
                yield param.grad


def _scale(units: list[Any], others: list[torch.Tensor], factor: float) -> None:
    for unit in units:
        unit.scale_grads(factor)
    for grad in others:
        grad.mul_(factor)
