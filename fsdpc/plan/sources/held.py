"""What a run holds on this rank, beside the plan for it: lines of the ledger from trees, from
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
    """The engine's rows of these trees together. A tree without slots holds what its units have."""
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
    """The footprint of each unit of a tree, in the tree's order."""
    found: dict[int, dict[str, Any]] = {}
    for places, memory in _memories(tree, False):
        found.update(zip(places, memory.by_unit, strict=True))
    return [found[place] for place in sorted(found)]


def _memories(tree: Any, local: bool) -> Iterator[tuple[list[int], EngineMemory]]:
    """For each group, as numbers of ranks may differ: places of its units, and their memory."""
    plans = plans_of(tree, local)
    for group in dict.fromkeys(unit.group for unit, _ in plans):
        places = [i for i, (unit, _) in enumerate(plans) if unit.group == group]
        units = tuple(plans[i][0] for i in places)
        yield places, engine_memory(units, plans[places[0]][1])


def plans_of(tree: Any, local: bool) -> list[tuple[Unit, Setup]]:
    """Each unit of a tree as the planner has it, with the options of its group. ``local``: whether
    gradients of ``no_sync`` are kept.
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
    blocks = comm.kind == "c10d" and not comm.flies  # such a wire has 2 slots, not 3
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
    """The plan, with the dtype in which this run sends gradients if the user named none."""
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
    """The tensors in (a part of) an optimizer's state, each once; this rank's part of DTensors."""
    found = {id(leaf): leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)}
    return [t.to_local() if isinstance(t, DTensor) else t for t in found.values()]


def optimizers_of(units: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers of units' parameters, found among all objects: nobody keeps a list."""
    owned = {id(param) for unit in units for param in unit.shard_params}
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.optim.Optimizer)  # isinstance runs code of odd objects
        and any(id(p) in owned for group in one.param_groups for p in group["params"])
    ]


# --- torch's allocator ----------------------------------------------------------------------------


def gpu_of(tree: Any) -> torch.device | None:
    """The GPU of a tree, if torch can use it."""
    device = tree.units[0].device
    return device if device.type == "cuda" and torch.cuda.is_available() else None


def cache_line(device: torch.device) -> str:
    """The sentence of ``fragmentation`` for a GPU that torch can use."""
    return fragmentation(torch.cuda.memory_stats(device), torch.cuda.memory_snapshot())


def largest_free(segments: Sequence[dict[str, Any]]) -> int:
    """The largest block that torch's cache could hand out without the driver, in bytes.
    ``segments``: from ``torch.cuda.memory_snapshot()``.
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
