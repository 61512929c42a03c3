"""Finding where the elements of each parameter lie in units of torch's FullyShardedDataParallel
(FSDP1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fsdpc._companions.spans import moved_to, table_of
from fsdpc._fsdp1.names import clean_fqn, join
from fsdpc.checkpoint.entries import Entry, OptimParam


def handles(model: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """Return ``(clean name of the wrapped module, wrapper, handle)`` of every unit of torch's
    class.
    """
    found = []
    for name, module in model.named_modules():
        handle = module.__dict__.get("_handle")
        if handle is not None and hasattr(getattr(handle, "flat_param", None), "_fqns"):
            found.append((clean_fqn(name), module, handle))
    return found


def add_units(found: Any, model: nn.Module) -> None:
    """Add the parameters of torch's units to ``found``. Local. ``RuntimeError``: a unit's
    parameters are gathered.
    """
    for name, module, handle in handles(model):
        flat_param = handle.flat_param
        local = flat_param.data
        if handle.uses_sharded_strategy and local.size() != flat_param._sharded_size:
            raise RuntimeError(
                f"unit {name!r} of torch's FSDP is gathered: save or load between steps, outside "
                "summon_full_params"
            )
        entries = _entries(name, handle, local.detach().view(-1), _replica(module, handle))
        shared = _shared(name, flat_param)
        for entry, _ in entries:
            found.add(entry, [entry.name, *shared.get(entry.name, [])])
        if flat_param._params is None:
            found.add_param(OptimParam(flat_param, entries))
            continue
        for (entry, spans), param in zip(entries, flat_param._params, strict=True):
            # The user's parameter is a view of this rank's elements, so its spans begin at 0.
            found.add_param(OptimParam(param, [(entry, moved_to(spans, 0))]))


def _entries(
    name: str, handle: Any, local: torch.Tensor, replica: tuple[int, int]
) -> list[tuple[Entry, np.ndarray]]:
    flat_param = handle.flat_param
    result = []
    numels = np.array(flat_param._numels_with_padding)  # elements of each parameter and padding
    begins = (np.cumsum(numels) - numels)[~np.array(flat_param._is_padding_mask, dtype=bool)]
    for fqn, shape, info, begin in zip(
        flat_param._fqns,
        flat_param._shapes,
        flat_param._shard_param_infos,
        begins.tolist(),
        strict=True,
    ):
        if not handle.uses_sharded_strategy:
            spans = table_of(0, begin, shape.numel())
        elif info.in_shard:
            spans = table_of(info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard)
        else:
            spans = table_of(0, 0, 0)
        full = clean_fqn(join(name, fqn))
        ranks = handle.process_group.size()
        if handle.uses_sharded_strategy:
            ranks *= replica[1]
        entry = Entry(full, tuple(shape), flat_param.dtype, local, spans, replica, ranks=ranks)
        result.append((entry, spans))
    return result


def _replica(module: nn.Module, handle: Any) -> tuple[int, int]:
    """Return this rank's index among the ranks that have the same elements, and how many these
    ranks are. With HYBRID_SHARD, these ranks are the group ``_inter_node_pg``. Without sharding,
    they are the unit's process group.
    """
    group = getattr(module, "_inter_node_pg", None)
    if not handle.uses_sharded_strategy:
        group = handle.process_group
    return (0, 1) if group is None else (dist.get_rank(group), group.size())


def _shared(name: str, flat_param: Any) -> dict[str, list[str]]:
    """Return a dict from the first name of each tied parameter to its other names."""
    found: dict[str, list[str]] = {}
    for info in flat_param._shared_param_infos:
        first = clean_fqn(join(name, join(info.prim_module_name, info.prim_param_name)))
        other = clean_fqn(join(name, join(info.module_name, info.param_name)))
        found.setdefault(first, []).append(other)
    return found
