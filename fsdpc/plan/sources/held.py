"""The memory of a run on this rank, beside its plan: lines of a ledger, made from trees, from
optimizers and from torch's allocator.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._comm.wire import default_dtype
from fsdpc._engine.interop import dtype_name
from fsdpc._engine.tree import _slots
from fsdpc._torch import tree_leaves
from fsdpc.plan.cards import size
from fsdpc.plan.engine import EngineMemory, engine_memory
from fsdpc.plan.model import CPU, Setup, Unit
from fsdpc.plan.rows import ENGINE, Line
from fsdpc.plan.sources.modules import units_of_tree

# --- the engine -----------------------------------------------------------------------------------


def engine_lines(trees: Iterable[Any]) -> list[Line]:
    """Return the lines of the engine's roles, summed over these trees. A tree without slots has the
    shards of its units only.
    """
    planned: Counter[str] = Counter()
    actual: Counter[str] = Counter()
    for tree in trees:
        stats = {} if tree.core is None else tree.memory_stats()
        for _, memory in _memories(tree, stats.get("local_bytes", 0) > 0):
            planned.update(memory.stats)
            if tree.core is None:
                actual.update({k: memory.stats[k] for k in ("master_bytes", "grad_bytes")})
        actual.update(stats)
    note = {"spare memory": "two units in use needed one slot"} if actual["spare_bytes"] else {}
    return [
        Line(role, planned[stat], actual[stat], note.get(role, "")) for role, stat in ENGINE.items()
    ]


def planned_by_unit(tree: Any) -> list[dict[str, Any]]:
    """Return the footprint of each unit of a tree, in the order of the tree."""
    found: dict[int, dict[str, Any]] = {}
    for places, memory in _memories(tree, False):
        found.update(zip(places, memory.by_unit, strict=True))
    return [found[place] for place in sorted(found)]


def _memories(tree: Any, local: bool) -> Iterator[tuple[list[int], EngineMemory]]:
    """Yield, for each group of ranks, the positions of its units in the tree, and their memory.
    Groups are planned one by one, because they may have different numbers of ranks.
    """
    plans = plans_of(tree, local)
    for group in dict.fromkeys(unit.group for unit, _ in plans):
        places = [i for i, (unit, _) in enumerate(plans) if unit.group == group]
        units = tuple(plans[i][0] for i in places)
        yield places, engine_memory(units, plans[places[0]][1])


def plans_of(tree: Any, local: bool) -> list[tuple[Unit, Setup]]:
    """Return the planner's ``Unit`` for each unit of a tree, with the setup of its group of ranks.
    ``local``: whether gradients of ``no_sync`` are kept.
    """
    found = []
    for plan, unit in zip(units_of_tree(tree), tree.units, strict=True):
        groups = unit.groups
        setup = setup_of(groups.shard, groups.replicate, local)
        found.append((_reduced(plan, unit, setup), setup))
    return found


def setup_of(comm: Any, replicate: Any, local: bool) -> Setup:
    replicas = replicate.world if replicate is not None else 1
    world = comm.world * replicas
    strategy = "NO_SHARD" if comm.world == 1 else "HYBRID_SHARD" if replicas > 1 else "FULL_SHARD"
    where: dict[str, Any] = dict(CPU)
    if comm.device is not None:
        gpu = _C.cuda_device(comm.device)
        where = {"align_bytes": gpu["align_bytes"], "range_grain": gpu["grain_bytes"]}
    blocks = comm.kind == "c10d" and not comm.flies  # a blocking wire has 2 slots, not 3
    if comm.kind == "c10d" and comm.device is None:
        where.update(transport="wire", senders=comm.senders, receivers=comm.receivers)
    return Setup(
        world=world,
        shard=comm.world if strategy == "HYBRID_SHARD" else 0,
        strategy=strategy,
        gather_slots=_slots("FSDPC_GATHER_SLOTS") or (2 if blocks else 0),
        reduce_slots=_slots("FSDPC_REDUCE_SLOTS"),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        accumulation=2 if local else 1,
        sync="last" if local else "every",
        swaps=comm.device is None and replicate is not None and replicate.flies,
        **where,
    )


def _reduced(plan: Unit, unit: Any, setup: Setup) -> Unit:
    """Return ``plan``. If the user gave no dtype for gradients, set ``reduce`` to the dtype in
    which this run sends them.
    """
    if unit.reduce_dtype is not None or setup.transport != "stream" or unit.param_dtype is None:
        return plan
    return replace(plan, reduce=dtype_name(default_dtype(unit.param_dtype, unit.groups.shard)))


# --- optimizers -----------------------------------------------------------------------------------


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def states_of(optimizer: Any) -> int:
    """Bytes of all tensors in an optimizer's state, on this rank."""
    return nbytes(state_tensors(optimizer.state.values()))


def state_tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in an optimizer's state, or in a part of it, each once. A DTensor is
    replaced by its local tensor.
    """
    found = {id(leaf): leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)}
    return [t.to_local() if isinstance(t, DTensor) else t for t in found.values()]


def optimizers_of(units: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the units' parameters. The search covers all Python objects, because
    no list of optimizers exists.
    """
    owned = {id(param) for unit in units for param in unit.shard_params}
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.optim.Optimizer)  # isinstance may run an object's own code
        and any(id(p) in owned for group in one.param_groups for p in group["params"])
    ]


# --- torch's allocator ----------------------------------------------------------------------------


def gpu_of(tree: Any) -> torch.device | None:
    """Return the GPU of a tree. Return None if the tree is on the CPU or torch has no GPU."""
    device = tree.units[0].device
    return device if device.type == "cuda" and torch.cuda.is_available() else None


def cache_line(device: torch.device) -> str:
    """The sentence of ``fragmentation`` for a GPU that torch can use."""
    return fragmentation(torch.cuda.memory_stats(device), torch.cuda.memory_snapshot())


def largest_free(segments: Sequence[dict[str, Any]]) -> int:
    """Return the bytes of the largest block that torch's cache can give out without a call of the
    driver. ``segments``: from ``torch.cuda.memory_snapshot()``.
    """
    blocks = (block for segment in segments for block in segment["blocks"])
    return max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)


def fragmentation(stats: dict[str, Any], segments: Sequence[dict[str, Any]] = ()) -> str:
    """One sentence on torch's cache from ``torch.cuda.memory_stats`` and ``memory_snapshot``."""
    reserved, active = stats["reserved_bytes.all.current"], stats["active_bytes.all.current"]
    split = stats.get("inactive_split_bytes.all.current", 0)
    text = (
        f"torch's cache: {size(reserved)} reserved, {size(active)} active, {size(split)} in "
        "pieces between live blocks"
    )
    free, largest = reserved - active, largest_free(segments)
    if segments:
        text += f", the largest free block {size(largest)} of {size(free)} free"
    if reserved and split > reserved / 4:
        return text + (
            ": more than a quarter is in pieces; PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True makes pieces usable"
        )
    return text + ": not fragmented"
