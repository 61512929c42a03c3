"""``fsdpc.memory_report``: the plan beside what a sharded model really holds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._comm.nccl import held_bytes
from fsdpc._comm.wire import default_dtype
from fsdpc._engine.interop import dtype_name
from fsdpc._engine.marks import hosts
from fsdpc._engine.shortage import process_bytes
from fsdpc._engine.tree import _slots
from fsdpc._plan.engine import EngineMemory, engine_memory
from fsdpc._plan.ledger import COMM_BYTES, CONTEXT_BYTES
from fsdpc._plan.model import CPU, Setup, Unit
from fsdpc._plan.modules import units_of_tree
from fsdpc._plan.show import plain_table, size
from fsdpc._torch import tree_leaves
from fsdpc.optim._host import HostStore

ROLES = {
    "shards": "master_bytes",
    "gradient shards": "grad_bytes",
    "gather slots": "gather_bytes",
    "reduce slots": "reduce_bytes",
    "no_sync gradients": "local_bytes",
}
MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1}


@dataclass(frozen=True)
class Line:
    """``planned`` None: not known beforehand, such as a foreign optimizer's states; ``assumed``:
    what the planner takes without a device, which does not describe a run.
    """

    role: str
    planned: int | None
    actual: int
    note: str = ""
    assumed: bool = False

    @property
    def differs(self) -> bool:
        return self.planned is not None and self.planned != self.actual and not self.assumed

    @property
    def verdict(self) -> str:
        if self.planned is None:
            return ""
        if self.assumed:
            return "assumed"
        return f"DIFFERS by {self.actual - self.planned:+,} B" if self.differs else "equal"


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank by role; ``str()`` is a table. ``equal``: all is as planned."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not any(line.differs for line in self.lines)

    def __str__(self) -> str:
        rows = [
            (
                line.role,
                "-" if line.planned is None else size(line.planned),
                size(line.actual),
                line.verdict,
                line.note,
            )
            for line in self.lines
        ]
        head = ("what", "planned", "actual", "", "")
        return "\n".join([plain_table("Memory of this rank", head, rows), *self.notes])


def memory_report(model: nn.Module, optimizer: Any = None) -> MemoryReport:
    """The plan of the engine's memory beside what this rank holds, differences marked. Local.

    ``optimizer``: its states are added, planned where torch's class is known. Process figures, and
    on a GPU those of torch's cache, follow as notes. ``StateError``: no forward has run yet, so
    that the slots do not exist. ``TypeError``: ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_report expects an nn.Module but got {type(model).__name__}")
    trees = [m._tree for m in hosts(model) if m._tree is not None]
    if not trees:
        raise _C.StateError(
            f"memory_report: {type(model).__name__} has no gather slots yet; run one forward first"
        )
    actual: dict[str, int] = {}
    planned: dict[str, int] = {}
    for tree in trees:
        stats = tree.memory_stats()
        for key, value in stats.items():
            actual[key] = actual.get(key, 0) + value
        for key, value in _planned(tree, stats["local_bytes"] > 0).items():
            planned[key] = planned.get(key, 0) + value
    lines = [Line(role, planned[key], actual[key]) for role, key in ROLES.items()]
    spare = actual["spare_bytes"]
    lines.append(
        Line("spare memory", 0, spare, "two units in use needed one slot" if spare else "")
    )
    lines.append(Line("buffers", None, sum(_nbytes(b) for b in model.buffers())))
    if optimizer is not None:
        lines.append(_states(optimizer))
    lines += _of_the_driver(trees, actual)
    return MemoryReport(tuple(lines), tuple(_notes(model)))


def _of_the_driver(trees: Sequence[Any], actual: dict[str, int]) -> Iterator[Line]:
    """What NCCL and the driver hold of the GPU, measured, beside what plans assume of it."""
    groups = [unit.groups for tree in trees for unit in tree.units]
    comms = {id(c): c for g in groups for c in (g.shard, g.replicate) if c is not None}.values()
    devices = {comm.device for comm in comms if comm.device is not None}
    if len(devices) != 1:
        return
    held = sum(held_bytes(comm) for comm in comms)
    assumed = sum(COMM_BYTES[min(comm.world, 3)] for comm in comms if comm.kind == "nccl")
    note = "NCCL, when it started; buffers that it makes later are in the next line"
    yield Line("communicators", assumed, held, note, assumed=True)
    device = devices.pop()
    free, total = _C.cuda_memory(device)
    known = held + sum(actual[key] for key in ("gather_bytes", "reduce_bytes", "spare_bytes"))
    if torch.cuda.is_available():
        known += torch.cuda.memory_reserved(device)
    else:  # the simulated GPU, whose driver has all of it
        known += sum(actual[key] for key in ("master_bytes", "grad_bytes", "local_bytes"))
    note = "what the GPU has in use beside torch's cache and the lines above, by all processes"
    yield Line("device context", CONTEXT_BYTES, max(total - free - known, 0), note, assumed=True)


def _planned(tree: Any, local: bool) -> dict[str, int]:
    total: dict[str, int] = {}
    for _, memory in _plans(tree, local):
        for key, value in memory.stats.items():
            total[key] = total.get(key, 0) + value
    return total


def planned_by_unit(tree: Any) -> list[dict[str, Any]]:
    """The footprint of each unit of a tree, in its order."""
    found: dict[int, dict[str, Any]] = {}
    for units, memory in _plans(tree, False):
        found.update(zip(map(id, units), memory.by_unit, strict=True))
    return [found[id(unit)] for unit in tree.units]


def _plans(tree: Any, local: bool) -> Iterator[tuple[list[Any], EngineMemory]]:
    """The plan of one tree: group by group, as their ranks may differ in number."""
    units = list(zip(units_of_tree(tree), tree.units, strict=True))
    for group in dict.fromkeys(plan.group for plan, _ in units):
        members = [(plan, unit) for plan, unit in units if plan.group == group]
        groups = members[0][1].groups
        replicas = groups.replicate.world if groups.replicate is not None else 1
        setup = setup_of(groups.shard, replicas, local)
        memory = engine_memory(tuple(reduced(p, u, setup) for p, u in members), setup)
        yield [unit for _, unit in members], memory


def setup_of(comm: Any, replicas: int, local: bool) -> Setup:
    world = comm.world * replicas
    strategy = "NO_SHARD" if comm.world == 1 else "HYBRID_SHARD" if replicas > 1 else "FULL_SHARD"
    where: dict[str, Any] = dict(CPU)
    if comm.device is not None:
        gpu = _C.cuda_device(comm.device)
        where = {"align_bytes": gpu["align_bytes"], "range_grain": gpu["grain_bytes"]}
    if comm.kind == "c10d" and comm.device is None:
        where["transport"] = "wire"
    return Setup(
        world=world,
        shard=comm.world if strategy == "HYBRID_SHARD" else 0,
        strategy=strategy,
        gather_slots=_slots("FSDPC_GATHER_SLOTS"),
        reduce_slots=_slots("FSDPC_REDUCE_SLOTS"),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        accumulation=2 if local else 1,
        sync="last" if local else "every",
        **where,
    )


def reduced(plan: Unit, unit: Any, setup: Setup) -> Unit:
    """With the dtype in which this run sends gradients where the user named none."""
    if unit.reduce_dtype is not None or setup.transport != "stream" or unit.param_dtype is None:
        return plan
    return replace(plan, reduce=dtype_name(default_dtype(unit.param_dtype, unit.groups.shard)))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def states_of(optimizer: Any) -> int:
    """Bytes of all tensors in an optimizer's state, on this rank."""
    return sum(_nbytes(t) for t in state_tensors(optimizer.state.values()))


def state_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in (a part of) an optimizer's state, each once; this rank's part of DTensors."""
    found = {id(leaf): leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)}
    return [t.to_local() if isinstance(t, DTensor) else t for t in found.values()]


def optimizers_of(units: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Those of the units' parameters, found among all objects: nothing keeps a list of them."""
    owned = {id(param) for unit in units for param in unit.shard_params}
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.optim.Optimizer)  # isinstance runs code of odd objects
        and any(id(p) in owned for group in one.param_groups for p in group["params"])
    ]


def _states(optimizer: Any) -> Line:
    store = getattr(optimizer, "_store", None)
    if store is not None:
        return _offloaded_states(optimizer, store)
    actual = states_of(optimizer)
    name = type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not optimizer.state:
        return Line("optimizer states", None, actual, f"{name} has not stepped yet")
    if name not in MOMENTS or any(
        g.get("amsgrad") or g.get("momentum") or g.get("centered") for g in optimizer.param_groups
    ):
        return Line("optimizer states", None, actual, name)
    moments = MOMENTS[name]
    steps = sum(4 for p in params if p in optimizer.state)
    planned = sum(moments * _nbytes(p) for p in params) + steps
    return Line(
        "optimizer states",
        planned if params else None,
        actual,
        f"{name}: {moments} moments in the parameter's dtype",
    )


def _offloaded_states(optimizer: Any, store: Any) -> Line:
    """What of them is beside the parameters."""
    planned = actual = sum(len(buffer) for buffer in store.buffers)
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = dict.get(optimizer.state, param, {})
            beside = optimizer._beside(param)
            here = [v for k, v in state.items() if k in beside or not store.takes(param)]
            actual += sum(_nbytes(t) for t in state_tensors(here))
            planned += sum(count for name, count in beside.items() if name in state)
            if state and not store.takes(param):
                planned += sum(extent.nbytes for extent in optimizer._extents(group, param))
    if isinstance(store, HostStore):
        note = f"{size(store.host_bytes)} more in pinned host memory, which pass through buffers"
    else:
        note = f"buffers; {size(_C.disk_info(store.disk)['bytes'])} of states on a disk"
    return Line("optimizer states", planned, actual, note)


def _notes(model: nn.Module) -> Iterator[str]:
    yield "gather slots on shared memory are counted once per host, not per rank"
    figures = process_bytes()
    if figures:
        yield (
            f"process: {size(figures['Pss_Anon'])} of its own, {size(figures['Pss_Shmem'])} its "
            "part of memory shared with other ranks"
        )
    devices = {
        m.compute_device
        for m in hosts(model)
        if getattr(m, "compute_device", None) is not None and m.compute_device.type == "cuda"
    }
    for device in devices if torch.cuda.is_available() else ():
        yield cache_line(device)


def cache_line(device: torch.device) -> str:
    """``fragmentation`` of a GPU that torch can use."""
    return fragmentation(torch.cuda.memory_stats(device), torch.cuda.memory_snapshot())


def largest_free(segments: Sequence[dict[str, Any]]) -> int:
    """The largest block that torch's cache could hand out without the driver, in bytes: of
    ``torch.cuda.memory_snapshot()``.
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
