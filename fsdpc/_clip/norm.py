"""Sums of powers, from which norms are computed: of one tensor, of several, and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor


def reduce_over_ranks(comm: Any, part: float, op: str, what: str) -> float:
    """Return the sum or maximum of ``part`` over ranks. Collective.

    A backend may drop a NaN, so a second number says whether any rank has a NaN.
    """
    values = np.array([0.0 if math.isnan(part) else part, math.isnan(part)], dtype=np.float64)
    comm.all_reduce(values, op=op, what=what)
    return math.nan if values[1] else float(values[0])


def by_comm(units: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """Group units by their sharding communicators; the order of the units is kept."""
    groups: dict[int, tuple[Any, list[Any]]] = {}
    for unit in units:
        comm = unit.groups.shard
        groups.setdefault(id(comm), (comm, []))[1].append(unit)
    return list(groups.values())


def sums_of_units(
    units: Iterable[Any], sum_of: Callable[[Any], float], norm_type: float, what: str
) -> Iterator[float]:
    """Yield for each sharding communicator the sum, or for the inf norm the maximum, of
    ``sum_of(unit)`` over the communicator's units and ranks. Collective: all ranks must pass units
    of the same communicators, in the same order.
    """
    for comm, members in by_comm(units):
        part = combine_of(norm_type)(map(sum_of, members))
        if comm.world > 1:
            part = reduce_over_ranks(comm, part, "max" if math.isinf(norm_type) else "sum", what)
        yield part


def combine_of(norm_type: float) -> Any:
    """Return the function that combines partial results: a sum, or for the inf norm a maximum.

    The maximum of values with a NaN is NaN, which Python's ``max`` does not ensure.
    """
    if not math.isinf(norm_type):
        return lambda values: float(sum(values))
    return lambda values: float(np.max(np.fromiter(values, dtype=np.float64), initial=0.0))


def root_of(total: float, norm_type: float) -> float:
    """Return the norm, given the sum of powers over all elements."""
    if math.isinf(norm_type) or norm_type == 0:
        return total
    return float(np.float64(total) ** (1.0 / norm_type))


def tensor_sum(grad: torch.Tensor, norm_type: float) -> float:
    """Return the sum of |x|^p in fp64; for p = 0 the number of non-zeros, for p = inf max |x|."""
    return powers_of(grad, norm_type).item()


def powers_of(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return what ``tensor_sum`` returns, but as a 0-dim tensor on the gradient's device."""
    wide = grad.detach().double().abs()
    if wide.numel() == 0:
        return wide.sum()
    if math.isinf(norm_type):
        return wide.max()
    return (wide != 0).sum() if norm_type == 0 else wide.pow(norm_type).sum()


def by_mesh(
    tensors: Sequence[Any], chosen: Callable[[Any], Any] = lambda tensor: tensor
) -> dict[Any, list[Any]]:
    """Group tensors by the mesh of the DTensor ``chosen(tensor)``.

    Tensors for which ``chosen(tensor)`` is no DTensor are left out. Tensors of one mesh keep their
    order. Local.
    """
    found: dict[Any, list[Any]] = {}
    last: Any = None
    members: list[Any] = []
    for tensor in tensors:
        value = chosen(tensor)
        if isinstance(value, DTensor):
            if value.device_mesh is not last:  # hashing a mesh is the slowest step here
                last = value.device_mesh
                members = found.setdefault(last, [])
            members.append(tensor)
    return found


def of_meshes(norms: Sequence[Any], norm_type: float) -> torch.Tensor:
    """Return the norm of DTensors of several meshes. Each of ``norms`` is the norm of one mesh's
    DTensors. The result is a plain tensor, because no mesh has all DTensors. Collective over the
    meshes.
    """
    whole = torch.stack([norm.full_tensor() for norm in norms])
    return whole.sum() if norm_type == 0 else torch.linalg.vector_norm(whole, norm_type)
